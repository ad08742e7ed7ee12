"""Tables of plain text."""

import pytest

from harness.foundation.text_table import text_table

ROWS = [("naive int4 [x]", "-0.19"), ("bf16", "a long reason that does not fit")]


def test_columns_are_aligned_under_a_rule_and_markup_is_text() -> None:
    lines = text_table(("arm", "to control"), ROWS, width=80).splitlines()
    assert lines[0] == "arm             to control"
    assert set(lines[1]) == {"─"} and lines[2:] == [
        "naive int4 [x]  -0.19",
        "bf16            a long reason that does not fit",
    ]


@pytest.mark.parametrize("width", [24, 30, 40])
def test_a_table_fits_its_width_and_loses_no_word(width: int) -> None:
    text = text_table(("arm", "to control"), ROWS, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert sorted("".join(text.split())) == sorted(
        "".join(text_table(("arm", "to control"), ROWS, width=80).split()).replace("─", "")
        + "─" * text.count("─")
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 10])
def test_a_terminal_that_is_too_narrow_loses_no_column(width: int) -> None:
    """The first column is whole and every other is as wide as its longest word, whatever the terminal."""
    text = text_table(("arm", "to control"), ROWS, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) == len("naive int4 [x]") + 2 + len("control")
    assert [line.split() for line in lines[:2]] == [["to"], ["arm", "control"]] and "bf16            a long" in text
    words = {word for row in [("arm", "to control"), *ROWS] for cell in row for word in cell.split()}
    assert words <= set(text.split())


def test_a_pipe_gets_whole_lines() -> None:
    assert len(text_table(("a", "b"), [("x" * 500, "y" * 500)]).splitlines()) == 3


def test_a_name_in_the_first_column_stays_whole() -> None:
    lines = text_table(("metric", "meaning"), [("mismatch/kl_k3", "many words " * 9)], width=40).splitlines()
    assert lines[2].startswith("mismatch/kl_k3 ") and len(lines) > 3
