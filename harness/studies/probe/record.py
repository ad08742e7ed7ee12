"""The probe of a model folder: which formats, the measurements, and the file they are kept in."""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.config.load import load, of_folder, run_id, to_json
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.foundation import provenance
from harness.foundation.did_you_mean import nearest
from harness.foundation.json_object import read_json_object
from harness.models.checkpoint import check_folder, content_hash
from harness.records.json_rows import write_json_rows
from harness.records.paths import probes_folder
from harness.run.checks import check, check_device
from harness.start.prepare import check_data
from harness.studies.probe.measure import measure
from harness.studies.probe.noise import noise_config, noise_like, noise_meter
from harness.studies.replay.sampling import CARRIERS, config_at
from methods import METHODS

FLOOR = "bf16"
"""The format whose mismatch is the noise floor."""
METHODS_OF_FORMATS = (*CARRIERS, "fp16")
"""Methods that sample in the formats; `fp16` has its trainer compute in FP16, too."""
GIVEN = ("method", "precision", "parts", "model", "model.path", "trainer.name", "trainer", "seed")
"""Overrides that the probe sets itself."""
Record = dict[str, Any]


def configs(folder: Path, precisions: Sequence[str], overrides: Sequence[str]) -> tuple[list[RunConfig], list[str]]:
    """(a run of every format, the floor first and twice, remarks on formats that the engine cannot follow).

    Without `precisions` it is every format that low-bit rollouts have here; `int4=int4_g32` is int4 with other weights.
    Raises ValueError for a bad folder or override, for missing data, for a task of another model, and for a format that
    is named twice, is unknown or that the engine cannot follow.
    """
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in GIVEN or key.startswith("precision."):
            raise ValueError(f"override {override!r}: the probe has no method, --precisions names the formats, "
                             "the model is the folder")  # fmt: skip
    check_folder(folder)
    words = [*of_folder(folder), *overrides]
    check_device(resolve(load([*words, "method=bf16", "precision=bf16"]), lambda path: content_hash(Path(path))))
    found: list[RunConfig] = [config_at(FLOOR, words), config_at(FLOOR, [*words, "seed=1"])]
    check_data(found[0])
    remarks: list[str] = []
    for word in dict.fromkeys(precisions or METHODS["naive"].precisions):
        name, _, weights = word.partition("=")
        if name == FLOOR and weights:
            raise ValueError(f"--precisions {word}: {FLOOR} is the floor, and stays what it is")
        own = [*words, *([f"precision.weights={weights}"] if weights else [])]
        config = config_at(name, own, METHODS_OF_FORMATS)
        if config.precision.name in {one.precision.name for one in found[2:]}:
            raise ValueError(f"--precisions: {name} is named twice")
        try:
            check(config)
        except ValueError as error:
            if precisions:
                raise
            remarks.append(f"{name}: left out, {error}")
            continue
        found += [] if name == FLOOR else [config]
    return found, remarks


def noised(folder: Path, runs: Sequence[RunConfig], names: Sequence[str], overrides: Sequence[str]) -> RunConfig | None:
    """The run with weight noise that `probe` gives the k3 of `names`, formats or numbers; None without names. Raises
    ValueError for a format that is not probed, and where the engine cannot follow."""
    probed = [config.precision.name for config in runs[2:]]
    for name in names:
        if name not in probed and _k3_of(name) is None:
            raise ValueError(f"--noise-like={name}: neither a format of this probe nor a k3; {nearest(name, probed)}")
    if not names:
        return None
    config = noise_config(0.05, [*of_folder(folder), *overrides])
    check(config)
    return config


def _k3_of(word: str) -> float | None:
    """The k3 (nats a token) that a word of --noise-like is; None for another word."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def probe(
    folder: Path, runs: Sequence[RunConfig], launch: Launch, *, is_untrained: bool = False, dump: Path | None = None,
    tell: Callable[[str], None] = lambda line: None, noise: RunConfig | None = None, like: Sequence[str] = (),
) -> Record:  # fmt: skip
    """Measure every format and return the record; `dump` gets the log-probs of each as a safetensors file. `noise`, of
    `noised`, is set to the k3 of every format in `like`."""
    rows: list[Record] = []
    hashes: dict[str, str | None] = {}
    for config in runs:
        name = config.precision.name + (" again" if config.seed else "")
        empty_memory(config.trainer.device)
        found = measure(config, launch)
        rows.append({"name": name, **found.row})
        hashes = found.hashes
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            save_file(found.tensors, dump / f"{name.replace(' ', '-')}.safetensors")
        tell(f"{folder.name} {name}: k3 {found.row['mismatch']['kl_k3']:.2g}")
    matched: list[Record] = []
    if noise is not None:
        k3s = {row["precision"]: row["mismatch"]["kl_k3"] for row in rows}
        empty_memory(noise.trainer.device)
        with noise_meter(noise, launch) as at:
            for name in like:
                k3 = k3s[name] if name in k3s else _k3_of(name)
                assert k3 is not None, "`noised` refuses other words"
                try:
                    matched.append(noise_like(name, k3, at))
                except ValueError as error:  # what was measured before is kept
                    tell(f"{folder.name} noise like {name}: none, {error}")
                    continue
                tell(f"{folder.name} noise like {name}: sigma {matched[-1]['sigma']:g}, k3 {matched[-1]['kl_k3']:.2g}")
    head, is_dirty = provenance.commit()
    likes = [row["precision"] for row in matched]
    identity = json.dumps([hashes, [run_id(config) for config in runs], is_untrained, *([likes] if likes else [])])
    return {
        "id": hashlib.sha256(identity.encode()).hexdigest()[:12],
        "folder": folder.resolve().name,
        "is_untrained": is_untrained,
        "hashes": hashes,
        "config": {name: value for name, value in to_json(runs[0]).items() if name not in ("method", "precision")},
        "formats": rows,
        **({"noise": matched} if matched else {}),
        "commit": head,
        "is_dirty": is_dirty,
        "hardware": provenance.hardware(runs[0].trainer.device),
    }


def empty_memory(device: str) -> None:
    """Free what the format before left behind, trainer and engine, and start its peak of GPU memory anew."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write(results: Path, record: Record) -> Path:
    """Write `<results>/probes/<id>.json`; the path."""
    path = probes_folder(results) / f"{record['id']}.json"
    write_json_rows(path, record, "formats")
    return path


def read(path: Path) -> Record:
    """A probe's record. Raises ValueError naming a file that is none."""
    found = read_json_object(path, "valid: a file that lowbit probe wrote")
    if not isinstance(found.get("formats"), list):
        raise ValueError(f"{path}: not a probe: it has no formats")
    return found
