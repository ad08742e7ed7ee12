"""The study: the divergence by hand, and a small trained model through good, saturating and subnormal caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.config.load import load
from harness.foundation.project_files import HOME
from harness.models.checkpoint import load_decoder
from harness.start.prepare import task_of
from harness.studies.fp8_cache.answers import divergence
from harness.studies.fp8_cache.attention import Cache
from harness.studies.fp8_cache.record import measure, read_all, write
from harness.studies.fp8_cache.report import page, row_named, sentences
from harness.studies.fp8_cache.study import answered

BASE = HOME / "results" / "bases" / "xs128-sort4-b0-a15cf79e106f"
WORDS = ["task=sort", "task.n=4"]


def test_divergence_is_the_kl_of_the_sampler_to_the_trainer() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [1 / 3] * 3]), torch.tensor([[0.7, 0.1, 0.2], [1 / 3] * 3])
    found = divergence(p.log(), q.log())
    assert torch.allclose(found, (p * (p / q).log()).sum(-1), atol=1e-7) and abs(float(found[1])) < 1e-7
    assert not torch.allclose(found, (q * (q / p).log()).sum(-1))


def test_a_cache_that_saturates_costs_accuracy_and_a_good_one_does_not() -> None:
    model, task = load_decoder(BASE), task_of(load([*WORDS, "model=hf", f"model.path={BASE}"]))
    items, layers = task.sample("eval", range(64)), model.config.num_layers
    exact = answered(model, task, items, 2, None)
    found = [
        answered(
            model, task, items, 2, Cache(scales={"k": torch.full((layers, 1), s), "v": torch.full((layers, 1), s)})
        )
        for s in (1.0, 1e-5)
    ]
    assert exact["accuracy"] is not None and exact["accuracy"] > 0.2
    good, bad = (one["accuracy"] or 0.0 for one in found)
    assert abs(good - exact["accuracy"]) < 0.05 and bad < exact["accuracy"] / 2
    with pytest.raises(ValueError, match="one scale a layer"):
        answered(model, task, items, 1, Cache(scales={"k": torch.ones(layers, 1)}))


def test_a_record_has_the_rules_in_order_and_stands_on_the_page(tmp_path: Path) -> None:
    told: list[str] = []
    record = measure(
        BASE, WORDS, name="small", first=BASE, num_answers=12, is_scanned=True, samples=(8, 2), tell=told.append,
        results=tmp_path,
    )  # fmt: skip
    k3 = {row["name"]: row["k3"] for row in record["rows"]}
    assert len(told) == len(record["rows"]) + len(record["accuracies"])
    assert k3["vllm, stale"] == k3["vllm"] and k3["nemo, stale"] == k3["nemo"], "the first weights are these"
    assert k3["kv x 0.0625"] > 30 * k3["kv x 1"] and k3["kv x 16384"] > 10 * k3["kv x 1"]
    assert k3["vllm, dummy"] > 0.1 and max(k3["1, K"], k3["1, V"]) < 3 * k3["1"]
    stored = (row_named(record, "kv x 0.0625") or {})["stored"]
    assert stored["k"]["saturated"] > 0.1 and (row_named(record, "kv x 1") or {})["stored"]["v"]["saturated"] == 0
    write(tmp_path, record)
    (again,) = read_all(tmp_path)
    assert again == record
    assert "| small | 1, K |" in page([again]) and f"k3 is {k3['1, K']:.2g} where keys" in sentences([again])[0]


@pytest.mark.parametrize(
    ("num_answers", "samples", "words"),
    [(2, None, "--answers=2: an interval takes at least 3 questions"),
     (12, (1, 64), "--accuracy=1: an interval takes at least 3 questions")],
)  # fmt: skip
def test_too_few_questions_for_an_interval_are_refused_before_anything_is_measured(
    tmp_path: Path, num_answers: int, samples: tuple[int, int] | None, words: str
) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match=f"^{words}$"):
        measure(
            BASE, WORDS, name="small", first=None, num_answers=num_answers, is_scanned=False, samples=samples,
            tell=told.append, results=tmp_path,
        )  # fmt: skip
    assert told == [] and list(tmp_path.iterdir()) == []


def test_missing_records_and_damaged_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no record yet"):
        read_all(tmp_path)
    (tmp_path / "fp8_cache").mkdir()
    (tmp_path / "fp8_cache" / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON: .*; delete it and measure again"):
        read_all(tmp_path)
