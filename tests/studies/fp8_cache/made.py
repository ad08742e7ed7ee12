"""A small decoder and answers that the tests of FP8 caches share."""

from __future__ import annotations

import torch

from harness.models.decoder import Decoder
from harness.studies.fp8_cache.answers import Answers
from tests.engines.engine_cases import QWEN3, decoder


def sharp() -> Decoder:
    """A random decoder with sharp distributions: 3 layers, 4 heads on 2 key-value heads."""
    return decoder(QWEN3, std=0.2)


def answers() -> Answers:
    """Three prompts of other lengths with an answer of 6, 4 and 5 tokens."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 24, (3, 14), generator=draws)
    given = Answers(ids=ids, prompt_lens=torch.tensor([8, 5, 3]), lens=torch.tensor([6, 4, 5]))
    is_prompt, is_answer = given.places()
    return Answers(ids=ids * (is_prompt | is_answer), prompt_lens=given.prompt_lens, lens=given.lens)
