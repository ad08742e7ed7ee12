"""The replay laboratory end to end on a tiny policy: the loop's own gradient, resume, records, tables, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from harness.api import Step, TokenBatch
from harness.cli import main as cli
from harness.config.schema import AlgoConfig, Launch
from harness.foundation.clock import Clock
from harness.foundation.provenance import ROOT
from harness.objective.loss import start
from harness.run import loop
from harness.run.build import build
from harness.run.collect import advantages, collect
from harness.studies.replay.arms import Arm, arms_of, pull
from harness.studies.replay.evaluation import Question, evaluate_context
from harness.studies.replay.gradients import batch_gradients, gradients, nearest_earlier, pulls_of
from harness.studies.replay.sampling import Context, Demand, collect_context, plan, sample
from harness.studies.replay.store import CONTROL, POLICY, REFERENCE, Stored, contexts, joined, read, samplers
from harness.studies.replay.tables import has_own_target, markdown
from methods import METHODS
from tests.toy import Short, small_launch, small_run

WORDS = ("model=xs", "task=chain", "model.spread=0", "algo.num_prompts=8")
DEMAND = Demand(overrides=WORDS, precisions=("int3",), lengths=(), num_prompts=64, reference_factor=3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Context, Launch]:
    """A collected context: chain, int3 and the exact sampler, 8 batches of 8 prompts x 8 samples."""
    folder = tmp_path_factory.mktemp("replay")
    launch, (context,) = small_launch(folder), plan(DEMAND, folder / "stored")
    assert collect_context(context, launch, lambda name: None) == 3
    return context, launch


@pytest.fixture(scope="module")
def records(place: tuple[Context, Launch]) -> Path:
    """Its records at both ages."""
    context, launch = place
    folder = Path(launch.results) / "replay"
    question = Question(methods=("bf16_tis", "sequence IS, no cap", "geo_rs"))
    evaluate_context(context.folder, folder, question, launch, lambda what, count: None)
    return folder


@pytest.mark.parametrize(
    ("method", "mode"),
    [("naive", "decoupled"), ("naive", "bypass_ppo"), ("naive", "bypass_pg"), ("flashrl", "decoupled"),
     ("flashrl", "bypass_pg"), ("mis", "decoupled"), ("k3_rs", "bypass_ppo"), ("m2po", "decoupled"),
     ("vespo", "decoupled"), ("sapo", "decoupled"), ("minirl", "decoupled"), ("ipo", "decoupled"),
     ("dc_grpo", "decoupled"), ("r2vpo", "decoupled"), ("kpop", "decoupled"), ("mipu_step1", "decoupled"),
     ("slime_mismatch", "decoupled"), ("jackpot", "decoupled")],
)  # fmt: skip
def test_a_replayed_gradient_is_the_one_the_loop_takes(
    method: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = METHODS[method].mode or mode
    run = small_run(tmp_path, (f"method={method}", "precision=int4", f"algo.mode={own}"))
    step = Step(index=0, total=4, seed=0)
    loop.push_weights(run, step)
    batch = collect(run, step, Clock("cpu"))
    seqs, rollout = batch.seqs, batch.rollout
    mask, adv, _ = advantages(run, batch.scores, rollout, seqs.sampled)
    old = run.trainer.score(seqs).logp
    batch = TokenBatch(token_ids=seqs.token_ids, mask=mask, adv=adv, rollout_logp=rollout.logp, old_logp=old, step=step)
    moved = old + 0.2 * torch.sin(torch.arange(old.numel()).view_as(old))  # an old policy other than the live one
    batch = replace(batch, old_logp=torch.where(mask, moved, 0.0))
    monkeypatch.setattr(run.trainer, "step", dict)
    algo = run.config.algo
    correction = start(batch, algo.eps_low, algo.eps_high)
    if algo.mode == "decoupled":
        correction = run.composed.correct(correction, batch)
    loop.update(run, seqs, batch, correction, torch.arange(len(seqs.ids)), None, 0)
    taken = torch.cat([p.grad.flatten() for p in run.trainer.parameters])  # type: ignore[union-attr]
    stripped = replace(METHODS[method], parts=tuple(p for p in run.composed.parts if type(p).__name__ != "Profile"))
    arm = Arm(name=method, method=stripped, algo=algo)
    replayed = pull(arm, batch, old, run.max_new_tokens).grad
    found = batch_gradients(run.trainer, seqs, replayed[None])[0]
    torch.testing.assert_close(found, taken, rtol=1e-4, atol=1e-6 * float(taken.abs().max()))
    assert taken.abs().max() > 0


def test_gradients_of_arms_that_share_rows_are_those_of_each_alone(place: tuple[Context, Launch]) -> None:
    context, launch = place
    stored = read(context.folder, "int3")
    run, _ = build(context.configs["int3"], launch)
    arms, _ = arms_of(run.config.algo, ("bf16_tis", "geo_rs", "mis", "icepop"))
    pulls = pulls_of(arms, stored, [stored.batch(b).old_logp for b in range(8)])
    chosen = {name: [one.grad for one in found] for name, found in pulls.by_arm.items()}
    together = gradients(run.trainer, stored, chosen)
    assert any(parent is not None for parent in nearest_earlier(torch.stack([torch.stack(x) for x in chosen.values()])))
    for name in chosen:
        alone = gradients(run.trainer, stored, {name: chosen[name]})[name]
        torch.testing.assert_close(together[name], alone, rtol=1e-3, atol=1e-5 * float(alone.abs().max()))


def test_batches_share_prompts_and_random_numbers(place: tuple[Context, Launch]) -> None:
    context, _ = place
    exact, control, low = (read(context.folder, name) for name in (REFERENCE, CONTROL, "int3"))
    width = int(exact.tensors["prompt_lens"][0])
    rows = exact.rows(3)
    for other in (control, low):
        assert torch.equal(exact.tensors["ids"][rows, :width], other.tensors["ids"][other.rows(3), :width])
    size = min(x.tensors["token_ids"].shape[1] for x in (exact, control, low))
    same = [
        (exact.tensors["token_ids"][: len(x.tensors["ids"]), :size] == x.tensors["token_ids"][:, :size]).all(1)
        for x in (control, low)
    ]
    assert same[1].float().mean() > same[0].float().mean()
    assert not same[1].all()
    assert exact.meta["mismatch"]["kl_k3"] < 1e-10 < 1e-4 < low.meta["mismatch"]["kl_k3"]
    assert low.meta["weights_hash"] == exact.meta["weights_hash"] == read(context.folder, POLICY).meta["weights_hash"]
    assert low.meta["realized"] != exact.meta["realized"]
    assert torch.equal(low.tensors["ref_logp"], low.tensors["old_logp"])
    assert low.tensors["rollout_kl"].sum() > exact.tensors["rollout_kl"].abs().sum()


def test_sampled_responses_end_where_their_task_says(place: tuple[Context, Launch]) -> None:
    """As in training: what comes behind is neither trained on nor truncated."""
    context, launch = place
    run, _ = build(context.configs["int3"], launch)
    for engine in (run.engine, run.reference):
        engine.keeps_log_probs = True  # type: ignore[attr-defined]
    loop.push_weights(run, Step(index=0, total=4, seed=0))
    long = sample(run, None, "int3", 0)
    run.task = Short(run.task)  # type: ignore[assignment]
    found = sample(run, None, "int3", 0)
    assert long["sampled"].sum(1).max() > 2
    assert found["sampled"].sum(1).tolist() == long["sampled"].sum(1).clamp(max=2).tolist()
    assert torch.equal(found["mask"], found["sampled"])
    assert torch.equal(found["token_ids"][:, :2], long["token_ids"][:, :2])
    assert (found["token_ids"][:, 2:] == run.task.pad_id).all()
    assert not found["rollout_logp"][:, 2:].any()
    assert not found["rollout_kl"][:, 2:].any()
    assert not found["truncated"].any()


def test_collecting_again_writes_nothing_and_other_settings_are_refused(place: tuple[Context, Launch]) -> None:
    context, launch = place
    assert collect_context(context, launch, lambda name: None) == 0
    with pytest.raises(ValueError, match="other settings"):
        collect_context(replace(context, warmup=1), launch, lambda name: None)
    low = context.folder / "int3.json"
    text = low.read_text()
    before = (context.folder / "int3.safetensors").read_bytes()
    low.unlink()  # as if it had been stopped before the description
    assert samplers(context.folder) == [CONTROL]
    assert collect_context(context, launch, lambda name: None) == 1
    assert (context.folder / "int3.safetensors").read_bytes() == before
    assert json.loads(low.read_text()) == json.loads(text)


def test_the_exact_sampler_has_no_bias_and_int3_has_one(records: Path) -> None:
    rows = {
        name: {row["arm"]: row for row in json.loads((records / f"xs-chain8-{name}-age0.json").read_text())["rows"]}
        for name in (CONTROL, "int3")
    }
    none = rows[CONTROL]["none"]
    assert none["bias_low"] == 0.0
    assert none["p_zero"] > 0.01
    assert none["gain_low"] < 1 < none["gain_high"]
    assert all(row["same_as"] == "none" for arm, row in rows[CONTROL].items() if arm != "none")
    assert rows["int3"]["none"]["p_zero"] < 0.05
    assert rows["int3"]["bf16_tis"]["weight_max"] == pytest.approx(2.0, rel=1e-3)
    assert 0 < rows["int3"]["bf16_tis"]["ess"] < 1
    assert rows["int3"]["geo_rs"]["rejected"] > 0.5
    assert rows["int3"]["none bypass_pg"]["same_as"] == "none"
    assert set(rows["int3"]["none"]["rejected_by_entropy"]) <= {0.0, None}
    shares = [share for share in rows["int3"]["geo_rs"]["rejected_by_length"] if share is not None]
    assert 0.5 < max(shares) <= 1.0


def test_a_step_later_the_clips_act(records: Path) -> None:
    rows = {row["arm"]: row for row in json.loads((records / "xs-chain8-int3-age1.json").read_text())["rows"]}
    assert rows["none"]["clip_frac"] > 0
    assert rows["none"]["weight_std"] > 0
    assert rows["none bypass_pg"]["same_as"] == ""


def test_objectives_of_their_own_are_held_against_their_own_exact_step(
    place: tuple[Context, Launch], tmp_path: Path
) -> None:
    """A step after sampling: the exact sampler's SAPO has no bias against itself, and is not the clipped step."""
    context, launch = place
    question = Question(methods=("sapo", "ipo", "bf16_tis"), ages=(1,))
    skipped = evaluate_context(context.folder, tmp_path, question, launch, lambda what, count: None)
    assert skipped == {}
    records = [json.loads((tmp_path / f"xs-chain8-{name}-age1.json").read_text()) for name in (CONTROL, "int3")]
    for record in records:
        targets = {row["arm"]: row["target"] for row in record["rows"]}
        assert targets["sapo"] == "own sapo" and targets["ipo"] == "own ipo"
        assert targets["bf16_tis"] == targets["none"] == "token-mean"
        assert {"own sapo", "own ipo", "token-mean"} <= set(record["reference"])
        assert record["reference"]["own sapo"] != record["reference"]["token-mean"]
    control, low = ({row["arm"]: row for row in record["rows"]} for record in records)
    for arm in ("sapo", "ipo"):
        assert control[arm]["bias_low"] == 0.0 and control[arm]["p_zero"] > 0.01
        assert control[arm]["gain_low"] < 1 < control[arm]["gain_high"]
        assert not control[arm]["same_as"]
    assert low["sapo"]["bias"] > control["sapo"]["bias"]
    text = markdown(records)
    assert "Held against their own exact step: sapo, ipo." in text
    assert has_own_target(low["sapo"]) and not has_own_target(low["none"])
    assert not has_own_target({"arm": "sapo"})  # records of before name no target


