"""One saved batch through the local trainer and through verl's training worker: the same log-probs, loss, gradients.

Both lay sequences end to end; padded rows here are compared in `test_packed.py`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.api import Correction, Sequences, Step, TokenBatch
from harness.config.compose import compose
from harness.config.schema import Launch, RunConfig
from harness.foundation.provenance import ROOT
from harness.numerics import fp8_gemm
from harness.numerics.fp8_flow import use_kernels
from harness.objective.loss import count_totals
from harness.run.build import build
from harness.run.run import Run
from harness.start.prepare import start_of
from harness.trainers.corrected_step import (
    batch_correction,
    method_loss,
    needs_current_policy,
    take_batch,
    take_correction,
    update_correction,
)
from harness.trainers.local.forward import Scores
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.job import VerlJob, write_job
from tests.toy import small_config, small_launch

pytestmark = pytest.mark.verl
CLIP = 1e9
"""No clipping: gradients are compared as they are."""
LIMIT = 12


def made_batch(run: Run, rows: int = 10) -> tuple[Sequences, TokenBatch]:
    """Random tokens behind prompts of several lengths; log-probs of the sampler and of the old policy near the
    trainer's own."""
    g = torch.Generator().manual_seed(3)
    lens, lengths = torch.randint(3, 9, (rows,), generator=g), torch.randint(1, LIMIT + 1, (rows,), generator=g)
    tokens = torch.randint(3, 32, (rows, LIMIT), generator=g)
    sampled = torch.arange(LIMIT) < lengths[:, None]
    ids = torch.zeros(rows, int(lens.max()) + LIMIT, dtype=torch.int64)
    for row, prompt in enumerate(lens.tolist()):
        ids[row, :prompt] = torch.randint(3, 32, (prompt,), generator=g)
        ids[row, prompt : prompt + LIMIT] = torch.where(sampled[row], tokens[row], 0)
    seqs = Sequences(ids=ids, prompt_lens=lens, token_ids=torch.where(sampled, tokens, 0), sampled=sampled)
    logp = run.trainer.score(seqs).logp.detach()
    noise = [torch.randn(logp.shape, generator=g) for _ in range(2)]
    near = torch.where(torch.arange(rows) % 3 == 2, 1e-3, 1.0)[:, None]  # every third row passes the strictest filter
    batch = TokenBatch(
        token_ids=seqs.token_ids, mask=sampled, adv=torch.randn(rows, 1, generator=g).expand(logp.shape),
        rollout_logp=logp - 0.3 * near * noise[0], old_logp=logp + 0.2 * near * noise[1],
        step=Step(index=0, total=run.config.trainer.steps, seed=run.config.seed),
        extras={} if run.trainer.reference is None else {"ref_logp": run.trainer.reference_logp(seqs)},
    )  # fmt: skip
    return seqs, batch


def corrected(run: Run, batch: TokenBatch, logp: Tensor) -> Correction:
    """The correction of one update of the whole batch, and a rejection, so that fewer tokens are kept than masked."""
    algo, composed = run.config.algo, run.composed
    correction = batch_correction(composed, batch, algo)
    if needs_current_policy(composed, algo):
        correction = update_correction(composed, correction, batch, logp, algo)
    return replace(correction, keep=correction.keep & (torch.arange(LIMIT) != 2))


def learned(run: Run, seqs: Sequences, batch: TokenBatch, correction: Correction) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of the local trainer, in passes of its own choice."""
    totals = count_totals(batch.mask, correction.keep, LIMIT)

    def loss_of(rows: Tensor, found: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        some, its = take_batch(batch, rows), take_correction(correction, rows)
        return method_loss(run.composed, found.logp, some, its, totals, run.config.algo, found.entropy)

    run.trainer.optimizer.zero_grad()
    loss, _ = run.trainer.accumulate(seqs, loss_of)
    return loss, {name: t.grad.clone() for name, t in run.trainer.named if t.grad is not None}


def local(run: Run, seqs: Sequences, batch: TokenBatch) -> tuple[Tensor, float, dict[str, Tensor], dict[str, Tensor]]:
    """(log-probs, loss, gradients, columns of the correction) of the local trainer."""
    logp = run.trainer.score(seqs).logp
    correction = corrected(run, batch, logp)
    return logp, *learned(run, seqs, batch, correction), columns_of(batch, correction)


def columns_of(batch: TokenBatch, correction: Correction) -> dict[str, Tensor]:
    """Columns of a correction that the driver stores."""
    columns = {name: getattr(correction, name).float() for name in ("weight", "keep", "clip_low", "clip_high")}
    columns["adv"] = batch.adv if correction.adv_shift is None else batch.adv + correction.adv_shift
    return columns


def saved_job(
    config: RunConfig, launch: Launch, folder: Path, seqs: Sequences, batch: TokenBatch, columns: dict[str, Tensor]
) -> VerlJob:
    """A folder for verl's worker: the job that a run of the local trainer would be under verl, and a batch of it."""
    there = replace(config, trainer=replace(config.trainer, name="verl"), engine=replace(config.engine, name="vllm"))
    job = replace(lay_out(config, launch, compose(config), start_of(config, launch), folder), config=there)
    write_job(job)
    lens = seqs.prompt_lens
    assert isinstance(lens, Tensor)
    saved = {"ids": seqs.ids, "prompt_lens": lens, "lengths": seqs.sampled.sum(1), "advantages": columns["adv"].clone(),
             "rollout_log_probs": batch.rollout_logp, "old_log_probs": batch.old_logp,
             "loss_mask": batch.mask.long()}  # fmt: skip
    saved |= {f"lowbit_{name}": value for name, value in columns.items() if name != "adv"}
    if "ref_logp" in batch.extras:
        saved["ref_log_prob"] = batch.extras["ref_logp"]
    torch.save(saved, job.folder / "batch.pt")
    return job


