"""Faults: the schedule, the audit on cases made by hand, a small real campaign, and the committed one."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from harness.config.load import run_id
from harness.config.schema import Launch, RunConfig
from harness.devtools.faults import audit, campaign, report
from harness.devtools.faults.__main__ import main
from harness.devtools.faults.audit import audit_cells, audit_leftovers
from harness.devtools.faults.injector import Injector
from harness.devtools.faults.journal import VARIABLE, Fault, Mark, note, read, was_injected, write_faults
from harness.devtools.faults.open_round import SWEEP, OpenRound, Settings
from harness.devtools.faults.outcome import OUTCOMES, FaultOutcome, outcome, summary, totals
from harness.devtools.faults.outside import mlflow
from harness.devtools.faults.rounds import run_round
from harness.devtools.faults.schedule import FORMS, Round, endless, plan_round
from harness.devtools.faults.sweep_starts import next_start
from harness.foundation.provenance import ROOT
from harness.records.run_result import read_result, write_result
from harness.run.cell import record, run_cell
from tests.toy import small_config, small_launch

STEPS = 4


def test_a_schedule_is_a_function_of_its_seed_and_reaches_every_form() -> None:
    first, again, other = (list(islice(endless(tuple(FORMS), seed), 600)) for seed in (0, 0, 1))
    assert first == again != other
    assert {kind for kind, _ in first[: len(FORMS)]} == set(FORMS)
    assert set(first) == {(kind, form) for kind, forms in FORMS.items() for form in forms}
    rounds = [plan_round(iter(first), 0, 3, cells=6, steps=12, size=60) for _ in range(2)]
    assert rounds[0] == rounds[1]
    assert sum(len(of_cell) for of_cell in rounds[0].cells) + len(rounds[0].outside) == 60
    for of_cell in rounds[0].cells:
        assert all(0 <= fault.step < 12 for fault in of_cell)
        assert sum(fault.kind == "nan" for fault in of_cell[:-1]) == 0  # a divergence is the last of a cell
    ids = [fault.id for of_cell in rounds[0].cells for fault in of_cell] + [fault.id for fault in rounds[0].outside]
    assert len(set(ids)) == 60


def test_a_fault_is_injected_once_at_its_moment_and_none_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    faults = [
        Fault(id="a", kind="disk", form="state limit", step=5),
        Fault(id="b", kind="hang", form="sleep", step=3),
        Fault(id="c", kind="memory", form="MemoryError", step=1),
    ]
    note(tmp_path, "begin", "cell", at_s=0.0)
    write_faults(tmp_path, "cell", faults)
    injector = Injector(tmp_path / "cell" / "cell.json")
    assert injector.faults == faults
    injector.step = 2
    assert injector.due(("memory",), ("MemoryError",)) is None  # the hang ends the process first
    assert injector.due(("hang",), ("sleep",)) is None
    injector.step = 3
    assert injector.due(("hang",), ("stop",)) is None
    assert injector.due(("hang",), ("sleep",)) == faults[1]
    assert injector.due(("memory",), ("MemoryError",)) == faults[2]
    assert injector.due(("memory",), ("MemoryError",)) is None
    assert [was_injected(tmp_path, fault.id) for fault in faults] == [False, True, True]
    marks = [(mark.what, mark.fault, mark.step) for mark in read(tmp_path)]
    assert marks == [("begin", "", 0), ("inject", "b", 3), ("inject", "c", 3)]


def written(folder: Path, config: RunConfig, final: str = "aa", status: str = "ok", loss: float = 0.5) -> Path:
    """A record with a series of STEPS steps."""
    launch = Launch(results=str(folder), sweep=SWEEP)
    made = record(config, launch, None, {"final": final}, status, None if status == "ok" else "made up", None)
    rows = [{"train/loss": loss, "time/update_s": float(hash_of(folder))} for _ in range(STEPS)]
    return write_result(folder / "runs" / SWEEP, made.model_copy(update={"num_steps": STEPS}), rows)


def hash_of(folder: Path) -> int:
    """A time that no two folders share."""
    return sum(map(ord, folder.name))


def audited(
    tmp_path: Path, spoil: Callable[[Path, list[RunConfig]], object], ends: int = 1, nan_step: int | None = None
) -> list[tuple[str, str]]:
    """(wrong, words) of three cells, one of which is spoilt."""
    configs = [replace(small_config(), seed=seed) for seed in range(3)]
    reference, results = tmp_path / "reference", tmp_path / "round-000" / "results"
    for config in configs:
        written(reference, config)
        written(results, config)
    spoil(results, configs)
    first = run_id(configs[0])
    marks = [Mark(what="end", cell=first, at_s=float(i), status="ok") for i in range(ends)]
    diverging = {} if nan_step is None else {first: Fault(id="n", kind="nan", form="loss", step=nan_step)}
    runs = [folder / "runs" / SWEEP for folder in (reference, results)]
    return [(case.wrong, case.words) for case in audit_cells(configs, runs[0], runs[1], marks, diverging)]


def path_of(results: Path, config: RunConfig) -> Path:
    return results / "runs" / SWEEP / f"{run_id(config)}.json"


def renamed(results: Path, configs: list[RunConfig]) -> None:
    """The record of the second cell under the id of the first."""
    text = path_of(results, configs[1]).read_text().replace(run_id(configs[1]), run_id(configs[0]))
    path_of(results, configs[0]).write_text(text)


def copied(results: Path, configs: list[RunConfig]) -> None:
    (results / "runs" / SWEEP / "archive").mkdir()
    path = path_of(results, configs[0])
    (path.parent / "archive" / path.name).write_bytes(path.read_bytes())
    path.with_suffix(".parquet").rename(path.parent / "archive" / f"{path.stem}.parquet")
    (path.parent / f"{path.stem}.parquet").write_bytes((path.parent / "archive" / f"{path.stem}.parquet").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "wrong", "words"),
    [
        (lambda results, configs: path_of(results, configs[0]).unlink(), "lost", "cannot be read"),
        (lambda results, configs: written(results, configs[0], status="failed"), "lost", "failed: made up"),
        (lambda results, configs: path_of(results, configs[0]).write_text("{"), "lost", "not a result file"),
        (lambda results, configs: path_of(results, configs[0]).with_suffix(".parquet").unlink(), "lost", "cannot be"),
        (
            lambda results, configs: path_of(results, configs[0]).with_suffix(".parquet").write_bytes(b"PAR1"),
            "lost",
            "not a Parquet file",
        ),
        (copied, "duplicated", "other records"),
        (lambda results, configs: written(results, configs[0], final="bb"), "mislabelled", "hashes"),
        (lambda results, configs: written(results, configs[0], loss=0.75), "mislabelled", "series train/loss"),
        (lambda results, configs: written(results, configs[0], status="diverged"), "mislabelled", "should be ok"),
        (renamed, "mislabelled", "another cell"),
        (lambda results, configs: written(results, small_config("seed=9")), "mislabelled", "no planned cell"),
    ],
)
def test_the_audit_finds(
    tmp_path: Path, spoil: Callable[[Path, list[RunConfig]], None], wrong: str, words: str
) -> None:
    found = audited(tmp_path, spoil)
    assert wrong in [kind for kind, _ in found]
    assert any(words in line for _, line in found)


def test_the_audit_finds_nothing_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert audited(tmp_path, lambda results, configs: None) == []


def test_a_cell_that_ran_to_its_end_twice_is_found(tmp_path: Path) -> None:
    ((wrong, words),) = audited(tmp_path, lambda results, configs: None, ends=2)
    assert wrong == "duplicated"
    assert "2 times" in words


def test_numbers_that_were_not_finite_must_have_diverged(tmp_path: Path) -> None:
    ((wrong, words),) = audited(tmp_path / "a", lambda results, configs: None, nan_step=2)
    assert (wrong, words.split(":")[0]) == ("mislabelled", "ok where it should be diverged")
    diverged = lambda results, configs: written(results, configs[0], final="bb", status="diverged")  # noqa: E731
    assert audited(tmp_path / "b", diverged, nan_step=2) == []
    before = lambda results, configs: written(results, configs[0], status="diverged", loss=0.1)  # noqa: E731
    ((_, words),) = audited(tmp_path / "c", before, nan_step=2)
    assert words == "series train/loss differs from the undisturbed run"


def test_a_stopped_orphan_is_ended_and_one_that_runs_is_not(tmp_path: Path) -> None:
    code = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
    processes = [subprocess.Popen(code, cwd=tmp_path, stdin=-1, stdout=-1) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    processes[0].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, processes[0].pid, os.WSTOPPED | os.WNOWAIT)
    assert audit.end_stopped(tmp_path) == [processes[0].pid]
    assert processes[0].wait(10) == -signal.SIGKILL
    assert processes[1].poll() is None
    processes[1].communicate(timeout=10)


def test_leftovers_are_found(tmp_path: Path) -> None:
    results, control = tmp_path / "results", tmp_path / "control"
    control.mkdir()
    written(results, small_config())
    assert audit_leftovers(results, control) == []
    (results / "work" / run_id(small_config())).mkdir(parents=True)
    for name in ("state.part", "state.pt"):
        (results / "work" / run_id(small_config()) / name).write_bytes(b"x")
    (results / "runs" / SWEEP / "a.json.0123abcd.tmp").write_bytes(b"x")
    code = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(code, cwd=control, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert audit.alive(control) == [process.pid]
        found = [case.words for case in audit_leftovers(results, control)]
    assert len(found) == 4
    assert found[0] == f"process {process.pid} is alive"
    assert {Path(line).name for line in found[1:]} == {"state.part", "state.pt", "a.json.0123abcd.tmp"}
    path_of(results, small_config()).write_text("{")  # no record that is ok, so its state may be there
    assert {Path(case.words).name for case in audit_leftovers(results, control)} == {
        "state.part",
        "a.json.0123abcd.tmp",
    }


def test_values_that_resumed_runs_lack_are_counted_in_series_that_can_be_read(tmp_path: Path) -> None:
    reference, records = (tmp_path / name / "runs" / SWEEP for name in ("reference", "round"))
    for folder, first in ((reference, 0.1), (records, math.nan)):
        for seed in range(3):
            config = replace(small_config(), seed=seed)
            launch = Launch(results=str(folder.parents[1]), sweep=SWEEP)
            made = record(config, launch, None, {"final": "aa"}, "ok", None, None).model_copy(update={"num_steps": 2})
            write_result(folder, made, [{"sync/code_flip_rate": first}, {"sync/code_flip_rate": 0.2}])
    assert audit.unmeasured(records, reference) == 3
    next(records.glob("*.parquet")).write_bytes(b"cut")
    assert audit.unmeasured(records, reference) == 2


@pytest.mark.parametrize(
    ("code", "line", "told", "wrong"),
    [
        (1, "cell failed: base folder {base} is damaged", ["reported"], []),
        (1, "cell failed: for some reason", [], ["unreported"]),
        (-9, "", [], []),  # the sweep was killed before it could say so
        (0, "cell ok: None", [], ["mislabelled"]),
    ],
)
def test_a_damaged_base_must_be_named(code: int, line: str, told: list[str], wrong: list[str], tmp_path: Path) -> None:
    configs = (small_config(), replace(small_config(), seed=1))
    opened = OpenRound(folder=tmp_path, reference=tmp_path, configs=configs, settings=Settings())
    opened.control.mkdir(parents=True)
    base = opened.results / "bases" / "xs-chain8-b0-0123456789ab"
    base.mkdir(parents=True)
    (base / "model.safetensors").write_bytes(b"0123456789")
    (base / "recipe.json").write_text("{}")
    outside = [Fault(id="b", kind="base", form="truncated")]
    now = next_start(outside, opened, list(configs))
    with ExitStack() as stack:
        assert now.before(opened, stack) is None
    assert (outside, (base / "model.safetensors").read_bytes()) == ([], b"012345")
    now.after(opened, [code], [line.format(base=base)])
    assert (base / "model.safetensors").read_bytes() == b"0123456789"
    assert [mark.status for mark in read(opened.control) if mark.what == "told"] == told
    assert [case.wrong for case in opened.cases] == wrong


@pytest.mark.parametrize(
    ("fault", "later", "became", "seconds"),
    [
        (("disk", "state limit"), [("step", 1, 9, 5, "")], OUTCOMES[0], 3.0),
        (("kill", "step"), [("step", 2, 9, 4, "")], OUTCOMES[1], 3.0),
        (("kill", "step"), [("step", 2, 8, 4, "")], OUTCOMES[2], 3.0),
        (("kill_sweep", "step"), [("step", 1, 9, 5, ""), ("step", 2, 8, 6, "")], OUTCOMES[2], 4.0),
        (("memory", "MemoryError"), [("end", 1, 9, 4, "failed"), ("end", 2, 9, 9, "ok")], OUTCOMES[1], 4.0),
        (("nan", "loss"), [("end", 1, 9, 4, "diverged")], OUTCOMES[3], 3.0),
        (("kill", "step"), [], "", None),
    ],
)
def test_what_became_of_a_fault(
    fault: tuple[str, str], later: list[tuple[str, int, int, int, str]], became: str, seconds: float | None
) -> None:
    order = Fault(id="f", kind=fault[0], form=fault[1])
    marks = [Mark(what="inject", cell="c", at_s=10.0, pid=1, parent=9, step=4, fault="f")]
    for i, (what, pid, parent, step, status) in enumerate(later):
        marks.append(
            Mark(what=what, cell="c", at_s=13.0 + i, pid=pid, parent=parent, step=step, status=status)  # type: ignore[arg-type]
        )
    found = outcome(order, marks)
    assert found is not None
    assert (found.became, found.recovery_s) == (became, seconds)
    assert outcome(replace(order, id="other"), marks) is None
    row = summary([found], (order.kind,))[order.kind]
    assert (row["injected"], row["recovered"], row["recovery_s_median"]) == (1, int(bool(became)), seconds)
    assert totals({order.kind: row}, [], 3)["injected"] == 1


def test_a_small_campaign(tmp_path: Path) -> None:
    """One fault of each cheap kind, in two cells of a real sweep."""
    configs = tuple(small_config("method=bf16", f"seed={seed}", "trainer.steps=6") for seed in (0, 1))
    reference = tmp_path / "reference"
    for config in configs:
        run_cell(config, replace(small_launch(reference), sweep=SWEEP))
    plan = Round(
        cells=(
            (
                Fault(id="0", kind="disk", form="state limit", step=1),
                Fault(id="1", kind="memory", form="MemoryError", step=2),
                Fault(id="2", kind="state", form="flipped"),
                Fault(id="3", kind="kill", form="saving", step=3),
            ),
            (Fault(id="4", kind="nan", form="gradient", step=4),),
        ),
        outside=(Fault(id="5", kind="record", form="garbage"), Fault(id="6", kind="record", form="truncated")),
    )
    settings = Settings(workers=2)
    opened = OpenRound(folder=tmp_path / "round", reference=reference, configs=configs, settings=settings)
    opened.control.mkdir(parents=True)
    small_launch(opened.results)
    done = run_round(opened, plan)
    assert done.cases == []
    became = {one.fault.id: one.became for one in done.outcomes}
    assert became == {
        "0": "went on", "1": "retried by the sweep", "2": "went on", "3": "retried by the sweep", "4": "reported",
        "5": "reported", "6": "reported",
    }  # fmt: skip
    survivor, diverged = (read_result(opened.records / f"{run_id(config)}.json") for config in configs)
    assert (survivor.status, diverged.status) == ("ok", "diverged")
    told = " ".join(survivor.retries)
    assert all(words in told for words in ("out of memory: MemoryError", "killed by SIGKILL", "state.pt.corrupt"))
    assert opened.starts == [0, 2, 0]


def test_the_committed_campaign() -> None:
    data = json.loads((ROOT / "results" / report.FILE).read_text(encoding="utf-8"))
    sums = data["totals"]
    assert sums["injected"] >= 200
    assert all(sums[wrong] == 0 for wrong in audit.WRONGS)
    assert data["cases"] == []
    assert set(data["kinds"]) == set(FORMS)
    assert all(row["injected"] == row["recovered"] > 0 for row in data["kinds"].values())
    assert sum(row["injected"] for row in data["kinds"].values()) == sums["injected"]
    assert (ROOT / "results" / "tables" / "faults.md").read_text(encoding="utf-8") == report.table(data)


def test_fewer_faults_than_asked_for_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = FaultOutcome(fault=Fault(id="f", kind="kill", form="step"), became=OUTCOMES[1], recovery_s=1.0)
    case = audit.Case(wrong="lost", where="round-000 c", words="no record")

    def run(outcomes: int, cases: tuple[audit.Case, ...]) -> int:
        found = campaign.Campaign(
            outcomes=(one,) * outcomes, cases=cases, records=6, unmeasured=0, ended=0, rounds=2, starts=3, processes=7,
            volume=False,
        )  # fmt: skip
        monkeypatch.setattr("harness.devtools.faults.__main__.run_campaign", lambda *_: found)
        return main(["--count", "2", "--kinds", "kill", "--results", str(tmp_path)])

    assert (run(2, ()), capsys.readouterr().err) == (0, "")
    assert "bit for bit" in (tmp_path / "tables" / "faults.md").read_text()
    assert (run(1, ()), capsys.readouterr().err) == (1, "count=2: only 1 faults were injected in 2 rounds\n")
    assert (run(2, (case,)), capsys.readouterr().err) == (1, "lost  round-000 c: no record\n")
    assert "bit for bit" not in (tmp_path / "tables" / "faults.md").read_text()
    assert (run(0, ()), (tmp_path / "figures" / "faults" / "outcomes.png").stat().st_size > 0) == (1, True)


def test_the_figure_shows_every_fault() -> None:
    data = json.loads((ROOT / "results" / report.FILE).read_text(encoding="utf-8"))
    left, right = report.figure(data).axes
    assert sum(bar.get_width() for bar in left.patches) == data["totals"]["injected"]  # type: ignore[attr-defined]
    medians = {line.get_xdata()[0] for line in right.lines if line.get_marker() == "|"}  # type: ignore[index]
    assert medians == {kind["recovery_s_median"] for kind in data["kinds"].values()}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kinds", "kil"], r"kinds=kil: unknown; .*kill"),
        (["--scratch", "."], r"scratch=\.: not an empty folder; give a new one"),
        (["--scratch", "there"], r"scratch=there: not an empty folder; give a new one"),
        (["--results", "there"], r"results=there: not a folder"),
        (["--workers", "-1"], r"workers=-1: must be at least 1"),
        (["--count", "0"], r"count=0: must be at least 1"),
    ],
)
def test_bad_words_are_told(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert re.search(told, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        ("refused", "Connection refused", "Connection refused"),
        ("error", "HTTP Error 500", "HTTP Error 500"),
        ("dies", '{"experiments": []}', "Connection refused"),
        ("silent", "timed out", "timed out"),
    ],
)
def test_a_tracking_server_fails_as_it_should(form: str, first: str, second: str) -> None:
    def answer(address: str) -> str:
        try:
            with urllib.request.urlopen(address, timeout=0.5) as found:
                return found.read().decode()
        except OSError as error:
            return str(error)

    with mlflow(form) as address:
        if form == "error":  # one who does not wait for the answer changes nothing for others
            port = int(address.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert first in answer(address)
        assert second in answer(address)


@pytest.mark.slow
def test_a_campaign_of_every_kind(tmp_path: Path) -> None:
    settings = Settings(count=40, seed=7)
    found = campaign.run_campaign(settings, tmp_path, ROOT / "results" / "bases", lambda line, injected: None)
    assert len(found.outcomes) >= 40
    assert found.cases == ()
    assert all(one.became for one in found.outcomes)
