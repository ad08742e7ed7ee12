"""Paths in a results folder: the one place that knows its layout.

    runs/<sweep>/         <run_id>.json and .parquet of every cell (`harness.records.run_result`), and purpose.yaml of a
                          sweep whose file lies elsewhere than in `sweeps/` (`harness.records.sweep_file`)
    rollouts/<sweep>/     <run_id>.jsonl of runs with launch.dump_rollouts (`harness.trainers.rollout_file`)
    packed/<sweep>.zip    a whole sweep in one file (`harness.records.packed`)
    looks/<sweep>.json    looks at a sweep that ran until its arms were decided (`harness.records.looks`)
    tables/  figures/<name>/  site/  claims.md     what reports write
    searches/  throughput/<sweep>/  parity/  replay/  bench/  passports/  probes/  predictions/     records of studies
    fp8_cache/  layers/   records of the studies of these names, a file a policy
    bases/<name>/         trained base models
    evaluations/          evaluations of model folders, apart from any run (`lowbit eval`)
    policies/<sweep>/<run_id>/    trained policies, where `launch.save` keeps them
    mlflow/               MLflow's database and artifacts
    wandb/                runs of Weights & Biases, and the keys of what was logged
    replaced/<sweep>/     what cells left that `lowbit sweep --again` runs once more, one folder each time
    work/                 what a stopped command goes on from; nothing in it is a result

Functions map a results folder to a path and create nothing. Without the name of a sweep they give the folder of all.
"""

from __future__ import annotations

from pathlib import Path

PURPOSE = "purpose.yaml"

RUNS = "runs"
"""Name of the sweep that the cells of `lowbit run` belong to."""


def runs_folder(results: Path | str, sweep: str = "") -> Path:
    """The records of a sweep."""
    return Path(results) / "runs" / sweep


def record_path(results: Path | str, sweep: str, run_id: str) -> Path:
    """The record of one run; its series lies beside it as `.parquet`."""
    return runs_folder(results, sweep) / f"{run_id}.json"


def purpose_path(results: Path | str, sweep: str) -> Path:
    """The purpose of a sweep that `sweeps/` does not tell."""
    return runs_folder(results, sweep) / PURPOSE


def sweep_folders(results: Path | str) -> list[Path]:
    """The folder of every sweep, by name; none where there is no `runs`."""
    return sorted(path for path in runs_folder(results).glob("*") if path.is_dir())


def base_folders(results: Path | str) -> list[Path]:
    """The folder of every base, by name; none where there is no `bases`. One that is still made begins with a dot."""
    return sorted(path for path in bases_folder(results).glob("*") if path.is_dir() and path.name[0] != ".")


def rollouts_path(results: Path | str, sweep: str, run_id: str) -> Path:
    """Responses of a run that `launch.dump_rollouts` writes out."""
    return Path(results) / "rollouts" / sweep / f"{run_id}.jsonl"


def replaced_folder(results: Path | str, sweep: str, when: str) -> Path:
    """Records, states, policies and responses put aside at a time, written as in `20260131T120000Z`."""
    return Path(results) / "replaced" / sweep / when


def packed_folder(results: Path | str) -> Path:
    """The packed sweeps."""
    return Path(results) / "packed"


def packed_path(results: Path | str, sweep: str) -> Path:
    """A packed sweep."""
    return packed_folder(results) / f"{sweep}.zip"


def packed_paths(results: Path | str, sweep: str = "*") -> list[Path]:
    """Every packed sweep, or the one of this name, by name; none where there is no `packed`."""
    return sorted(packed_folder(results).glob(f"{sweep}.zip"))


def looks_path(results: Path | str, sweep: str) -> Path:
    """The looks at a sweep that ran until its arms were decided."""
    return Path(results) / "looks" / f"{sweep}.json"


def tables_folder(results: Path | str) -> Path:
    """All tables, named after their sweep or study."""
    return Path(results) / "tables"


def figures_folder(results: Path | str, name: str = "") -> Path:
    """The figures of a sweep or study."""
    return Path(results) / "figures" / name


def bases_folder(results: Path | str) -> Path:
    """The trained base models, one folder each."""
    return Path(results) / "bases"


def policy_folder(results: Path | str, sweep: str, run_id: str) -> Path:
    """The saved policies of one run."""
    return Path(results) / "policies" / sweep / run_id


def evaluations_path(results: Path | str, folder: str, identity: str) -> Path:
    """The evaluation of a model folder by name, apart from any run."""
    return Path(results) / "evaluations" / f"{folder}-{identity}.json"


def site_folder(results: Path | str) -> Path:
    """The static site."""
    return Path(results) / "site"


def mlflow_folder(results: Path | str) -> Path:
    """MLflow's database and artifacts."""
    return Path(results) / "mlflow"


def wandb_folder(results: Path | str) -> Path:
    """Runs of Weights & Biases, and the keys of what was logged."""
    return Path(results) / "wandb"


def searches_folder(results: Path | str) -> Path:
    """The trials of searches."""
    return Path(results) / "searches"


def journal_path(results: Path | str, name: str) -> Path:
    """The study of a search."""
    return searches_folder(results) / f"{name}.journal"


def throughput_folder(results: Path | str, sweep: str = "") -> Path:
    """The records of a throughput sweep, a file per engine."""
    return Path(results) / "throughput" / sweep


def parity_folder(results: Path | str) -> Path:
    """The records of parity, a file per device."""
    return Path(results) / "parity"


def replay_folder(results: Path | str) -> Path:
    """The records of replayed corrections, a file per stored batch of rollouts."""
    return Path(results) / "replay"


def bench_folder(results: Path | str) -> Path:
    """Folder of benchmarks' measurements, a file each."""
    return Path(results) / "bench"


def probes_folder(results: Path | str) -> Path:
    """The records of probes, a file each."""
    return Path(results) / "probes"


def layers_folder(results: Path | str) -> Path:
    """The records of layers."""
    return Path(results) / "layers"


def fp8_cache_folder(results: Path | str) -> Path:
    """The records of FP8 caches, a file a policy."""
    return Path(results) / "fp8_cache"


def predictions_path(results: Path | str, sweep: str) -> Path:
    """Predictions of the dose study for a sweep, made before its runs."""
    return Path(results) / "predictions" / f"{sweep}.json"


def passports_folder(results: Path | str) -> Path:
    """Passports kept on request."""
    return Path(results) / "passports"


def claims_page(results: Path | str) -> Path:
    """The page of published claims."""
    return Path(results) / "claims.md"


def work_folder(results: Path | str, name: str = "") -> Path:
    """Folder of the state that a stopped command goes on from: by run id for cells, by command for others."""
    return Path(results) / "work" / name