def test_records_are_kept_and_tables_and_figures_are_redrawn(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = records.parent
    times = {path: path.stat().st_mtime_ns for path in records.glob("*.json")}
    words = ["--results", str(results)]
    assert cli.main(["replay", "report", *words]) == 0
    assert "## xs-chain8, age 1" in capsys.readouterr().out and not (results / "tables").exists()
    assert cli.main(["replay", "report", "--write", *words]) == 0
    assert {path: path.stat().st_mtime_ns for path in records.glob("*.json")} == times
    table = pd.read_csv(results / "tables" / "replay.csv")
    assert set(table["sampler"]) == {CONTROL, "int3"} and set(table["age"]) == {0, 1}
    text = (results / "tables" / "replay.md").read_text()
    assert "## xs-chain8, age 1" in text and "Coincide here" in text
    for age in (0, 1):
        assert (results / "figures" / "replay" / f"age{age}.png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert out.count("## xs-chain8, age 1") == 1 and f"{results / 'tables' / 'replay.md'}" in out.splitlines()[-1]


def test_a_record_of_more_methods_is_not_replaced(records: Path, place: tuple[Context, Launch]) -> None:
    context, launch = place
    before = {path: path.read_bytes() for path in records.glob("*.json")}
    with pytest.raises(ValueError, match="arms that --methods and --modes leave out"):
        evaluate_context(context.folder, records, Question(methods=("bf16_tis",)), launch, lambda what, count: None)
    assert {path: path.read_bytes() for path in records.glob("*.json")} == before


def test_what_is_skipped_says_why() -> None:
    arms, skipped = arms_of(AlgoConfig(name="plain"))
    names = [arm.name for arm in arms]
    assert names[:3] == ["none", "none bypass_ppo", "none bypass_pg"]
    assert len(set(names)) == len(names)
    assert "Profile acts outside the loss" in skipped["flashrl"]
    assert "has no parts" in skipped["naive"]
    assert set(skipped) | {arm.method.name for arm in arms} >= set(METHODS)
    for name, why in (
        ("vcpo", "ESSStep acts outside the loss (update_lr_factor)"), ("alp", "ALP acts outside the loss (during_upd"),
        ("mixed_rollouts", "SecondSampler acts outside the loss (plan)"),
        ("keep_sampling_mask", "KeepSamplingMask needs allowed_ids, which is not stored"),
    ):  # fmt: skip
        assert skipped[name].startswith(why)
    own = {arm.method.name for arm in arms if arm.has_objective}
    assert own >= {"sapo", "minirl", "ipo", "r2vpo", "dppo_tv", "trm", "m2po", "tbpo", "vespo"}
    assert all(arm.exact is arm and arm.target == f"own {arm.name}" for arm in arms if arm.has_objective)
    assert all(arm.exact.name == "none" and arm.target == arm.algo.agg for arm in arms if not arm.has_objective)
    everything, _ = arms_of(AlgoConfig(name="plain"), (), ("decoupled", "bypass_ppo", "bypass_pg"))
    found = {arm.name for arm in everything}
    assert "bf16_tis bypass_pg" in found and "bf16_tis bypass_ppo" not in found


def test_joined_pads_to_common_widths() -> None:
    a = {"ids": torch.ones(2, 3, dtype=torch.int64), "mask": torch.ones(2, 2, dtype=torch.bool), "adv": torch.ones(2)}
    b = {"ids": torch.ones(2, 5, dtype=torch.int64), "mask": torch.ones(2, 4, dtype=torch.bool), "adv": torch.ones(2)}
    whole = Stored(tensors=joined([a, b], pad_id=9), meta={"num_batches": 2})
    assert whole.tensors["ids"].tolist()[0] == [1, 1, 1, 9, 9]
    assert whole.tensors["mask"].sum().item() == 12
    assert (whole.rows(1), whole.tensors["adv"].shape[0]) == (slice(2, 4), 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["collect", "--precisions", "int5"], "int4"),
        (["collect", "--prompts", "100"], "--prompts=100"),
        (["collect", "--prompts", "64"], "at least 8"),
        (["collect", "method=mis"], "collecting has no method"),
        (["collect", "algo.dynamic_sampling=true"], "same prompts"),
        (["collect", "--warmup", "-1"], "--warmup: '-1'"),
        (["collect", "metod=bf16"], "nearest: method"),
        (["evaluate"], "run `lowbit replay collect` first"),
        (["evaluate", "--ages", "3"], "--ages=3"),
        (["report"], "run `lowbit replay evaluate` first"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = {"collect": ["--out", str(tmp_path / "s")], "evaluate": ["--stored", str(tmp_path / "s")], "report": []}
    assert cli.main(["replay", *words, *folder[words[0]], "--results", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: ") and err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize("words", [["--modes", "sideways"], ["--methods", "flashrll"]])
def test_unknown_methods_and_modes_name_the_nearest(
    words: list[str], place: tuple[Context, Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    context, launch = place
    stored = ["--stored", str(context.folder.parent), "--results", launch.results]
    assert cli.main(["replay", "evaluate", *words, *stored]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_store_is_one_line(place: tuple[Context, Launch], tmp_path: Path) -> None:
    context, _ = place
    folder = tmp_path / "s" / "x"
    folder.mkdir(parents=True)
    for path in context.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "int3.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged"):
        read(folder, "int3")
    (folder / "int3.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not valid JSON: .*; delete it and collect again"):
        read(folder, "int3")
    with pytest.raises(ValueError, match="collect"):
        read(folder, "int8")
    assert contexts(folder.parent) == [folder]
    (folder / f"{REFERENCE}.json").write_text("{")
    with pytest.raises(ValueError, match=r"reference\.json is not valid JSON: .*; delete it and collect again"):
        contexts(folder.parent)
    assert (ROOT / "harness" / "studies" / "replay").is_dir()


def test_batches_lie_in_the_results_folder_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["replay", "evaluate", "--results", str(tmp_path)]) == 2
    assert f"{tmp_path / 'work' / 'replay'}: no stored rollouts" in capsys.readouterr().err
    seen: list[Path] = []
    monkeypatch.setattr("harness.studies.replay.sampling.plan", lambda demand, out: seen.append(out) or ())
    assert cli.main(["replay", "collect", "--results", str(tmp_path)]) == 0
    assert seen == [tmp_path / "work" / "replay"]
