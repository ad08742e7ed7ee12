"""The local trainer: the factor of a step, and divergences of whole distributions by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.api import Step
from harness.foundation.clock import Clock
from harness.models.decoder import response_hidden
from harness.run.collect import collect
from harness.run.loop import push_weights
from harness.run.run import Collected, Run
from tests.toy import small_run

STEP = Step(index=0, total=4, seed=0)


def sampled(folder: Path, *words: str) -> tuple[Run, Collected]:
    """A run whose engine keeps its distributions, and its first batch."""
    run = small_run(folder, ["method=jackpot", "knobs.Jackpot.source=full", *words])
    push_weights(run, STEP)
    return run, collect(run, STEP, Clock("cpu"))


def whole(run: Run, batch: Collected) -> Tensor:
    """Log-probs of the trainer over the vocabulary, [B, T, V]."""
    seqs = batch.seqs
    model = run.trainer.model
    with torch.no_grad():
        hidden = response_hidden(model, seqs.ids, seqs.prompt_lens, seqs.token_ids.shape[1])
        return (model.head(hidden) / run.trainer.temperature).log_softmax(-1)


@pytest.mark.parametrize("words", [(), ("engine.temperature=1.4",)])
def test_divergences_are_those_of_the_two_distributions(words: tuple[str, ...], tmp_path: Path) -> None:
    run, batch = sampled(tmp_path, "precision=int3", *words)
    log_p, log_q = batch.rollout.log_probs, whole(run, batch)
    assert log_p is not None
    found = run.trainer.divergences(batch.seqs, log_p)
    inside = batch.seqs.sampled
    p, q = log_p.double().exp(), log_q.double().exp()
    expected = {"rollout_kl": (p * (log_p - log_q).double()).sum(-1), "rollout_tv": 0.5 * (p - q).abs().sum(-1)}
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name][inside].double(), values[inside], atol=2e-6, rtol=1e-4)
        assert (found[name][~inside] == 0).all()
    assert (found["rollout_tv"] >= 0).all() and 0.02 < float(found["rollout_tv"].max()) <= 1
    pinsker = (0.5 * found["rollout_kl"].clamp(min=0)).sqrt()
    assert (found["rollout_tv"] <= pinsker + 1e-5).all()
    accepted = 1 - found["rollout_tv"][inside].double()  # what Jackpot reads it as
    torch.testing.assert_close(accepted, torch.minimum(p, q).sum(-1)[inside], atol=2e-6, rtol=0)


def test_equal_distributions_and_those_without_a_token_have_finite_divergences(tmp_path: Path) -> None:
    run, batch = sampled(tmp_path, "precision=int3")
    log_q = whole(run, batch)
    same = run.trainer.divergences(batch.seqs, log_q)
    assert same["rollout_tv"].abs().max() < 1e-6 and same["rollout_kl"].abs().max() < 1e-6
    certain = torch.full_like(log_q, -torch.inf).scatter(-1, batch.seqs.token_ids[..., None], 0.0)
    found = run.trainer.divergences(batch.seqs, certain)
    inside, logp = batch.seqs.sampled, run.trainer.score(batch.seqs).logp
    torch.testing.assert_close(found["rollout_kl"][inside], -logp[inside], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["rollout_tv"][inside], 1 - logp.exp()[inside], atol=1e-5, rtol=1e-4)


def stepped(run: Run, batch: Collected, factor: float) -> dict[str, Tensor]:
    """Movement of the weights in one step on the batch's likelihood."""
    before = {name: tensor.clone() for name, tensor in run.trainer.weights()}
    run.trainer.score(batch.seqs, keep_graph=True).logp.sum().backward()
    run.trainer.step(factor)
    return {name: tensor - before[name] for name, tensor in run.trainer.weights()}


def test_the_factor_multiplies_the_step_and_not_the_gradient(tmp_path: Path) -> None:
    """A factor on the loss would vanish in Adam: here the whole step scales, and the state of Adam does not."""
    found: dict[float, tuple[Run, Collected, dict[str, Tensor]]] = {}
    for factor in (1.0, 0.25, 0.0):
        run, batch = sampled(tmp_path, "precision=int4")
        found[factor] = (run, batch, stepped(run, batch, factor))
    plain = found[1.0][2]
    assert max(float(tensor.abs().max()) for tensor in plain.values()) > 1e-4
    for factor, (run, _, moves) in found.items():
        for name, tensor in plain.items():
            torch.testing.assert_close(moves[name], factor * tensor, rtol=1e-3, atol=2e-7)
        (group,) = run.trainer.optimizer.param_groups
        assert group["lr"] == pytest.approx(factor * run.trainer.lr)
        state = run.trainer.optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(state, found[1.0][0].trainer.optimizer.state_dict()["state"][0]["exp_avg"])
    assert all((tensor == 0).all() for tensor in found[0.0][2].values())
    run, batch, _ = found[0.25]
    stepped(run, batch, 1.0)
    assert run.trainer.optimizer.param_groups[0]["lr"] == run.trainer.lr  # the factor was of that step alone
