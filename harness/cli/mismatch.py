"""`lowbit mismatch`: k3 of our stand-ins by format, length, size and entropy, beside published values."""

from __future__ import annotations

import argparse

from harness.cli.options import add_results, add_write, always, if_written, tell_written


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_write(parser, "the tables and the figure")
    add_results(parser, reads=always, writes=if_written)


def run(a: argparse.Namespace) -> int:
    """Read committed records, print the table. Raises ValueError where there is none."""
    from harness.published.mismatch.ours import measured, rows_of
    from harness.published.mismatch.page import headline, sentences, text, write
    from harness.published.mismatch.values import read_values
    from harness.records.paths import figures_folder, tables_folder

    found, values = measured(a.results), read_values()
    rows = rows_of(found)
    print(text(rows))
    print(f"\n{headline(rows, values)}.")
    print("\n".join(f"- {line}" for line in sentences(rows, values)))
    if a.is_written:
        tell_written(write(found, values, tables_folder(a.results), figures_folder(a.results)))
    return 0
