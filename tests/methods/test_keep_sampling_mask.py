"""Keep sampling mask: golden log-probs over a truncated support, gradients outside it, runs with top-p sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.api import Step
from harness.config.compose import compose
from harness.engines.embedded.sampling import nucleus
from harness.foundation.clock import Clock
from harness.numerics.logprobs import selected_logp
from harness.run.checks import check
from harness.run.collect import collect
from harness.run.loop import evaluate, grpo_step, push_weights
from harness.trainers.local.forward import masked
from methods.keep_sampling_mask import METHOD, KeepSamplingMask
from tests.loss_cases import STEP, assert_exact, assert_published
from tests.toy import small_config, small_run

OLD = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
NEW = torch.tensor([[1.5, 1.0, 0.5, -1.0]], dtype=torch.float64)


def test_golden_log_probs_and_ratios() -> None:
    full = OLD.log_softmax(-1)
    assert_published(full.exp().cumsum(-1)[0, :3].tolist(), [0.643914, 0.880797, 0.967941])
    sampler = nucleus(full, 0.9)
    allowed = sampler > -torch.inf
    assert allowed.tolist() == [[True, True, True, False]]
    assert_published(sampler[0, :3].tolist(), [-0.407606, -1.407606, -2.407606])
    token = torch.tensor([0])
    old, new = (selected_logp(masked(logits, allowed), token, 1.0)[0] for logits in (OLD, NEW))
    whole = selected_logp(NEW, token, 1.0)[0]
    assert_published([old.item(), new.item(), whole.item()], [-0.407606, -0.680270, -0.721003])
    assert_published((new - old).exp().item(), 0.761349)
    assert_published((whole - old).exp().item(), 0.730960)  # renormalised at the sampler alone


def test_probabilities_sum_to_1_over_the_support_and_no_gradient_leaves_it() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 12, generator=rng, dtype=torch.float64).requires_grad_()
    allowed = nucleus(logits.detach().log_softmax(-1), 0.8) > -torch.inf
    assert allowed.any(-1).all() and 0 < (~allowed).sum() < allowed.numel()
    tokens = torch.where(allowed, logits.detach(), -torch.inf).argmax(-1)
    columns = [selected_logp(masked(logits, allowed), torch.full((50,), v), 1.0)[0] for v in range(12)]
    probabilities = torch.stack(columns, -1).exp()
    assert (probabilities[~allowed] == 0).all()
    assert_exact(probabilities.sum(-1), torch.ones(50, dtype=torch.float64))
    logp, entropy = selected_logp(masked(logits, allowed), tokens, 1.0, entropy_grad=True)
    terms = torch.where(allowed, probabilities * probabilities.clamp(min=1e-300).log(), 0.0)
    assert_exact(entropy, -terms.sum(-1))
    (grad,) = torch.autograd.grad((logp + entropy).sum(), logits)
    assert (grad[~allowed] == 0).all() and torch.isfinite(grad).all() and (grad[allowed] != 0).any()
    everything = torch.ones_like(allowed)
    for mask in (everything, None):
        assert torch.equal(masked(logits, mask), logits)


def sampled(folder: Path, *words: str):
    """(run, its first rollout batch)."""
    run = small_run(folder, ["method=keep_sampling_mask", *words])
    step = Step(index=0, total=4, seed=0)
    push_weights(run, step)
    return run, collect(run, step, Clock("cpu"))


def test_with_the_mask_the_trainer_scores_what_was_sampled(tmp_path: Path) -> None:
    """In float32 both sides agree to 1e-5 over the support; over the whole vocabulary they are far apart."""
    run, batch = sampled(tmp_path, "precision=fp32", "engine.top_p=0.7", "engine.temperature=1.3")
    seqs, rollout = batch.seqs, batch.rollout
    assert seqs.allowed is not None and rollout.log_probs is not None
    inside = seqs.allowed.gather(-1, seqs.token_ids[..., None])[..., 0]
    assert inside[seqs.sampled].all() and seqs.allowed[~seqs.sampled].all()
    sizes = seqs.allowed[seqs.sampled].sum(-1)
    assert sizes.min() == 1 and sizes.max() < seqs.allowed.shape[-1]
    gap = (run.trainer.score(seqs).logp - rollout.logp)[seqs.sampled].abs()
    assert gap.max() < 1e-5
    assert (run.trainer.score(replace(seqs, allowed=None)).logp - rollout.logp)[seqs.sampled].min() < -0.2
    rows = torch.tensor([3, 0])
    taken = seqs.take(rows).allowed
    assert taken is not None and torch.equal(taken, seqs.allowed[rows])


@pytest.mark.parametrize("words", [(), ("engine.temperature=1.3",)])
def test_every_layout_of_a_pass_has_the_same_log_probs(words: tuple[str, ...], tmp_path: Path) -> None:
    run, batch = sampled(tmp_path, "precision=int4", "engine.top_p=0.7", *words)
    expected = run.trainer.score(batch.seqs).logp
    for packing in (False, True):
        for logits_mib in (0, 1024):
            run.trainer.thrift = replace(run.trainer.thrift, packing=packing, logits_mib=logits_mib)
            torch.testing.assert_close(run.trainer.score(batch.seqs).logp, expected, atol=1e-5, rtol=1e-5)
    run.trainer.micro_batch_rows = 3
    torch.testing.assert_close(run.trainer.score(batch.seqs).logp, expected, atol=1e-5, rtol=1e-5)


def test_runs_with_and_without_truncation(tmp_path: Path) -> None:
    """top_p 1 is the run without the part, bit for bit; below 1 the mismatch stays that of the format."""
    rows = {
        words: grpo_step(small_run(tmp_path, words))
        for words in (
            ("method=naive", "precision=int4"),
            ("method=keep_sampling_mask", "precision=int4"),
            ("method=keep_sampling_mask", "precision=int4", "engine.top_p=0.7"),
        )
    }
    plain, whole, cut = rows.values()
    for key in ("train/loss", "train/grad_norm", "mismatch/kl_k3", "reward/mean"):
        assert plain[key] == whole[key] != cut[key]
    assert 0 < cut["mismatch/kl_k3"] < 3 * plain["mismatch/kl_k3"]


def test_a_reference_and_evaluations_live_with_it(tmp_path: Path) -> None:
    words = ["method=keep_sampling_mask", "precision=fp32", "engine.top_p=0.7", "algo.kl_coef=0.1"]
    run = small_run(tmp_path, words)
    row = grpo_step(run)
    assert 0 <= row["train/kl_ref"] < 1e-6  # equal policies: the reference has the same support
    evaluate(run)
    assert len(run.evals) == 2


def test_method_and_refusals() -> None:
    assert METHOD.parts == (KeepSamplingMask(),) and METHOD.parts[0].needs(STEP) == {"allowed_ids"}
    with pytest.raises(ValueError, match=r"engine.top_p=0.9: truncated sampling is not what is scored"):
        compose(small_config("method=naive", "engine.top_p=0.9"))
    compose(small_config("method=naive", "engine.top_p=0.9", "parts=[keep_sampling_mask.KeepSamplingMask]"))
    with pytest.raises(ValueError, match=r"engine=vllm: cannot do allowed_ids of method keep_sampling_mask"):
        check(small_config("method=keep_sampling_mask", "engine=vllm", "precision=int8", "model=xs128"))
