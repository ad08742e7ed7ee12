"""Memory savings for long sequences on a CUDA device: the same numbers as without them, and the allocator's peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import Sequences
from harness.foundation.seeds import generator
from harness.models.decoder import Decoder, DecoderConfig
from harness.trainers.local.forward import Scores, Thrift, prepared
from tests.trainers.local.test_forward import CONFIG, model_of, run, sequences

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
OPTIONS = {
    "checkpoints": {"checkpoint": True},
    "packing": {"packing": True},
    "chunks": {"logits_mib": 1},
    "all": {"checkpoint": True, "packing": True, "logits_mib": 1},
}


def moved(seqs: Sequences) -> Sequences:
    lens = seqs.prompt_lens if isinstance(seqs.prompt_lens, int) else seqs.prompt_lens.to(DEVICE)
    tensors = {name: getattr(seqs, name).to(DEVICE) for name in ("ids", "token_ids", "sampled")}
    return replace(seqs, prompt_lens=lens, **tensors)


def far(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative distance of a gradient."""
    return max(
        float((a.cpu() - b.cpu()).norm() / b.norm().cpu().clamp_min(1e-6)) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("build", ["plain", "fake_quant", "lora"])
def test_every_option_gives_the_numbers_of_the_cpu(monkeypatch: pytest.MonkeyPatch, build: str, option: str) -> None:
    """Attention kernels of another device may round products to TF32, hence a thousandth."""
    wanted, gradients = run(model_of(build), sequences())
    if "logits_mib" in OPTIONS[option]:
        monkeypatch.setattr("harness.trainers.local.forward.FLOATS_PER_MIB", 48 * 5)
    found, got = run(model_of(build).to(DEVICE), moved(sequences()), **OPTIONS[option])
    torch.testing.assert_close(found.logp.cpu(), wanted.logp, rtol=1e-3, atol=1e-3)
    assert far(got, gradients) < 1e-2


@pytest.mark.parametrize("build", ["bf16", "fp16", "lora_bf16"])
def test_native_products_are_the_emulated_ones(build: str) -> None:
    model, seqs = model_of(build).to(DEVICE), moved(sequences())
    wanted, gradients = run(model, seqs)
    found, got = run(prepared(model, Thrift(native_16bit=True)), seqs)
    assert 0 < (found.logp - wanted.logp).abs().max() < 0.1
    assert far(got, gradients) < 0.05


def peak(config: DecoderConfig, seqs: Sequences, **values: Any) -> int:
    """Bytes at the peak of one forward and backward pass beyond what was there before."""
    model = Decoder(config, generator=generator("cpu", 0, "forward")).to(DEVICE)
    for _ in range(2):  # the first allocates what libraries keep
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found: tuple[Scores, list[Tensor]] | None = run(model, seqs, **values)
        del found
    return torch.cuda.max_memory_allocated() - before


def test_each_option_holds_less() -> None:
    ids = torch.arange(4 * 512).view(4, 512) % 48
    seqs = moved(Sequences(ids=ids, prompt_lens=2, token_ids=ids[:, 2:], sampled=torch.ones(4, 510, dtype=torch.bool)))
    deep = replace(CONFIG, num_layers=16, hidden_size=128, head_dim=32, intermediate_size=512)
    assert peak(deep, seqs, checkpoint=True) < 0.4 * peak(deep, seqs)
    wide = replace(CONFIG, num_layers=1, vocab_size=32768)
    logits = 4 * 2040 * 32768
    assert peak(wide, seqs) > 3 * logits
    assert peak(wide, seqs, logits_mib=16) < 0.6 * logits
    uneven = replace(
        seqs, sampled=torch.arange(510, device=DEVICE) < torch.tensor([[510], [8], [8], [8]], device=DEVICE)
    )
    assert peak(deep, uneven, packing=True) < 0.6 * peak(deep, uneven)