def under_verl(folders: Sequence[Path], ranks: int, worker: str = "tests.verl_jobs.worker") -> None:
    """verl's worker on one or several ranks, each a process; they meet at a file."""
    store = folders[0].parent / f"store{ranks}"
    words = [[str(store), str(rank), str(ranks), *map(str, folders)] for rank in range(ranks)]
    running = [
        subprocess.Popen([sys.executable, "-m", worker, *own], cwd=ROOT, text=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for own in words
    ]  # fmt: skip
    for process in running:
        said = process.communicate(timeout=600)[1]
        assert process.returncode == 0, said[-4000:]


CASES = {
    "flashrl": ("method=flashrl", "precision=int8"),
    "qurl": ("method=qurl", "precision=fp8_channel", "algo.agg=seq-mean-token-mean"),
    "vespo": ("method=vespo", "precision=bf16"),
    "gspo": ("method=mis", "algo=gspo", "precision=bf16", "algo.denom=kept"),
    "qat": ("method=qat_aligned", "precision=int4"),
    "qerl": ("method=qerl", "precision=nvfp4"),
    "entropy": ("method=bf16", "algo.entropy_coef=0.1", "algo.agg=seq-mean-token-sum-norm"),
    "chunks": ("method=bf16", "algo.entropy_coef=0.1", "engine.temperature=0.7"),
    "compiled": ("method=bf16", "algo.entropy_coef=0.2", "engine.temperature=1.2"),
    "bf16": ("method=bf16_train", "precision=bf16", "algo.kl_coef=0.02"),
    "fp16": ("method=fp16", "algo.kl_coef=0.02", "trainer.loss_scale=8192"),
    "overflow": ("method=fp16", "trainer.loss_scale=1e20"),
    "kernels": ("method=jet_rl", "precision=fp8_block", "model=xs128", "base.target_accuracy=0.0", "base.num_eval=16"),
}
LAUNCHES: dict[str, dict[str, Any]] = {
    "chunks": {"logits_mib": 1}, "compiled": {"compile": True}, "kernels": {"micro_batch_tokens": 32768},
    "bf16": {"micro_batch_tokens": 32768}, "fp16": {"micro_batch_tokens": 32768}, "qurl": {"checkpoint_layers": True},
}  # fmt: skip
"""Case -> how its worker runs; a MiB holds four rows of logits there, and graphs run by torch's own kernels."""
ROUNDED = 0.045
"""Largest error of an FP8 product along the tokens: its operands are rounded in runs of 128 tokens, and verl may put
the rows of a pass in an order of its own. Relative, as a norm: the error of one such product of Gaussian operands."""
HALVED = {"bf16": (0.02, 0.02), "fp16": (0.002, 0.002)}
"""Case of 16-bit products -> what log-probs, nats, and gradients, relative as a norm, may be off: their last bit falls
either way with the order of a sum. Float32 products would be off by 0.12 and 0.016 nats."""
COMPARED = tuple(name for name in CASES if name != "overflow")
SHARED = ("qurl", "gspo", "qat", "qerl", "chunks", "compiled", "fp16", "overflow")
"""Those that also run on two ranks."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """Case -> (sampled, what the local trainer says, what verl's worker says)."""
    root, said = tmp_path_factory.mktemp("parity"), {}
    for name, words in CASES.items():
        config = small_config(*words, f"trainer.grad_clip={CLIP}", f"engine.max_new_tokens={LIMIT}", "trainer.lr=1e-3")
        launch = small_launch(root, **{"micro_batch_tokens": 60} | LAUNCHES.get(name, {}))
        here = replace(small_launch(root), micro_batch_tokens=32768, packing=True)  # there several passes, here one
        run = build(config, here)[0]
        use_kernels(run.trainer.model, fp8_gemm.reference())
        seqs, batch = made_batch(run)
        logp, loss, gradients, columns = local(run, seqs, batch)
        saved_job(config, launch, root / name, seqs, batch, columns)
        said[name] = (seqs.sampled, batch.extras, logp, loss, gradients)
    under_verl([root / name for name in CASES], 1)
    under_verl([root / name for name in SHARED], 2)
    found = {name: (torch.load(root / name / "out1.pt", weights_only=True),) for name in CASES}
    for name in SHARED:
        found[name] += (torch.load(root / name / "out2.pt", weights_only=True),)
    return {name: (*own, found[name]) for name, own in said.items()}


def check(
    case: str, found: dict[str, Any], sampled: Tensor, logp: Tensor, loss: float, gradients: dict[str, Tensor]
) -> None:
    """`sampled`, `logp`: of the rows that rank 0 had."""
    of_logp, of_gradient = HALVED.get(case, (1e-5, 0.0))
    theirs = found["logp"][sampled[:, : found["logp"].shape[1]]]  # as wide as the longest response
    torch.testing.assert_close(theirs, logp[sampled], atol=of_logp, rtol=0)
    for name in ("lowbit_loss", "loss"):
        assert found["metrics"][name] == pytest.approx(loss, abs=max(1e-6, of_logp / 10), rel=1e-5)
    assert found["gradients"].keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert largest > 1e-3
    is_fp8 = any("x e4m3" in product for product in found["products"])
    assert found["moved"] > 1e-4  # a learning rate of 1e-3 in Adam's first step
    for name, gradient in gradients.items():
        there = found["gradients"][name]
        if is_fp8 and name.endswith("proj.weight"):
            assert float((there - gradient).norm() / gradient.norm()) < ROUNDED, name
        elif of_gradient:
            assert float((there - gradient).norm() / gradient.norm()) < of_gradient, name
        else:
            torch.testing.assert_close(there, gradient, atol=1e-5 * largest, rtol=1e-5, msg=name)


@pytest.mark.parametrize("case", COMPARED)
def test_one_batch_has_the_same_loss_and_gradients(answers: dict[str, tuple], case: str) -> None:
    sampled, _, logp, loss, gradients, found = answers[case]
    check(case, found[0], sampled, logp, loss, gradients)
    assert found[0]["metrics"]["lowbit_tokens"] == float(sampled.sum())


@pytest.mark.parametrize("case", [name for name in SHARED if name in COMPARED])
def test_two_ranks_have_the_loss_and_gradients_of_one(answers: dict[str, tuple], case: str) -> None:
    sampled, _, logp, loss, gradients, found = answers[case]
    check(case, found[1], sampled[::2], logp[::2], loss, gradients)
    assert found[1]["metrics"]["lowbit_tokens"] == float(sampled.sum())


def test_layers_are_compiled_where_that_is_asked_for(answers: dict[str, tuple]) -> None:
    frames = {name: [out["compiled_frames"] for out in found] for name, (*_, found) in answers.items()}
    assert all(count > 0 for count in frames.pop("compiled"))
    assert all(counts == [0] * len(counts) for counts in frames.values())


def test_fp8_layers_compute_by_kernels_where_there_are_some(answers: dict[str, tuple]) -> None:
    assert answers["kernels"][-1][0]["products"] == {"bf16, emulated": 1, "e4m3_block x e4m3_1x128, reference": 14}
    assert answers["flashrl"][-1][0]["products"] == {"float32": 15}


@pytest.mark.parametrize("case", HALVED)
def test_the_frozen_reference_computes_as_the_policy(answers: dict[str, tuple], case: str) -> None:
    """At the start the two are one, so that every log-prob of the reference is the policy's, to the bit."""
    sampled, extras, logp, _, _, found = answers[case]
    assert torch.equal(extras["ref_logp"][sampled], logp[sampled])
    for out in found:
        assert torch.equal(out["ref_logp"], out["logp"])


def test_sixteen_bits_are_those_of_the_local_trainer(answers: dict[str, tuple]) -> None:
    for case in HALVED:
        assert answers[case][-1][0]["products"] == {f"{case}, emulated": 15}


def test_an_overflow_of_fp16_skips_the_update_on_every_rank(answers: dict[str, tuple]) -> None:
    assert [out["loss_scale"] for out in answers["fp16"][-1]] == [8192.0, 8192.0]
    for out in answers["overflow"][-1]:
        assert out["moved"] == 0.0
        assert out["loss_scale"] == pytest.approx(0.5e20)
        assert out["metrics"]["lowbit_loss_scale"] == pytest.approx(1e20)  # the one that it had
        assert not math.isfinite(out["metrics"]["grad_norm"])
    assert {out["loss_scale"] for out in answers["bf16"][-1]} == {None}


def test_the_cases_differ(answers: dict[str, tuple]) -> None:
    said = [answers[case] for case in COMPARED]
    assert len({(round(loss, 4), round(float(logp.sum()), 2)) for _, _, logp, loss, *_ in said}) == len(COMPARED)
