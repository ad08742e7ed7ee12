"""`lowbit export`: the saved policy of a run as a model folder of one's own."""

from __future__ import annotations

import argparse
import shutil

from harness.cli.options import add_results, always, named_path, never
from harness.foundation.whole_folder import replacing


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_id", metavar="RUN", help="a run whose policy launch.save kept: its name, id, or its file")
    parser.add_argument("folder", type=named_path, metavar="FOLDER", help="the folder to make")
    parser.add_argument(
        "--quantized", action="store_true", help="write the codes of its format (compressed-tensors), not its weights"
    )
    add_results(parser, reads=always, writes=never)


def run(a: argparse.Namespace) -> int:
    """Copy a saved policy. Raises ValueError where there is none, or the folder is there already."""
    from harness.cli.passport import find_run
    from harness.records.policies import last_policy, saved_codes

    found = find_run(a.run_id, a.results)
    source = (saved_codes if a.quantized else last_policy)(a.results, found.sweep, found.run_id)
    if a.folder.exists():
        raise ValueError(f"{a.folder}: is there already; name a folder that is not")
    with replacing(a.folder) as part:
        shutil.copytree(source, part, dirs_exist_ok=True)
    print(f"{a.folder}: {source.name} of {found.name} ({found.run_id})")
    return 0
