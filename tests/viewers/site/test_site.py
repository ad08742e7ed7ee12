"""The static site: what it holds, and that it sorts, filters and shows passports in a real browser, from disk."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.foundation import project_files
from harness.records.folder import readable
from harness.records.packed import pack
from harness.records.run_result import RunResult, TaskEvalRecord, read_series, write_result
from harness.records.sweep_file import Purpose
from harness.report.leaderboard import leaderboard
from harness.report.verdicts import shown_verdict
from harness.viewers.site import STAMP, board, compact, opening, pages, write_site
from harness.viewers.site.board import number
from harness.viewers.site.markdown import to_html
from harness.viewers.tracking.facts import spread_steps
from tests import arm_factory
from tests import result_factory as factory
from tests.viewers.browser import dom

STEPS: dict[str, Any] = {"trainer__steps": 50, "trainer__eval_every": 25}
ARMS = (("bf16", "bf16"), ("naive", "int8"), ("flashrl", "int8"), ("naive", "int4"), ("flashrl", "int4"))
EVIL = "</script><img src=x onerror=alert(1)>"
WEIGHTS = [
    {
        "name": "layers.0.q_proj.weight",
        "format": "int4_g32",
        "dtype": "int8",
        "scale_shape": [64, 2],
        "hash": "00ff10ab",
    },
    {"name": "norm.weight", "format": "fp32", "dtype": "float32", "scale_shape": None, "hash": "deadbeef"},
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of five arms at two lengths, one failed run, one bad file, a figure and the claims."""
    folder = tmp_path_factory.mktemp("results")
    for method, precision in ARMS:
        for n in (8, 16):
            for seed in range(3):
                is_lost = (method, precision, n, seed) == ("naive", "int4", 8, 2)
                changes = {**STEPS, "task__n": n, "status": "failed" if is_lost else "ok", "sweep": "duel"}
                result, series = factory.result(method, precision, seed=seed, **changes)
                passport = {"engine": "embedded", "sampler": "cached", "kv": None, "weights": WEIGHTS,
                            "acts": {"layers.0.q_proj.weight": "int8"}}  # fmt: skip
                changed: dict[str, Any] = {
                    "passport": passport,
                    "planned": {"rollout_weights": "int4_g32", "adapters": None},
                }
                if is_lost:
                    changed = {"reason": EVIL}
                write_result(folder / "runs" / "duel", result.model_copy(update=changed), series)
    (folder / "runs" / "duel" / "half.json").write_text("{")
    for name, text in (
        ("figures/duel/scores.png", "x"),
        ("claims.md", "# Claims\n\n| claim | badge |\n|---|---|\n| a | b |"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    write_site(folder)
    return folder


def page_data(results: Path) -> dict[str, Any]:
    text = (results / "site" / "index.html").read_text()
    found = re.search(r"<script>window\.LOWBIT=(.*);</script>", text)
    assert found is not None
    return json.loads(found[1])


def run_data(results: Path) -> dict[str, Any]:
    text = (results / "site" / "data" / "duel.js").read_text()
    assert text.startswith('lowbitRuns("duel",') and text.endswith(");\n")
    return json.loads(text.removeprefix('lowbitRuns("duel",').removesuffix(");\n"))


def cells(text: str) -> list[list[str]]:
    """The rows of the leaderboard as words."""
    body = text.partition('<tbody id="rows">')[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.S)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in row] for row in found]


def test_the_page_has_the_leaderboard(results: Path) -> None:
    (sweep,) = page_data(results)["sweeps"]
    board = leaderboard(readable_runs(results))
    rows = [dict(zip(sweep["columns"], row, strict=True)) for row in sweep["rows"]]
    assert [row["arm"] for row in rows] == list(board["arm"])
    assert [row["auc"] for row in rows] == [number(v) for v in board["auc"]]
    assert [row["verdict"] for row in rows] == [shown_verdict(row) for row in board.to_dict("records")]
    lost = next(row for row in rows if row["arm"] == "naive int4 n=8")
    assert (lost["seeds"], lost["n"], lost["status"]) == (2, 3, "2 ok, 1 failed")
    assert sweep["figures"] == ["../figures/duel/scores.png"] and len(sweep["problems"]) == 1
    assert sweep["problems"][0].startswith("half.json:")
    titles = [c["title"] for c in sweep["comparisons"]]
    assert "flashrl against naive at int8, n=16" in titles and "flashrl against naive at int4, every context" in titles


