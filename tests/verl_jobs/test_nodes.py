"""A job on two Ray nodes, one GPU each: two nodes of one machine, so everything but the network between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verl_jobs.jobs import SMALL, done, kinds

pytestmark = pytest.mark.verl


@pytest.fixture
def address() -> Iterator[str]:
    """Address of a cluster with two nodes, each with one pretended GPU."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 16, "num_gpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()


def test_two_nodes_train_one_policy(results: Path, address: str) -> None:
    words = ("method=flashrl", "precision=fp8_channel", "trainer.steps=2", "trainer.eval_every=2", "launch.nodes=2",
             f"launch.ray_address={address}")  # fmt: skip
    record, series = done(results, *SMALL, *words)
    assert (record.status, record.num_steps) == ("ok", 2)
    assert record.launch == {"nodes": 2, "ray_address": address}
    assert series["sync/num_replicas"] == [2.0, 2.0]  # after a push every engine's passport is read, and all agree
    assert kinds(record) == {"e4m3_channel"}
    assert all(0.01 < gap < 0.2 for gap in series["mismatch/logp_absdiff_mean"])
    assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in series["mismatch/is_raw_mean"])
    assert math.isnan(series["sync/code_flip_rate"][0])
    assert 0.0 < series["sync/code_flip_rate"][1] < 0.5
    assert [e.step for e in record.evals] == [0, 0, 2, 2]
