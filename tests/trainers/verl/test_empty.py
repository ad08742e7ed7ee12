"""The policy of ranks that read nothing: shapes, dtypes and classes of the one that rank 0 reads, without verl."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.config.compose import compose
from harness.foundation.seeds import generator
from harness.models import checkpoint
from harness.models.decoder import Decoder, DecoderConfig
from harness.start.prepare import start_of
from harness.trainers.local.policy import computing
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.job import composed_of
from harness.trainers.verl.reference import policy_of
from tests.toy import small_config, small_launch

CASES = (
    ("method=bf16",), ("method=fp16",), ("method=jet_rl", "model=xs128", "base.target_accuracy=0", "base.num_eval=16"),
    ("method=qat_aligned", "precision=nvfp4"), ("method=qat_rtn", "precision=int4"), ("method=qerl", "precision=nvfp4"),
    ("method=qlora", "precision=nf4"), ("method=bf16_lora",),
)  # fmt: skip


def described(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """Name -> (shape, dtype, trained or not, class of the module that holds it)."""
    held = [*model.named_parameters(), *model.named_buffers()]
    kinds = {name: type(model.get_submodule(name.rpartition(".")[0])) for name, _ in held}
    return {name: (tuple(t.shape), t.dtype, t.requires_grad, kinds[name]) for name, t in held}


@pytest.mark.parametrize("words", CASES)
def test_an_empty_policy_differs_from_the_read_one_by_its_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    config, launch = small_config(*words), small_launch(tmp_path)
    job = lay_out(config, launch, compose(config), start_of(config, launch), tmp_path / "verl")
    composed = composed_of(job)
    read = computing(policy_of(job, composed), composed.plan)
    monkeypatch.setattr(checkpoint, "read_tensors", None)  # a call would end the test
    empty = computing(policy_of(job, composed, is_empty=True), composed.plan)
    assert described(empty) == described(read)
    assert all(t.is_meta for t in [*empty.parameters(), *empty.buffers()])
    assert not any(t.is_meta for t in [*read.parameters(), *read.buffers()])
    tied = [m.lm_head.weight is m.model.embed_tokens.weight for m in (empty, read)]
    assert tied[0] == tied[1]


def test_a_decoder_without_values_takes_no_memory() -> None:
    config = DecoderConfig(
        vocab_size=64, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24
    )
    with torch.device("meta"):
        empty = Decoder(config)
    full = Decoder(config, generator=generator("cpu", 0, "full"))
    assert all(p.is_meta for p in empty.parameters())
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in full.named_parameters()}
    for name, table in full.named_buffers():  # of constants, which no checkpoint brings
        assert torch.equal(dict(empty.named_buffers())[name], table)