def test_the_page_judges_the_endpoints_of_the_file_at_the_level_of_its_looks(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdicts() -> set[str]:
        entry, _ = board.sweep_entry(results, "duel")
        return {row[entry["columns"].index("verdict")] for row in entry["rows"]}

    before = verdicts()
    monkeypatch.setattr(board, "purpose", lambda sweep, results: Purpose(endpoints=("deployed",)))
    assert verdicts() == {"control", "not declared"} != before
    monkeypatch.setattr(board, "purpose", lambda sweep, results: Purpose())
    monkeypatch.setattr(board, "level_of", lambda results, sweep: 1e-9)
    assert verdicts() == {"control", "cannot tell"} != before


def readable_runs(results: Path) -> list[RunResult]:
    found, problems = readable(results / "runs" / "duel")
    assert len(problems) == 1 and "half.json" in problems[0]
    return found


def test_runs_and_passports_are_complete(results: Path) -> None:
    data, records = run_data(results), {run.run_id: run for run in readable_runs(results)}
    runs = [dict(zip(data["fields"], values, strict=True)) for values in data["runs"]]
    assert {run["id"] for run in runs} == set(records)
    for run in runs:
        record = records[run["id"]]
        assert (run["seed"], run["status"], run["reason"]) == (record.seed, record.status, record.reason)
        settings = {k: v for k, v in {**data["base"], **data["settings"][run["arm"]]}.items()
                    if k not in data["absent"][run["arm"]]}  # fmt: skip
        assert (settings["method"], settings["task.n"]) == (record.method.name, record.config["task"]["n"])
        assert dict(zip(data["summary"], run["summary"], strict=True))["auc"] == number(record.summary["auc"])
        assert [e[:2] for e in run["evals"]] == [
            [e.step, number(e.accuracy)] for e in record.evals if e.site == "reference"
        ]
        if record.passport is None:
            assert run["passport"] is None and record.status == "failed"
            continue
        tensors = [data["tensors"][place] for place in data["passport"][run["passport"]]["weights"]]
        assert [t[:4] for t in tensors] == [[w["name"], w["format"], w["dtype"], w["scale_shape"]] for w in WEIGHTS]
        assert tensors[0][4] == "int8" and base64.b64decode(run["hashes"]).hex() == "00ff10abdeadbeef"
        assert data["planned"][run["planned"]] == {"rollout_weights": "int4_g32"}
    assert len(data["passport"]) == 1 and len(data["tensors"]) == 2


def test_runs_have_their_curves(results: Path) -> None:
    data = run_data(results)
    runs = [dict(zip(data["fields"], values, strict=True)) for values in data["runs"]]
    for run in runs:
        series = read_series(results / "runs" / "duel", run["id"]) if run["status"] == "ok" else None
        steps = data["points"][run["points"]]
        if series is None:
            continue
        assert steps == list(range(2, 51, 3))
        for name, curve in zip(data["curves"], run["curves"], strict=True):
            wanted = [series[name][step - 1] for step in steps] if name in series else []
            assert curve == pytest.approx(wanted, rel=1e-3)
        assert run["curves"][0] and run["curves"][1]
    assert [spread_steps(count, 3) for count in (0, 2, 7)] == [[], [1, 2], [1, 4, 7]]


def test_a_packed_sweep_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "broken.zip").write_bytes(b"PK\x03\x04 cut off")
    write_site(tmp_path)
    said = capsys.readouterr().err
    assert said.startswith("warning: left out: ") and "broken.zip" in said


def test_a_damaged_series_is_named_and_its_run_is_kept(tmp_path: Path) -> None:
    result, series = factory.result(sweep="duel", **STEPS)
    write_result(tmp_path / "runs" / "duel", result, series)
    (tmp_path / "runs" / "duel" / f"{result.run_id}.parquet").write_bytes(b"x")
    write_site(tmp_path)
    (problem,) = page_data(tmp_path)["sweeps"][0]["problems"]
    assert problem.startswith(f"{result.run_id}.parquet: not a Parquet file")
    ((*_, points, curves),) = run_data(tmp_path)["runs"]
    assert run_data(tmp_path)["points"][points] == [] and curves == [[], [], []]


