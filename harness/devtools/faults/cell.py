"""A cell with faults: `python -m harness.devtools.faults.cell CELL.json` runs `harness.run.cell` on stages with faults.

Everything heavy is imported late, so that a cell can be killed before.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.devtools.faults.injector import Injector


def main(path: str) -> int:
    """Run the cell that a JSON file describes, with its faults."""
    injector = Injector(Path(path))
    injector.note("begin")
    injector.at("import")
    from harness.devtools.faults import in_cell
    from harness.run import cell

    in_cell.damage_state(injector)
    return cell.main(path, in_cell.stages(injector))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
