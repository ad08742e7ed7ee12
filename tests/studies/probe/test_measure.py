"""Every number of a probe again from the log-probs that it dumped, and its profiles, corrections and costs by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy.stats import t as student

from harness.api import Step, TokenBatch
from harness.config.load import run_id
from harness.config.schema import Launch
from harness.models.checkpoint import load_decoder
from harness.objective.loss import start
from harness.studies.probe.measure import beyond, ess_by_length, measure
from harness.studies.probe.record import Record, configs, probe
from tests.studies.probe import made

FORMATS = ("int8", "fp8_channel", "fp8_block", "nvfp4", "mxfp4", "nf4", "int4", "int2")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path]:
    """The record of a tiny Qwen2 folder in eight formats, and the folder of its dumped log-probs."""
    place = tmp_path_factory.mktemp("probe")
    runs, remarks = configs(made.qwen2(place / "qwen2"), FORMATS, [*made.WORDS, "trainer.compute=fp32"])
    assert not remarks
    return probe(place / "qwen2", runs, Launch(results=str(place)), dump=place / "dump"), place / "dump"


def dumped(dump: Path, row: Record) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(d of every token [B, T] with NaN where none is, mask, all tensors)."""
    tensors = load_file(dump / f"{row['name'].replace(' ', '-')}.safetensors")
    mask = tensors["mask"]
    return np.where(mask, tensors["old_logp"].astype(float) - tensors["rollout_logp"], np.nan), mask, tensors


def test_the_floor_comes_first_and_twice(probed: tuple[Record, Path]) -> None:
    record, dump = probed
    assert [row["name"] for row in record["formats"]] == ["bf16", "bf16 again", *FORMATS]
    assert {path.stem for path in dump.iterdir()} == {"bf16", "bf16-again", *FORMATS}
    k3 = {row["name"]: row["mismatch"]["kl_k3"] for row in record["formats"]}
    floor = max(k3["bf16"], k3["bf16 again"])
    assert 0 < k3["bf16"] != k3["bf16 again"] > 0
    assert all(k3[name] > 5 * floor for name in FORMATS) and k3["int2"] > 20 * k3["int8"]


def test_a_trainer_in_bf16_lowers_the_floor_alone(probed: tuple[Record, Path]) -> None:
    (floor, _, int8), _ = configs(probed[1].parent / "qwen2", ["int8"], made.WORDS)
    launch, by_name = Launch(results=str(probed[1].parent)), {row["name"]: row for row in probed[0]["formats"]}
    assert floor.trainer.compute == "bf16", "the default for a folder"
    rounded = {one.precision.name: measure(one, launch).row["mismatch"]["kl_k3"] for one in (floor, int8)}
    assert rounded["bf16"] < 0.05 * by_name["bf16"]["mismatch"]["kl_k3"]
    assert rounded["int8"] == pytest.approx(by_name["int8"]["mismatch"]["kl_k3"], rel=0.2)


def test_the_mismatch_is_that_of_the_dumped_log_probs(probed: tuple[Record, Path]) -> None:
    record, dump = probed
    for row in record["formats"]:
        d, mask, _ = dumped(dump, row)
        d = d[mask]
        expected = {
            "kl_k3": np.mean(np.exp(d) - d - 1), "kl_k1": -d.mean(), "logp_absdiff_mean": np.abs(d).mean(),
            "logp_absdiff_max": np.abs(d).max(),
            "logp_absdiff_p99": np.sort(np.abs(d))[math.ceil(0.99 * len(d)) - 1],
            "ess_token_raw": np.exp(d).mean() ** 2 / np.mean(np.exp(d) ** 2),
        }  # fmt: skip
        assert row["num_tokens"] == len(d) and row["length_mean"] == pytest.approx(mask.sum(1).mean())
        for name, value in expected.items():
            assert row["mismatch"][name] == pytest.approx(value, rel=1e-4, abs=1e-9), (row["name"], name)


def test_the_interval_has_prompts_as_clusters(probed: tuple[Record, Path]) -> None:
    record, dump = probed
    for row in record["formats"]:
        d, mask, _ = dumped(dump, row)
        k3 = np.exp(d) - d - 1
        centre = k3[mask].mean()
        sums = np.nansum(k3 - centre, axis=1).reshape(6, 4).sum(1)  # 6 prompts of 4 answers
        width = student.ppf(0.975, 5) * math.sqrt(6 / 5 * (sums**2).sum()) / mask.sum()
        assert (row["k3_low"], row["k3_high"]) == pytest.approx((centre - width, centre + width), rel=1e-4)


def test_profiles_add_up_to_the_whole(probed: tuple[Record, Path]) -> None:
    record, dump = probed
    for row in record["formats"]:
        d, mask, tensors = dumped(dump, row)
        for name in ("by_position", "by_entropy"):
            pairs = [(k, n) for k, n in zip(row[name]["k3"], row[name]["count"], strict=True) if n]
            assert sum(n for _, n in pairs) == row["num_tokens"]
            assert sum(k * n for k, n in pairs) / row["num_tokens"] == pytest.approx(row["mismatch"]["kl_k3"], rel=1e-4)
        first = mask[:, 0]
        assert row["by_position"]["k3"][0] == pytest.approx(np.mean(np.exp(d[first, 0]) - d[first, 0] - 1), rel=1e-4)
        assert (tensors["entropy"][mask] >= 0).all() and tensors["entropy"][mask].max() <= math.log(32)


