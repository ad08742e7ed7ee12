"""Notebooks: source and executed pair agree, each runs on the committed results and says what its pair says."""

from __future__ import annotations

import base64
import re
import runpy
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from harness.cli.figures import executed
from harness.published.figures import FIGURES, RESULTS, missing
from harness.published.figures.drawn import Drawn
from tests.source_tree import ROOT

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
LARGEST = 250_000
"""Bytes of a PNG in a notebook."""


def pair_of(source: Path) -> Any:
    """The executed notebook. Its results may not be there yet: then it has none."""
    pair = source.with_suffix(".ipynb")
    if not pair.exists() and source.stem in FIGURES and (reason := missing(FIGURES[source.stem], RESULTS)):
        pytest.skip(f"not executed yet: {reason}")
    return nbformat.read(pair, as_version=4)


def said(notebook: Any) -> str:
    """Output of a notebook's cells."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def same_words(a: str, b: str) -> None:
    """Equal but for the last digits of numbers, which may differ between machines."""
    assert NUMBER.sub("#", a) == NUMBER.sub("#", b)
    numbers = [[float(x) for x in NUMBER.findall(text)] for text in (a, b)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.0011)


def test_every_figure_has_a_notebook() -> None:
    assert {source.stem for source in SOURCES} == {*FIGURES, "tour"}
    stray = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} - {source.stem for source in SOURCES}
    assert not stray


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_pair_agrees_and_was_executed_in_order(source: Path) -> None:
    notebook, script = pair_of(source), jupytext.read(source)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in script.cells]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    images = [base64.b64decode(o.data["image/png"]) for o in outputs if "image/png" in o.get("data", {})]
    assert len(images) == 1 and images[0][:4] == b"\x89PNG" and len(images[0]) < LARGEST


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs_on_the_committed_results_and_says_the_same(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails after new results, run `lowbit figures --notebooks`."""
    notebook, shown = pair_of(source), list[Any]()
    monkeypatch.setattr("IPython.display.display", shown.append)
    left = runpy.run_path(str(source))
    before, after = (text.strip().split("\n") for text in (said(notebook), capsys.readouterr().out))
    if source.stem in FIGURES:
        assert isinstance(shown[0], Drawn) and len(shown) == 2
    else:  # its last line is of a run of its own, which differs between machines
        assert after.pop().startswith("flashrl-int4-xs-chain8-b0-s0 ok") and before.pop()
        assert 0 < left["own"].summary["k3_median"] < 10 and left["own"].num_steps == 4
    same_words("\n".join(before), "\n".join(after))


def test_an_executed_notebook_is_the_same_each_time(tmp_path: Path) -> None:
    source = tmp_path / "small.py"
    source.write_text("# %% [markdown]\n# # Title\n\n# %%\nx = 6 * 7\nprint(x)\n\n# %%\nx + 1\n")
    text = executed(source)
    notebook = nbformat.reads(text, as_version=4)
    assert [cell.source for cell in notebook.cells] == ["# Title", "x = 6 * 7\nprint(x)", "x + 1"]
    assert said(notebook) == "42\n" and notebook.cells[2].outputs[0].data["text/plain"] == "43"
    assert [cell.id for cell in notebook.cells] == ["cell-0", "cell-1", "cell-2"]
    assert str(tmp_path) not in text and notebook.cells[1].metadata == {}
    source.write_text("# %%\nraise ValueError('no')\n")
    with pytest.raises(CellExecutionError, match="no"):
        executed(source)
