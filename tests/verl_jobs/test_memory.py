"""Host memory of ranks that read no weights, and updates with weights and moments elsewhere, by two ranks of a worker.

On a CPU nothing moves between memories; what is tested is who reads, who holds, in which order things move, and that
moments are read only where they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.models.adapters import named_weights
from harness.models.checkpoint import load_decoder, read_tensors, save_decoder
from harness.run.build import build
from harness.trainers.verl.job import composed_of
from harness.trainers.verl.reference import policy_of
from tests.toy import small_config, small_launch
from tests.verl_jobs.jobs import text_model
from tests.verl_jobs.memory_worker import FILE, LARGEST
from tests.verl_jobs.test_parity import LIMIT, local, made_batch, saved_job, under_verl

pytestmark = pytest.mark.verl
DEEP = 24
"""Layers of a model whose largest tensor is a small share of the whole."""
RUNS = {
    "deep": (("method=bf16",), "none"), "params": (("method=bf16",), "params"),
    "optimizer": (("method=bf16",), "optimizer"), "all": (("method=bf16",), "all"),
    "host": (("method=bf16",), "host"), "codes": (("method=qerl", "precision=nvfp4"), "none"),
    "scales": (("method=qat_rtn", "precision=int4"), "none"),
    "adapters": (("method=bf16_lora", "algo.kl_coef=0.1"), "none"),
    "adapters on the host": (("method=bf16_lora",), "host"),
}  # fmt: skip
PASSES = {"deep": 32768, "deep in passes": 60, "host in passes": 60}
"""Run -> tokens of a pass; where nothing is said, one pass takes all."""
RUNS |= {"deep in passes": RUNS["deep"], "host in passes": RUNS["host"]}


Answers = dict[str, tuple[dict[str, torch.Tensor], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Run -> (the policy that the local trainer starts from, what ranks 0 and 1 say)."""
    root, started, losses = tmp_path_factory.mktemp("memory"), {}, {}
    model = text_model(root / "deep", DEEP)
    save_decoder(load_decoder(text_model(root / "half", DEEP)), root / "half", torch.bfloat16)
    data = Path(__file__).parents[1] / "tasks" / "data" / "gsm8k"
    text = ("model=hf", f"model.path={model}", "task=gsm8k", f"task.path={data}", "task.options.num_workers=1",
            "task.num_eval=3")  # fmt: skip
    half = (f"model.path={root / 'half'}",)
    for name, (words, offload) in RUNS.items():
        toy = name in ("codes", "scales")
        kind = half if name.startswith("adapters") else ()
        config = small_config(
            *words, *(() if toy else (*text, *kind)), f"engine.max_new_tokens={LIMIT}", "trainer.lr=1e-3"
        )
        launch = small_launch(root, micro_batch_tokens=PASSES.get(name, 32768), offload=offload)
        run = build(config, replace(launch, packing=True, offload="none", micro_batch_tokens=32768))[0]
        seqs, batch = made_batch(run)
        _, losses[name], _, columns = local(run, seqs, batch)
        job = saved_job(config, launch, root / name, seqs, batch, columns)
        first = named_weights(policy_of(job, composed_of(job)))
        started[name] = {key: tensor.detach().clone() for key, tensor in first}
    under_verl([root / name for name in RUNS], 2, "tests.verl_jobs.memory_worker")
    return {
        name: (
            first,
            [
                torch.load(root / name / f"memory{rank}.pt", weights_only=True) | {"loss": losses[name]}
                for rank in range(2)
            ],
        )
        for name, first in started.items()
    }


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two policies."""
    return float(torch.cat([(one[name] - other[name]).flatten() for name in other]).double().norm())


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_starts_from_what_rank_0_reads_to_the_bit(answers: dict[str, tuple], name: str) -> None:
    first, ranks = answers[name]
    for rank in ranks:
        assert rank["built"].keys() == first.keys()
        assert all(torch.equal(rank["built"][key], tensor) for key, tensor in first.items())
    assert [rank["reads"] for rank in ranks] == [1, 0]


def test_a_rank_that_reads_nothing_holds_its_share_alone(answers: dict[str, tuple]) -> None:
    first, (zero, one) = answers["deep"]
    whole = sum(tensor.numel() * 4 for tensor in first.values())
    assert whole > 20 * LARGEST
    assert zero["peak"] > whole
    assert whole / 2 < one["peak"] < whole / 2 + 6 * LARGEST


def test_one_rank_writes_the_final_model_a_file_at_a_time(answers: dict[str, tuple]) -> None:
    first, (zero, one) = answers["deep"]
    whole = sum(tensor.numel() * 4 for tensor in first.values())
    assert zero["last_peak"] < FILE + 6 * LARGEST < whole / 2
    assert one["last_peak"] < 6 * LARGEST < whole / 10  # a tensor at a time
    written = dict(read_tensors(Path(zero["final_folder"])))
    assert written.keys() == zero["after"].keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in zero["after"].items())


@pytest.mark.parametrize("name", ["params", "optimizer", "all", "host"])
def test_an_update_from_the_host_is_the_update_to_the_bit(answers: dict[str, tuple], name: str) -> None:
    _, plain = answers["deep"]
    first, moved = answers[name]
    for one, other in zip(plain, moved, strict=True):
        assert other["losses"] == one["losses"]
        assert all(torch.equal(other["after"][key], tensor) for key, tensor in one["after"].items())
    assert distance(plain[0]["after"], first) > 0.05  # two steps of 1e-3


def test_gradients_that_are_summed_on_the_host_are_those_of_one_sum(answers: dict[str, tuple]) -> None:
    first, plain = answers["deep in passes"]
    _, moved = answers["host in passes"]
    assert moved[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-6, abs=1e-7)
    moved_by = distance(plain[0]["after"], first)
    assert distance(moved[0]["after"], plain[0]["after"]) < 1e-3 * moved_by
    assert answers["deep"][1][0]["losses"][1] != plain[0]["losses"][1]  # another order of summation shows


@pytest.mark.parametrize("name", ["adapters", "adapters on the host"])
def test_a_frozen_base_of_a_16_bit_folder_rests_in_16_bits(answers: dict[str, tuple], name: str) -> None:
    first, ranks = answers[name]
    for rank in ranks:
        assert {key for key, dtype in rank["rests"].items() if dtype == "torch.float32"} == {
            key for key in first if ".lora_" in key
        }
        assert all(tensor.dtype == torch.float32 for tensor in rank["after"].values())
        moved = {key for key, tensor in rank["after"].items() if not torch.equal(tensor, first[key])}
        assert moved == {key for key in first if ".lora_" in key}
    assert ranks[0]["losses"][0] == pytest.approx(ranks[0]["loss"], rel=1e-5)
    assert ranks[0]["losses"][1] != ranks[0]["losses"][0]
    if name == "adapters":
        assert {dtype for key, dtype in ranks[0]["reference"].items() if ".lora_" not in key} == {"torch.bfloat16"}


@pytest.mark.parametrize("name", ["deep", "codes", "scales"])
def test_what_16_bits_do_not_hold_rests_in_32(answers: dict[str, tuple], name: str) -> None:
    """Gains of 1 of a frozen base are held, and so are the codes of a layer whose scale has few bits by chance."""
    first, ranks = answers[name]
    for rests in (rank["rests"] for rank in ranks):
        wide = {key for key, dtype in rests.items() if dtype == "torch.float32"}
        assert name == "codes" or wide == rests.keys()
        assert {key for key in wide if key.endswith("_proj.weight")}
        exact = {key for key in rests if torch.equal(first[key].to(torch.bfloat16).float(), first[key])}
        assert rests.keys() - wide == (exact - {key for key in rests if ".lora_" in key} if name == "codes" else set())


def test_copies_to_the_host_are_there_before_anyone_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.trainers.verl import engine

    told: list[tuple[str, bool, bool] | str] = []

    def moved(self: Any, device: str, model: bool, optimizer: bool, grad: bool) -> None:
        told.append((device, model, optimizer))

    monkeypatch.setattr(engine.FSDPEngineWithLMHead, "to", moved)
    device = SimpleNamespace(synchronize=lambda: told.append("there"))
    monkeypatch.setattr(engine, "get_torch_device", lambda: device)
    ours = object.__new__(engine.Engine)
    ours.to("cpu", model=True, optimizer=False, grad=False)
    ours.to("cuda", model=True, optimizer=False, grad=False)
    assert told == [("cpu", True, False), "there", ("cuda", True, False)]


def test_what_moves_and_when(answers: dict[str, tuple]) -> None:
    """A pass for log-probs, then an update of one pass; twice."""
    found = {name: answers[name][1][0]["events"] for name in ("deep", "params", "optimizer", "all", "host")}
    score, update = ["pass"], ["pass", "step"]
    assert [e for e in found["deep"] if not e.startswith("cpu")] == 2 * (score + update)
    assert [e for e in found["host"] if not e.startswith("cpu")] == 2 * (score + update)
    moments = ["pass", "pass", "moments back", "step", "moments away"]
    assert [e for e in found["optimizer"] if not e.startswith("cpu")] == 2 * moments
    assert found["all"] == 2 * ["cpu params", "pass", "cpu params", "cpu params", "pass", "moments back", "step",
                                "moments away", "cpu params"]  # fmt: skip
    assert [e for e in found["params"] if e.startswith("cpu params")] == 8 * ["cpu params"]