def test_samples_of_whole_answers_by_length(probed: tuple[Record, Path]) -> None:
    record, dump = probed
    for row in record["formats"]:
        d, mask, _ = dumped(dump, row)
        lengths, found = mask.sum(1), row["ess_by_length"]
        assert found["length"][:3] == [1.0, 2.0, 4.0] and found["length"][-1] == lengths.max()
        for n, ess, count in zip(*(found[name] for name in ("length", "ess", "count")), strict=True):
            rho = [math.exp(sum(d[i, : int(n)])) for i in range(len(d)) if lengths[i] >= n]
            assert count == len(rho) and ess == pytest.approx(np.mean(rho) ** 2 / np.mean(np.square(rho)), rel=1e-4)


def test_effective_samples_by_hand() -> None:
    old = torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.5, 0.5]]))
    rollout = torch.log(torch.tensor([[0.25, 0.5, 0.5], [0.5, 0.5, 0.5]]))
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = ess_by_length(old, rollout, mask)
    # Weights 2 and 1/2 at one token: 1.25^2 / 2.125. Longer answers are one alone.
    assert found == {"length": [1, 2, 3], "ess": pytest.approx([1.25**2 / 2.125, 1, 1]), "count": [2, 1, 1]}


def test_what_corrections_do_is_what_their_rules_say(probed: tuple[Record, Path]) -> None:
    record, dump = probed
    assert not {"naive", "bf16"} & set(record["formats"][0]["corrections"])
    far = list[float]()
    for row in record["formats"]:
        d, mask, _ = dumped(dump, row)
        rho, found = np.exp(d[mask]), row["corrections"]["bf16_tis"]
        weight = np.minimum(rho, 2.0)
        assert found["beyond_frac"] == pytest.approx((rho > 2).mean(), abs=1e-6)
        assert found["weight_mean"] == pytest.approx(weight.mean(), rel=1e-4) and found["token_kept_frac"] == 1
        assert found["ess"] == pytest.approx(weight.mean() ** 2 / np.mean(weight**2), rel=1e-4)
        far.append(found["beyond_frac"])
    assert far[0] == 0 and max(far) > 0.05, "the coarsest formats go beyond the cap"


def test_beyond_is_neither_kept_nor_a_plain_ratio() -> None:
    d = torch.tensor([[0.0, 0.5, 1.0, 0.0], [0.2, -0.2, 0.4, 0.3]])
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    batch = TokenBatch(
        token_ids=torch.zeros(2, 4, dtype=torch.int64), mask=mask, adv=torch.ones(2, 4), rollout_logp=-d - 1,
        old_logp=torch.full((2, 4), -1.0), step=Step(index=0, total=1, seed=0),
    )  # fmt: skip
    none = start(batch, 0.2, 0.2)
    assert beyond(none, batch) == 0, "no weight is a weight of 1"
    token, whole = d.exp(), d.mul(mask).sum(1, keepdim=True).exp().expand(2, 4)
    assert beyond(replace(none, weight=token), batch) == beyond(replace(none, weight=whole), batch) == 0
    capped = token.clamp(max=1.5)
    assert beyond(replace(none, weight=capped), batch) == pytest.approx(2 / 7)  # e^0.5 and e^1 are above 1.5
    keep = mask.clone()
    keep[1, :2] = False
    assert beyond(replace(none, weight=capped, keep=keep), batch) == pytest.approx(4 / 7)


def test_costs_are_those_of_the_shape(probed: tuple[Record, Path]) -> None:
    record, _ = probed
    rows = {row["name"]: row for row in record["formats"]}
    num = sum(p.numel() for p in load_decoder(Path(probed[1]).parent / "qwen2").parameters())
    assert {row["num_parameters"] for row in rows.values()} == {num}
    assert rows["bf16"]["effective_bits"] == 16 and rows["bf16"]["weights_gib"] * 2**30 == pytest.approx(
        2 * num, rel=1e-4
    )
    assert rows["int8"]["effective_bits"] > 8 > rows["nf4"]["effective_bits"] > 4 > rows["int2"]["effective_bits"]
    assert {row["cache_kib_per_token"] * 1024 for row in rows.values()} == {2 * 2 * 2 * 8 * 2}  # K and V, layers, heads
    assert rows["int8"]["passport"]["weights"]["int8_channel"] == 14 and rows["bf16"]["cache_tokens"] is None
    assert all(row["tokens_per_s"] > 0 and row["push_s"] > 0 and row["num_answers"] == 24 for row in rows.values())


def test_a_measurement_is_the_same_twice(tmp_path: Path) -> None:
    (_, again, int4), _ = configs(made.qwen2(tmp_path / "qwen2"), ["int4"], made.WORDS)
    launch = Launch(results=str(tmp_path))
    once, twice, other = (measure(config, launch) for config in (int4, int4, replace(int4, seed=1)))
    timed = ("tokens_per_s", "push_s")
    first, second, third = ({k: v for k, v in one.row.items() if k not in timed} for one in (once, twice, other))
    assert first == second and first["mismatch"] != third["mismatch"]
    assert torch.equal(once.tensors["old_logp"], twice.tensors["old_logp"])
    assert again.seed == 1 and run_id(again) != run_id(int4)
