"""`lowbit parity`: the emulation against vLLM's kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli.options import add_results, add_write, positive, word_list
from harness.records.paths import figures_folder, tables_folder


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU is visible")
    parser.add_argument("--formats", type=word_list, default=(), metavar="NAME,...",
                        help="these precisions alone; rows of others stay (default: all)")  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="DIR",
                        help="a trained Hugging Face folder (default: the base of --model on task sort)")  # fmt: skip
    parser.add_argument("--model", default="xs128", help="whose base is trained, or read (default: xs128)")
    parser.add_argument("--samples", type=positive, default=512, help="responses to score (default: 512)")
    parser.add_argument("--passports", action="store_true", help="also write every format's passport")
    parser.add_argument(
        "--report", action="store_true", dest="is_report", help="measure nothing; show the table of what is there"
    )
    add_write(parser, "the table and the figure")
    add_results(parser, reads=lambda a: a.is_report, writes=lambda a: a.is_written or not a.is_report, check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for a format that there is not, and where vLLM is not installed."""
    from harness.engines.vllm.settings import installed_build
    from harness.studies.parity.record import chosen

    if not a.is_report:
        chosen(a.formats)
        installed_build()


def run(a: argparse.Namespace) -> int:
    """Measure the formats asked for on this device, then show the table of all devices. 1 where a worker failed."""
    if a.is_report:
        return report(a.results, is_written=a.is_written)
    from harness.studies.parity.measuring import measure

    code = measure(
        a.results, device=a.device, formats=a.formats, checkpoint=a.checkpoint, model=a.model, num_samples=a.samples,
        has_passports=a.passports,
    )  # fmt: skip
    return report(a.results, is_written=a.is_written) or code


def report(results: Path, *, is_written: bool) -> int:
    """The table of every device with a record; written with its figure where asked to. Raises ValueError where there
    is no record."""
    from harness.foundation.whole_file import write_atomic
    from harness.studies.parity import figure, record, table

    records = record.read(results)
    if not records:
        raise ValueError(f"{results}: no parity was measured yet; run lowbit parity")
    text = table.markdown(records)
    if not is_written:
        print(text)
        return 0
    path, drawn = tables_folder(results) / "parity.md", figures_folder(results, "parity") / "parity.png"
    write_atomic(path, text.encode())
    figure.draw(records, drawn)
    print(path, drawn, sep="\n")
    return 0
