"""Text bases on a GPU: graphs of whole steps give what plain steps give; a small base is learnt and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.models.decoder import DecoderConfig
from harness.start.base_model import train_base
from harness.start.base_training import TrainingHost, Unfinished
from harness.start.text_documents import Documents, buckets_of
from harness.start.text_step import EAGER_STEPS, PackedDecoder, PackedStep
from harness.start.text_training import TextRecipe, new_decoder
from harness.tasks.wordmath import Wordmath

pytestmark = pytest.mark.gpu
SHAPE = DecoderConfig(
    vocab_size=512, num_layers=2, hidden_size=128, num_heads=6, num_kv_heads=2, head_dim=64, intermediate_size=256,
    bos_id=2, eos_id=1, pad_id=0,
)  # fmt: skip
TASK = Wordmath(n=4)


@pytest.mark.parametrize("has_muon", [False, True])
def test_replayed_steps_are_plain_steps(has_muon: bool) -> None:
    """The same batches, once with graphs and once without: BF16 sums in no fixed order, so the losses agree closely."""
    buckets = buckets_of(TASK, (2, 3), 4096, 4096)
    documents = Documents(task=TASK, buckets=tuple(buckets), tokens=4096, base_seed=0, max_steps=60)
    losses: list[list[float]] = []
    for keeps_graphs in (True, False):
        step = PackedStep(new_decoder(SHAPE, 0).to("cuda"), buckets, 4096, (0.9, 0.95), 0.1, 1.0, has_muon)
        found: list[float] = []
        for number in range(1, 61):
            if not keeps_graphs:
                step.calls = [0] * len(buckets)
            step(documents[number], 1e-3)
            found.append(float(step.loss))
        assert len(step.graphs) == (sum(calls > EAGER_STEPS for calls in step.calls) if keeps_graphs else 0)
        losses.append(found)
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 0.05


def test_flash_attention_of_documents_is_the_cpus() -> None:
    buckets = buckets_of(TASK, (), 2048, 4096)
    batch = Documents(task=TASK, buckets=tuple(buckets), tokens=2048, base_seed=0, max_steps=9)[1]
    model = new_decoder(SHAPE, 0)
    expected = PackedDecoder(model, torch.float32, buckets[0].longest).losses(batch.ids, batch.ends, buckets[0].longest)
    model = model.to("cuda")
    decoder = PackedDecoder(model, torch.bfloat16, buckets[0].longest)
    found = decoder.losses(batch.ids.cuda(), batch.ends.cuda(), buckets[0].longest).cpu()
    inside = batch.wanted > 0
    assert float((found - expected)[inside].abs().max()) < 0.1 and float((found - expected)[inside].mean().abs()) < 5e-3


def test_a_base_is_learnt_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    task = Wordmath(n=3, layout="ordered", num_names=8)
    recipe = TextRecipe(target_accuracy=0.1, eval_every=50, num_eval=256, max_steps=1500, batch_tokens=8192, sizes=(2,))
    polls = iter([False] * 60 + [True])
    host = TrainingHost(device="cuda", state=tmp_path / "state.pt", should_stop=lambda: next(polls), workers=2)
    with pytest.raises(Unfinished, match=r"stopped after \d+ steps"):
        train_base(SHAPE, task, recipe, 0, tmp_path / "base", None, host)
    host = TrainingHost(device="cuda", state=tmp_path / "state.pt", workers=2)
    record = train_base(SHAPE, task, recipe, 0, tmp_path / "base", None, host)
    assert record["is_target_reached"] and record["accuracy"] > 0.05 and record["steps"] > 61
    assert record["tokens"] == record["steps"] * 8192 and record["tokens_per_s"] > 0
