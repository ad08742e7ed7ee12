"""Ranks that share every sequence: the loss and gradients of one rank, with several passes of real tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.run.build import build
from tests.toy import small_config, small_launch
from tests.verl_jobs.test_parity import CLIP, LIMIT, check, local, made_batch, saved_job, under_verl

pytestmark = pytest.mark.verl
CASES = {
    "plain": ("method=bf16", "algo.entropy_coef=0.1", "algo.kl_coef=0.02", "engine.temperature=0.7"),
    "flashrl": ("method=flashrl", "precision=int8"),
    "qat": ("method=qat_aligned", "precision=int4"),
    "gspo": ("method=mis", "algo=gspo", "precision=bf16", "algo.denom=kept"),
    "one pass": ("method=vespo", "precision=bf16"),
}
LAUNCHES: dict[str, dict[str, Any]] = {
    "plain": {"logits_mib": 1}, "qat": {"checkpoint_layers": True}, "one pass": {"micro_batch_tokens": 32768},
}  # fmt: skip
"""Case -> how its workers run; a MiB holds four rows of logits there."""


@pytest.fixture(scope="module", params=[2, 4])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """Case -> (sampled, log-probs, those of the reference, loss and gradients of the local trainer on one rank, what
    verl's workers say, every how many rows rank 0 had)."""
    root, said, ranks = tmp_path_factory.mktemp("ulysses"), dict[str, tuple[Any, ...]](), request.param
    for name, words in CASES.items():
        config = small_config(*words, f"trainer.grad_clip={CLIP}", f"engine.max_new_tokens={LIMIT}", "trainer.lr=1e-3")
        launch = small_launch(root, **{"micro_batch_tokens": 30} | LAUNCHES.get(name, {}))  # 60 of two ranks
        run = build(config, replace(launch, micro_batch_tokens=32768, logits_mib=1024, packing=True))[0]
        seqs, batch = made_batch(run, rows=8)
        logp, loss, gradients, columns = local(run, seqs, batch)
        shared = replace(launch, gpus=ranks, sequence_parallel=2)
        saved_job(config, shared, root / name, seqs, batch, columns)
        said[name] = (seqs.sampled, batch.extras, logp, loss, gradients)
    under_verl([root / name for name in said], ranks)
    found = {name: torch.load(root / name / f"out{ranks}.pt", weights_only=True) for name in said}
    return {name: (*own, found[name], ranks // 2) for name, own in said.items()}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_sequences_have_the_loss_and_gradients_of_one(
    answers: dict[str, tuple[Any, ...]], case: str
) -> None:
    """Two ranks share all rows; of four, two share half of them."""
    sampled, extras, logp, loss, gradients, found, every = answers[case]
    check(case, found, sampled[::every], logp[::every], loss, gradients)
    assert found["metrics"]["lowbit_tokens"] == float(sampled.sum())
    if "ref_logp" in extras:
        own = sampled[::every]
        there = found["ref_logp"][own[:, : found["ref_logp"].shape[1]]]
        torch.testing.assert_close(there, extras["ref_logp"][::every][own], atol=1e-5, rtol=0)


def test_the_cases_differ(answers: dict[str, tuple[Any, ...]]) -> None:
    assert len({round(loss, 4) for _, _, _, loss, *_ in answers.values()}) == len(CASES)
