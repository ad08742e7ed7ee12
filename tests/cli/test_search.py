import re
import shutil
import socket
import threading
import time
import urllib.request
from contextlib import redirect_stdout

import pytest

from harness.cli.main import main
from harness.cli.search import dashboard
from harness.records.packed import pack
from harness.records.run_result import read_results
from harness.studies.search.spec import read_search
from harness.studies.search.store import open_studies
from tests.toy import small_launch

FILE = """
question: Does a real search work?
overrides: [model=xs, task=chain, model.spread=0, trainer.steps=4, trainer.eval_every=2, task.num_eval=32,
            algo.num_prompts=4, algo.group_size=4, precision=int4, method=flashrl]
space:
  algo.eps_high: {low: 0.1, high: 1.0, log: true}
  knobs.TIS.cap: {low: 1.0, high: 8.0, log: true}
seeds: [0]
objectives:
  - {metric: auc, direction: maximize}
  - {metric: k3_median, direction: minimize, log: true}
constraint: {metric: k3_median, at_most: 1.0}
budget: {trials: 3}
baselines: {default: {algo.eps_high: 0.28, knobs.TIS.cap: 2.0}}
confirm: {seeds: [1]}
"""


def lowbit_search(*words):
    return main(["search", *map(str, words)])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    small_launch(folder)
    path = folder / "search_real.yaml"
    path.write_text(FILE, encoding="utf-8")
    with (folder / "said.txt").open("w", encoding="utf-8") as said, redirect_stdout(said):
        code = lowbit_search(path, "--workers", "2", "--results", folder, "--no-tracking")
    return folder, path, code


def test_a_real_search_runs_its_cells_and_reports(place, capsys):
    folder, path, code = place
    records = read_results(folder / "runs" / "search_real")
    assert code == 0 and len(records) == 3 + 2 and {r.status for r in records} == {"ok"}
    assert sorted(r.seed for r in records) == [0, 0, 0, 1, 1]
    assert {r.config["knobs"]["TIS"]["cap"] for r in records if r.config["algo"]["eps_high"] == 0.28} == {2.0}
    assert lowbit_search(path, "--report", "--results", folder) == 0
    assert "against default" in capsys.readouterr().out
    assert (folder / "tables" / "search_real.md").exists()


def test_every_trial_and_every_fresh_run_is_a_line(place):
    lines = (place[0] / "said.txt").read_text(encoding="utf-8").splitlines()
    trials = [line for line in lines if re.match(r"\[\d/3\] +\d+\.\d min  complete ", line)]
    assert len(trials) == 3 and all(re.search(r": auc [\d.]+, k3_median [\d.e-]+$", line) for line in trials)
    fresh = [line for line in lines if line.startswith("[fresh seeds ")]
    for number, line in enumerate(fresh, 1):
        assert re.fullmatch(rf"\[fresh seeds {number}/2\] +\d+\.\d min  ok flashrl-int4-xs-chain\d+-b1-s1", line)
    assert len(fresh) == 2


def test_the_table_of_a_search_is_no_sweeps(place, capsys):
    folder = place[0]
    table = (folder / "tables" / "search_real.md").read_bytes()
    assert main(["report", "search_real", "--results", str(folder)]) == 2
    assert "search_real is a search, whose table is another: lowbit search" in capsys.readouterr().err
    assert (folder / "tables" / "search_real.md").read_bytes() == table


def test_a_dry_run_tells_the_space_and_what_is_left(place, capsys):
    folder, path, _ = place
    words = ("--dry-run", "--workers", 2, "--results", folder)
    assert lowbit_search(path, "--trials", 10, *words) == 0
    out = capsys.readouterr().out
    assert "algo.eps_high: 0.1 to 1.0 (log)" in out and "3 trials and 3 cells are done" in out
    assert "at most 8 cells" in out  # 7 trials of one seed, and a new best on one fresh seed
    assert lowbit_search(path, *words) == 0
    out = capsys.readouterr().out
    assert "at most 0 cells" in out and "the budget is spent" in out
    bare = folder / "search_bare.yaml"
    bare.write_text("".join(line for line in FILE.splitlines(True) if not line.startswith("baselines")))
    assert lowbit_search(bare, *words) == 0
    assert "at most 4 cells" in (out := capsys.readouterr().out) and "about" in out


def test_a_dry_run_reads_a_packed_search_where_it_lies(place, tmp_path, capsys):
    folder, path, _ = place
    shutil.copytree(pack(folder, "search_real").parent, tmp_path / "packed")
    shutil.copytree(folder / "searches", tmp_path / "searches")
    assert lowbit_search(path, "--dry-run", "--results", tmp_path) == 0
    assert "at most 0 cells" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "searches"]


def test_a_stopped_restart_and_the_study_of_another_search_say_how_to_go_on(tmp_path, monkeypatch, capsys):
    path, words = tmp_path / "search_stopped.yaml", ("--results", tmp_path / "results", "--no-tracking")
    path.write_text(FILE, encoding="utf-8")
    monkeypatch.setattr("harness.studies.search.run.run_search", lambda *given, **named: True)
    for option, told in (((), "command goes"), (("--restart",), "command without --restart goes")):
        assert lowbit_search(path, *option, *words) == 130
        assert f"stopped; the same {told} on from here" in capsys.readouterr().out
    open_studies(read_search(str(path)), tmp_path / "results")
    path.write_text(FILE.replace("high: 8.0", "high: 9.0"), encoding="utf-8")
    assert lowbit_search(path, "--dry-run", *words) == 2
    told = "another search: space.knobs.TIS.cap.high: 8.0 in the study, 9.0 in the file. Give the file of the search"
    assert told in capsys.readouterr().err


def test_the_dashboard_serves_the_study(place):
    folder, path, _ = place
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threading.Thread(target=dashboard, args=(read_search(str(path)), folder, port), daemon=True).start()
    assert "search_real" in _get(f"http://127.0.0.1:{port}/api/studies")


def _get(url):
    for _ in range(100):
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def test_a_taken_port_and_a_missing_study_are_refused_in_one_line(place, tmp_path, capsys):
    folder, path, _ = place
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert lowbit_search(path, "--dashboard", "--port", port, "--results", folder) == 2
        assert re.search(rf"port {port} cannot be used: .*choose another with --port\n$", capsys.readouterr().err)
    for option in ("--dashboard", "--report"):
        assert lowbit_search(path, option, "--results", tmp_path) == 2
        error = (
            f"lowbit: error: search 'search_real' has no study in {tmp_path}; run it first: lowbit search search_real\n"
        )
        assert capsys.readouterr().err == error