def test_a_browser_draws_curves_and_speed_against_accuracy(results: Path) -> None:
    record = next(r for r in readable_runs(results) if r.status == "ok")
    one = dom(results, f"#of=duel&run={record.run_id}").partition("<dialog")[2]
    charts = re.findall(r'<figure class="chart">(.*?)</figure>', one, re.S)
    assert re.match(r"<figcaption>Accuracy; orange: as rolled", charts[0]) and charts[0].count("<path") == 2
    assert "Reward of the sampler" in charts[1] and "NaN" not in "".join(charts)
    for chart in charts[1:]:
        (line,) = re.findall(r'<path class="line[^"]*" d="([^"]*)"', chart)
        assert line.count("L") == 16
    board = dom(results, "#sweep=duel&context=n%3D16").partition('<figure id="speed"')[2].partition("</figure>")[0]
    assert board.count("<circle") == 5 and "NaN" not in board and "says nothing about a GPU" in board
    assert "<circle" not in dom(results, "#all").partition('<figure id="speed"')[2].partition("</figure>")[0]


def test_nothing_is_loaded_from_a_network_and_equal_results_make_equal_files(results: Path) -> None:
    site = results / "site"
    before = {path: path.read_bytes() for path in site.rglob("*.*")}
    text = before[site / "index.html"].decode()
    loads = re.findall(r"""(?:src|href)=["']?([^"'>\s]+)""", text.partition("<script>")[0])
    assert loads and all(link.startswith(("#", "data:,", "../")) for link in loads)
    assert "@import" not in text and "url(" not in text and "fetch(" not in text
    assert EVIL not in text and "</script" not in (site / "data" / "duel.js").read_text()
    assert compact({"a": "</script>"}) == '{"a":"<\\/script>"}'
    write_site(results)
    assert {path: path.read_bytes() for path in site.rglob("*.*")} == before


def test_a_browser_filters_and_sorts(results: Path) -> None:
    text = dom(results, "#sweep=duel&context=n%3D8&method=naive,flashrl&sort=accuracy&few=1")
    rows = cells(text)
    board = leaderboard(readable_runs(results))
    chosen = board[(board["context"] == "n=8") & board["method"].isin(["naive", "flashrl"])].sort_values("accuracy")
    assert [row[0].rstrip("*†‡") for row in rows] == [a.removesuffix(" n=8") for a in chosen["arm"]]
    assert [row[5] for row in rows] == [f"{v:.3f}" for v in chosen["accuracy"]]
    assert [row[3] for row in rows] == ["2/3" if a == "naive int4 n=8" else "3" for a in chosen["arm"]]
    assert 'aria-sort="ascending"' in text and text.count('aria-sort="none"') == 12
    one_seed = cells(dom(results, "#sweep=duel&context=n%3D8&precision=int4&method=naive"))
    assert [row[3] for row in one_seed] == ["2/3"]  # nothing else is there, so what has few seeds is not hidden
    assert "4 of 10 arms" in text and "left alone: half.json" in text
    assert re.search(r'<a href="#sweep=duel&amp;context=n%3D16&amp;precision=int8&amp;method=flashrl%2Cnaive">', text)
    assert '<th scope="col">badge</th>' in text and 'src="../figures/duel/scores.png"' in text


