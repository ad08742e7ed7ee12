"""Files that travel with a cell: responses go with the state to resume from, and come home with the record."""

from __future__ import annotations

from pathlib import Path

from harness.config.load import run_id
from harness.records.paths import rollouts_path
from harness.run.cell import work_folder
from harness.sweep.launchers.ray_cell import CellFiles
from harness.sweep.launchers.ray_files import files_for, keep
from tests.sweep.launchers.stand_in import jobs_of


def test_responses_go_out_where_there_is_a_state_to_go_on_from(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, dump_rollouts=2)
    name = run_id(job.config)
    rollouts, state = rollouts_path(tmp_path, "test", name), work_folder(job.launch, name) / "state.pt"
    rollouts.parent.mkdir(parents=True)
    rollouts.write_bytes(b"lines")
    assert files_for(job, None) == {}  # a run from its start writes them anew
    state.parent.mkdir(parents=True)
    state.write_bytes(b"state")
    assert files_for(job, None) == {
        f"work/{name}/state.pt": b"state", f"rollouts/test/{name}.jsonl": b"lines",
    }  # fmt: skip
    rollouts.unlink()
    assert list(files_for(job, None)) == [f"work/{name}/state.pt"]


def test_responses_come_home_also_from_a_cell_that_was_stopped(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path)
    name = run_id(job.config)
    files = {f"rollouts/test/{name}.jsonl": b"more", f"work/{name}/state.pt": b"state", "elsewhere/x": b"no"}
    result = keep(job, CellFiles(result=None, files=files))
    assert result.status == "cancelled"
    assert rollouts_path(tmp_path, "test", name).read_bytes() == b"more"
    assert (work_folder(job.launch, name) / "state.pt").read_bytes() == b"state"
    assert not (tmp_path / "elsewhere").exists()
