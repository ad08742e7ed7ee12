"""`lowbit parity`: the emulation against vLLM's kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli.options import add_results, add_write, check_beside, named_path, positive, tell_written, word_list
from harness.records.paths import figures_folder, tables_folder

MODEL, SAMPLES = "xs128", 512


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where vLLM samples (default: cuda if a GPU is visible)"
    )
    parser.add_argument("--formats", type=word_list, default=(), metavar="NAME,...",
                        help="these precisions alone; rows of others stay (default: all)")  # fmt: skip
    parser.add_argument("--checkpoint", type=named_path, metavar="DIR",
                        help="a trained Hugging Face folder (default: the base of --model on task sort)")  # fmt: skip
    parser.add_argument("--model", default=MODEL, help=f"whose base is trained, or read (default: {MODEL})")
    parser.add_argument("--samples", type=positive, default=SAMPLES, help=f"responses to score (default: {SAMPLES})")
    parser.add_argument("--passports", action="store_true", help="also write every format's passport")
    parser.add_argument(
        "--report", action="store_true", dest="is_report", help="measure nothing; show the table of what is there"
    )
    add_write(parser, "the table and the figure")
    add_results(parser, reads=lambda a: a.is_report, writes=lambda a: a.is_written or not a.is_report, check=_check)


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for a format that there is not, and where vLLM is not installed; for an option of measuring
    beside --report."""
    from harness.engines.vllm.settings import installed_build
    from harness.studies.parity.record import chosen

    if a.is_report:
        unset = {"device": None, "formats": (), "checkpoint": None, "model": MODEL, "samples": SAMPLES}
        return check_beside(a, "--report, which measures nothing", **unset, passports=False)
    chosen(a.formats)
    installed_build()


def run(a: argparse.Namespace) -> int:
    """Measure the formats asked for on this device, then show the table of all devices. 1 where a worker failed."""
    _check(a)
    if a.is_report:
        return report(a.results, is_written=a.is_written)
    from harness.studies.parity.measuring import measure

    code = measure(
        a.results, device=a.device, formats=a.formats, checkpoint=a.checkpoint, model=a.model, num_samples=a.samples,
        has_passports=a.passports,
    )  # fmt: skip
    return report(a.results, is_written=a.is_written) or code


def report(results: Path, *, is_written: bool) -> int:
    """The table of every device with a record, printed; written with its figure where asked to. Raises ValueError where
    there is no record."""
    from harness.foundation.whole_file import write_atomic
    from harness.studies.parity import figure, record, table

    records = record.read(results)
    if not records:
        raise ValueError(f"{results}: no parity was measured yet; run lowbit parity")
    text = table.markdown(records)
    print(text)
    if not is_written:
        return 0
    path, drawn = tables_folder(results) / "parity.md", figures_folder(results, "parity") / "parity.png"
    write_atomic(path, text.encode())
    figure.draw(records, drawn)
    tell_written([path, drawn])
    return 0
