"""Stale rollouts under verl: which weights each push sends, what the batch is scored with, and resume; then a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.foundation.provenance import tensors_hash
from harness.models.adapters import named_weights
from harness.run.build import build
from tests.engines.engine_cases import decoder
from tests.toy import small_config, small_launch
from tests.verl_jobs.jobs import SMALL, done
from tests.verl_jobs.stale_worker import SAVED_AT, STEPS
from tests.verl_jobs.test_parity import LIMIT, local, made_batch, saved_job, under_verl

pytestmark = pytest.mark.verl
AGE = 2


@pytest.fixture(scope="module", params=[1, 2])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Rows of the worker on so many ranks."""
    root, ranks = tmp_path_factory.mktemp("stale"), request.param
    config = small_config(
        "method=fp16", "precision=fp16", "trainer.steps=6", f"algo.staleness={AGE}", "trainer.lr=1e-3",
        f"engine.max_new_tokens={LIMIT}", "trainer.loss_scale=256", "trainer.loss_scale_interval=2",
    )  # fmt: skip
    launch = small_launch(root)
    run = build(config, launch)[0]
    seqs, batch = made_batch(run)
    columns = local(run, seqs, batch)[3]
    job = saved_job(config, replace(launch, micro_batch_tokens=70), root / "job", seqs, batch, columns)
    under_verl([job.folder], ranks, "tests.verl_jobs.stale_worker")
    return torch.load(job.folder / f"stale{ranks}.pt", weights_only=False)


def hashes(rows: list[dict[str, Any]], name: str) -> list[str]:
    return [tensors_hash(row[name].items()) for row in rows]


def test_a_push_sends_the_weights_of_that_many_steps_ago(told: dict[str, list[dict[str, Any]]]) -> None:
    """As the local trainer's does; an evaluation gets those of now, and the step trains on."""
    rows = told["rows"]
    own = hashes(rows, "evaluated")
    assert len(set(own)) == STEPS
    assert hashes(rows, "pushed") == [own[max(0, step - AGE)] for step in range(STEPS)]
    assert [row["version"] for row in rows] == [0, 0, 0, 1, 2]
    assert [row["kept"] for row in rows] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_the_stored_policy_scores_as_it_did_bit_for_bit(told: dict[str, list[dict[str, Any]]]) -> None:
    """So the ratio of now to the stored policy is exact, and the pass leaves no trace in the weights."""
    rows = told["rows"]
    for step, row in enumerate(rows):
        then = rows[max(0, step - AGE)]["now"]
        torch.testing.assert_close(row["stale"], then, rtol=0, atol=0)
        ratio, stored = (row["now"] - row["stale"]).exp(), (row["now"] - then).exp()
        assert torch.equal(ratio, stored)
        assert bool((ratio != 1).any()) == (step > 0)
    assert hashes(rows, "after") == hashes(rows, "evaluated")


def test_a_resumed_worker_goes_on_with_the_old_weights_bit_for_bit(told: dict[str, list[dict[str, Any]]]) -> None:
    straight, resumed = told["rows"][SAVED_AT:], told["resumed"]
    for name in ("pushed", "evaluated", "after"):
        assert hashes(resumed, name) == hashes(straight, name)
    for row, other in zip(resumed, straight, strict=True):
        assert (row["version"], row["kept"], row["scale"]) == (other["version"], other["kept"], other["scale"])
        assert torch.equal(row["stale"], other["stale"])
        assert torch.equal(row["now"], other["now"])


def test_the_loss_scale_grows_and_a_resumed_worker_has_it(told: dict[str, list[dict[str, Any]]]) -> None:
    assert [row["scale"] for row in told["rows"]] == [256, 256, 512, 512, 1024]
    assert [row["scale"] for row in told["resumed"]] == [512, 1024]


def test_weights_of_any_age_are_sent_from_one_device() -> None:
    """Frozen ones, too, wherever the module rests: an engine's transport takes what is on its GPU."""
    from harness.trainers.verl.past import Past

    model = decoder()
    model.model.embed_tokens.requires_grad_(False)
    past = Past(1, model)
    for step in range(2):
        past.keep(step)
    sent = dict(past.stream(0, "meta"))
    assert set(sent) == {name for name, _ in named_weights(model)} > set(past.versions[0])
    assert {tensor.device.type for tensor in sent.values()} == {"meta"}
    assert {tensor.device.type for tensor in dict(past.stream(0)).values()} == {"cpu"}


def test_a_job_samples_with_the_weights_of_two_steps_ago(results: Path) -> None:
    """BF16 rollouts of an FP32 trainer: what grows beyond the first step is age; the start is scored as the trainer."""
    words = ("method=bf16", "algo.staleness=2", "trainer.steps=6", "trainer.eval_every=3", "trainer.lr=3e-3")
    record, series = done(results, *SMALL, *words)
    assert (record.status, record.num_steps) == ("ok", 6)
    assert series["staleness/steps"] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    k3 = series["mismatch/kl_k3"]
    assert k3[0] < 1e-4 < 10 * k3[0] < min(k3[2:])
    assert series["staleness/kl_k3"][0] == 0.0
    assert series["staleness/kl_k3"][5] == pytest.approx(k3[5], rel=0.2)
    assert series["staleness/format_kl_k3"][5] < 1e-3 < 10 * series["staleness/kl_k3"][5]
    sites = [(e.step, e.site) for e in record.evals]
    assert sites == [(0, "reference"), (0, "rollout"), (3, "rollout"), (6, "reference"), (6, "rollout")]