def test_a_browser_shows_intervals_and_further_seeds_as_reports_do(
    results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An end of -0.0004 is no -0.000 in a tooltip, and infinitely many seeds are more than 1000."""
    board_of = leaderboard

    def near_zero(*given: Any) -> Any:
        ends = {"difference": -0.01, "difference_low": -0.0196, "difference_high": -0.00042}
        rows = board_of(*given).assign(**ends, auc=0.5, auc_low=0.4567, auc_high=0.55, verdict="cannot tell")
        return rows.assign(further_seeds=[4.0, math.inf, math.nan, *[12.0] * (len(rows) - 3)])

    monkeypatch.setattr("harness.report.leaderboard.leaderboard", near_zero)
    shutil.copytree(results / "runs", tmp_path / "runs")
    write_site(tmp_path)
    text = dom(tmp_path, "#sweep=duel&few=1")
    titles = re.findall(r'title="(\[[^"]*)"', text)
    assert Counter(titles) == {"[-0.020, -0.0004]": 10, "[0.457, 0.550]": 10}
    said = Counter(cell.removeprefix("cannot tell").strip() for row in cells(text) for cell in row if "cannot" in cell)
    assert said == {"(+4)": 1, "(>1000)": 1, "": 1, "(+12)": 7}


def test_the_page_opens_at_the_main_table_where_it_is_there() -> None:
    columns = ["verdict", "is_preliminary", "context"]
    two, one = [["equal", False, "n=8"], ["worse", False, "n=8"]], [["cannot tell", False, "n=10"]]
    entries = [{"name": name, "columns": columns, "rows": rows} for name, rows in (("a", two), ("main_wordmath", one))]
    assert opening(entries) == {"sweep": "main_wordmath", "context": "n=10"}
    assert opening(entries[:1]) == {"sweep": "a", "context": "n=8"} and opening([]) == {}


def test_a_browser_opens_at_one_comparison(results: Path) -> None:
    """The score is the difference to the control, which stands at 0, and the arm with two seeds is hidden."""
    chosen = page_data(results)["opening"]
    arms = leaderboard(readable_runs(results))
    decided = arms["verdict"].str.startswith(("better", "worse", "equal")) & (arms["seeds"] >= 3)
    count = {context: int((decided & (arms["context"] == context)).sum()) for context in ("n=8", "n=16")}
    assert chosen["sweep"] == "duel" and count[chosen["context"]] == max(count.values()) > 0
    text = dom(results, f"#sweep=duel&context={chosen['context']}")
    rows = cells(text)
    assert cells(dom(results, "")) == rows
    shown = arms[(arms["context"] == chosen["context"]) & (arms["seeds"] >= 3)].fillna({"difference": 0.0})
    shown = shown.sort_values("difference", ascending=False)
    assert [row[0].rstrip("*†‡") for row in rows] == [a.removesuffix(f" {chosen['context']}") for a in shown["arm"]]
    wanted = [
        "\u2013" if v == "control" else f"{d:+.3f}" for d, v in zip(shown["difference"], shown["verdict"], strict=True)
    ]
    assert [row[1] for row in rows] == wanted
    eight = dom(results, "#sweep=duel&context=n%3D8")
    assert len(cells(eight)) == 4 and "4 of 10 arms; 1 under 3 seeds are hidden" in eight


def test_a_browser_shows_a_passport(results: Path) -> None:
    record = next(r for r in readable_runs(results) if r.method.name == "flashrl" and r.status == "ok")
    text = dom(results, f"#of=duel&run={record.run_id}").partition("<dialog")[2]
    assert text.startswith(' id="detail" aria-labelledby="detail-title" open')
    for words in (record.run_id, "int4_g32", "64\u00d72", "<code>00ff10ab</code>", "<code>deadbeef</code>",
                  "knobs.TIS.cap",
                  f"<td>{record.evals[0].accuracy:.3f}</td>", "base precision", record.commit):  # fmt: skip
        assert words in text
    assert f"results/runs/duel/{record.run_id}.json" in text


def test_a_browser_shows_all_settings_in_which_an_arm_differs(tmp_path: Path) -> None:
    for method in ("flashrl", "naive"):
        write_result(tmp_path / "runs" / "duel", *factory.result(method, "int8", sweep="duel", **STEPS))
    write_site(tmp_path)
    text = dom(tmp_path, "#of=duel&arm=naive%20int8").partition("differ from the sweep's first arm</h3>")[2]
    shown = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert shown["method"] == '<code>"naive"</code>' and shown["knobs.TIS.cap"] == "not set here"
    assert '<p id="summary">1 sweep, 2 arms, 2 runs.' in dom(tmp_path, "#all")


def test_a_browser_shows_evaluations_on_tasks(tmp_path: Path) -> None:
    asked = {"number": 0, "task": "gsm8k", "step": 50, "site": "rollout", "precision": "int8", "engine": "vllm", "k": 4,
             "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64}  # fmt: skip
    lost = TaskEvalRecord(**(asked | {"number": 1, "task": "aime24"}), error=EVIL)
    answered = TaskEvalRecord(**asked, scores={"avg@4": 0.123456, "pass@4": 0.5, "maj@4": None})
    with_tasks, series = factory.result("flashrl", "int8", sweep="duel", **STEPS)
    without, others = factory.result("bf16", sweep="duel", **STEPS)
    with_tasks = with_tasks.model_copy(update={"evaluations": [answered, lost]})
    for run, rows in ((with_tasks, series), (without, others)):
        write_result(tmp_path / "runs" / "duel", run, rows)
    write_site(tmp_path)
    assert run_data(tmp_path)["tasks"] == {
        with_tasks.run_id: [
            ["gsm8k", 50, "rollout", "int8", 4, {"avg@4": 0.1235, "pass@4": 0.5, "maj@4": None}],
            ["aime24", 50, "rollout", "int8", 4, EVIL],
        ]
    }
    body = dom(tmp_path, f"#of=duel&run={with_tasks.run_id}").partition("Evaluations on tasks</h3>")[2]
    rows = [
        re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body.partition("</table>")[0])
    ]
    assert [[html.unescape(cell) for cell in row] for row in rows if row] == [
        ["gsm8k", "50", "rollout", "int8", "4", "avg@4 0.123, pass@4 0.500, maj@4 \u2013"],
        ["aime24", "50", "rollout", "int8", "4", EVIL],
    ]
    assert "Evaluations on tasks</h3>" not in dom(tmp_path, f"#of=duel&run={without.run_id}")


def test_arms_that_collapse_come_last(tmp_path: Path) -> None:
    """The difference of such an arm is that of its runs that did not fall, here above 0; sorted by another column it
    stands where its number is."""
    for method, precision, ends in (
        ("bf16", "bf16", (0.7, 0.7, 0.7)), ("naive", "int8", (0.6, 0.6, 0.6)), ("naive", "int4", (0.8, 0.8, 0.0)),
    ):  # fmt: skip
        for seed, end in enumerate(ends):
            ((run, rows),) = arm_factory.run("duel", method, precision, auc=end, seeds=seed + 1)[seed:]
            write_result(tmp_path / "runs" / "duel", run, rows)
    write_site(tmp_path)
    board = {row[0]: row for row in cells(dom(tmp_path, "#sweep=duel"))}
    assert list(board) == ["bf16 bf16", "naive int8", "naive int4"]
    assert board["naive int4"][1].startswith("+") and board["naive int4"][2].startswith("collapses")
    assert [row[0] for row in cells(dom(tmp_path, "#sweep=duel&sort=auc"))][-1] != "naive int4"
    shown = dom(tmp_path, "#sweep=duel&verdict=collapses+in+x+of+n")
    assert [row[0] for row in cells(shown)] == ["naive int4"] and "collapses in 1 of 3" in shown


def test_a_row_whose_mean_is_open_says_on_which_bases_it_loses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = factory.replicated({0: 0, 1: 20, 2: 9, 3: 25})
    monkeypatch.setattr(board, "runs_of", lambda *_: (runs, []))
    entry, _ = board.sweep_entry(tmp_path, "replicated")
    rows = [dict(zip(entry["columns"], row, strict=True)) for row in entry["rows"]]
    assert {row["arm"]: row["verdict"] for row in rows} == {
        "bf16 bf16": "control", "naive int8": "lower on 3 of 4 bases, the mean open",
    }  # fmt: skip


def test_long_groups_of_comparisons_are_closed_and_short_ones_open(results: Path) -> None:
    groups = Counter(comparison["group"] for comparison in page_data(results)["sweeps"][0]["comparisons"])
    text = dom(results, "#sweep=duel").partition('id="comparison-list"')[2].partition("</section>")[0]
    shown = re.findall(r"<details( open=\"\")?><summary>([^<]*): (\d+)</summary><ul", text)
    assert {(html.unescape(name), int(count)) for _, name, count in shown} == set(groups.items())
    assert all(bool(is_open) == (int(count) <= 24) for is_open, _, count in shown)


def test_a_browser_shows_an_arm_with_its_lost_run(results: Path) -> None:
    text = dom(results, "#of=duel&arm=naive%20int4%20n%3D8").partition("<dialog")[2]
    body = text.partition('id="detail-body"')[2]
    assert body.count('<span class="badge ok"') == 2 and body.count('<span class="badge failed"') == 1
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # pyright: ignore[reportAttributeAccessIssue]
    parser.feed(body)
    assert EVIL in html.unescape(body) and "img" not in tags and tags.count("table") == 1


def test_the_command_and_its_errors(results: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["site", "duel", "--results", str(results)]) == 0
    assert "index.html: 2 files, 0." in capsys.readouterr().out
    assert main(["site", "dull", "--results", str(results)]) == 2
    assert "sweep 'dull' has no results" in capsys.readouterr().err


def test_a_check_finds_what_is_out_of_date(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Another day or commit is no difference; another number, a missing file and a file too many are."""
    ours = tmp_path / "results"
    shutil.copytree(results, ours, ignore=shutil.ignore_patterns("profile"))
    monkeypatch.setattr(project_files, "committed_sweeps", lambda: ["duel"])

    def checked() -> tuple[int, str]:
        return main(["site", "--check", "--results", str(ours)]), capsys.readouterr().out.strip()

    index, data = ours / "site" / "index.html", ours / "site" / "data" / "duel.js"
    index.write_text(STAMP.sub('<p id="made">Made on 2001-02-03 from commit 0123456789ab.</p>', index.read_text()))
    assert "2001-02-03" in index.read_text() and checked() == (0, f"{ours / 'site'}: up to date")
    text, end = data.read_text(), "run `lowbit site --committed`"
    data.write_text(text.replace('"ok"', '"failed"', 1))
    assert checked() == (1, f"FAIL  {ours / 'site'}: out of date (data/duel.js); {end}")
    data.unlink()
    assert checked() == (1, f"FAIL  {ours / 'site'}: out of date (data/duel.js); {end}")
    data.write_text(text)
    (data.parent / "old.js").write_text("")
    index.write_text(index.read_text().replace('"verdict"', '"verdlct"', 1))
    assert checked() == (1, f"FAIL  {ours / 'site'}: out of date (data/old.js, index.html); {end}")
    assert main(["site", "--committed", "--results", str(ours)]) == 0 and not (data.parent / "old.js").exists()
    capsys.readouterr()
    assert checked()[0] == 0
    assert main(["site", "duel", "--check", "--results", str(ours)]) == 2


def test_a_packed_sweep_gives_the_same_page(tmp_path: Path) -> None:
    for seed in range(2):
        result, series = factory.result(seed=seed, sweep="duel", **STEPS)
        write_result(tmp_path / "runs" / "duel", result, series)
    before = pages(tmp_path, (), "")
    pack(tmp_path, "duel")
    shutil.rmtree(tmp_path / "runs")
    assert len(before) == 2 and pages(tmp_path, (), "") == before


def test_markdown_becomes_markup_and_its_text_does_not() -> None:
    text = "# A\n\nsome *soft* **words**\nand `a|b <c>`\n\n- one\n- [two](../x.md)\n\n"
    text += "| h | i |\n|---|---:|\n| a\\|b | <b>c<br>d |\n"
    assert re.sub(r">\n<", "><", to_html(text)).strip() == (
        "<h3>A</h3>"
        "<p>some <em>soft</em> <strong>words</strong>\nand <code>a|b &lt;c&gt;</code></p>"
        '<ul><li>one</li><li><a href="../x.md">two</a></li></ul>'
        '<div class="scroll" tabindex="0"><table class="text">'
        '<thead><tr><th scope="col">h</th><th style="text-align:right" scope="col">i</th></tr></thead>'
        '<tbody><tr><td>a|b</td><td style="text-align:right">&lt;b&gt;c<br>d</td></tr></tbody></table></div>'
    )
    assert to_html("[x](javascript:alert(1))") == "<p>[x](javascript:alert(1))</p>\n"
    assert to_html("<script>alert(1)</script>") == "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>\n"


def test_numbers_are_short_and_finite() -> None:
    assert [number(v) for v in (0.123456, 12345.678, 2.0, float("nan"), float("inf"), None)] == [
        0.1235, 12350, 2, None, None, None,
    ]  # fmt: skip
