"""`lowbit metrics`: what is logged at every step."""

from __future__ import annotations

import argparse

from harness.foundation.text_table import text_table


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--translate", action="store_true", help="our names beside those of other frameworks")


def run(a: argparse.Namespace) -> int:
    """Print the metrics, or their names in other frameworks."""
    from harness.records.metric_names import METRICS, translate

    if a.translate:
        rows = translate()
        header = list(rows[0])
        print(text_table(header, [[row[name] or "-" for name in header] for row in rows]))
        return 0
    header = ("metric", "unit", "better", "definition")
    print(text_table(header, [(m.name, m.unit, m.direction, m.definition) for m in METRICS.values()]))
    return 0
