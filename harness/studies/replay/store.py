"""Stored rollout batches: one safetensors file with a JSON description per sampler. Nothing is pickled.

    <folder>/<model>-<task><n>/policy.safetensors, reference.safetensors, control.safetensors, int8.safetensors, ...

A file counts once its JSON is there, which is written last; both are written beside and renamed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from harness.api import Sequences, Step, TokenBatch
from harness.foundation.json_object import read_json_object
from harness.foundation.whole_file import write_atomic

REFERENCE, CONTROL, POLICY = "reference", "control", "policy"
"""Names of files that are no format: exact sampler, exact sampler with other random numbers, weights."""
WIDE = ("token_ids", "sampled", "mask", "rollout_logp", "old_logp", "ref_logp", "rollout_kl", "entropy")
"""[N, T] tensors; log-probs, KL and entropy in nats."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Batches of one sampler, rows in order, all batches of one size."""

    tensors: dict[str, Tensor]
    """`WIDE`, and ids [N, L], prompt_lens, adv, reward, truncated [N]."""
    meta: dict[str, Any]
    """sampler, num_batches, step, identity and what was measured."""

    @property
    def num_batches(self) -> int:
        return int(self.meta["num_batches"])

    def rows(self, batch: int) -> slice:
        """Rows of batch 0 <= `batch` < num_batches."""
        size = len(self.tensors["ids"]) // self.num_batches
        return slice(batch * size, (batch + 1) * size)

    def sequences(self, batch: int) -> Sequences:
        """Sequences of a batch, as the trainer reads them."""
        t, rows = self.tensors, self.rows(batch)
        lens = t["prompt_lens"][rows]
        is_even = bool((lens == lens[0]).all())
        return Sequences(
            ids=t["ids"][rows].long(),
            prompt_lens=int(lens[0]) if is_even else lens.long(),
            token_ids=t["token_ids"][rows].long(),
            sampled=t["sampled"][rows],
        )

    def batch(self, batch: int) -> TokenBatch:
        """Token batch as corrections read it, with every extra that a part may need. The policy computes in float32, so
        its shadow is itself; `pull` of `harness.studies.replay.arms` adds the current one."""
        t, rows = self.tensors, self.rows(batch)
        return TokenBatch(
            token_ids=t["token_ids"][rows].long(), mask=t["mask"][rows],
            adv=t["adv"][rows][:, None].expand(t["mask"][rows].shape), rollout_logp=t["rollout_logp"][rows],
            old_logp=t["old_logp"][rows], step=Step(**self.meta["step"]),
            extras={name: t[name][rows] for name in ("ref_logp", "rollout_kl")}, shadow={"old": t["old_logp"][rows]},
        )  # fmt: skip


def joined(parts: Sequence[dict[str, Tensor]], pad_id: int) -> dict[str, Tensor]:
    """Batches after one another, padded on the right to common widths; integers as int32."""
    found: dict[str, Tensor] = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if pieces[0].ndim == 2:
            width = max(piece.shape[1] for piece in pieces)
            fill = pad_id if name in ("ids", "token_ids") else 0
            pieces = [torch.nn.functional.pad(piece, (0, width - piece.shape[1]), value=fill) for piece in pieces]
        whole = torch.cat(pieces).contiguous().cpu()
        found[name] = whole.int() if whole.dtype == torch.int64 else whole
    return found


def write(folder: Path, name: str, stored: Stored) -> None:
    """Both files, the JSON last."""
    write_atomic(folder / f"{name}.safetensors", save(stored.tensors))
    write_atomic(folder / f"{name}.json", (json.dumps(stored.meta, indent=1) + "\n").encode())


def read_meta(folder: Path, name: str) -> dict[str, Any] | None:
    """The description of `name`, None where it is not stored (or not to the end). ValueError if it is damaged."""
    path = folder / f"{name}.json"
    if not path.is_file() or not path.with_suffix(".safetensors").is_file():
        return None
    return read_json_object(path, "delete it and collect again")


def read(folder: Path, name: str) -> Stored:
    """Stored batches. Raises ValueError where they are missing or damaged."""
    meta = read_meta(folder, name)
    path = folder / f"{name}.safetensors"
    if meta is None:
        raise ValueError(f"{path}: not there; run `lowbit replay collect` first")
    try:
        return Stored(tensors=load(path.read_bytes()), meta=meta)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and collect again") from None


def contexts(folder: Path) -> list[Path]:
    """Folders of one model and length each, shortest first. Raises ValueError where there is none or one is damaged."""
    metas = {path.parent: read_meta(path.parent, REFERENCE) for path in folder.glob(f"*/{REFERENCE}.json")}
    if not metas:
        raise ValueError(f"{folder}: no stored rollouts; run `lowbit replay collect` first")
    return sorted(metas, key=lambda path: ((metas[path] or {}).get("length") or 0, path.name))


def samplers(folder: Path) -> list[str]:
    """Stored formats of a context with the control first; the reference is not among them."""
    names = {path.stem for path in folder.glob("*.json")} - {REFERENCE, CONTROL, POLICY}
    ordered = sorted(names, key=lambda name: (read_meta(folder, name) or {}).get("order", 0))
    return [CONTROL] * (folder / f"{CONTROL}.json").is_file() + ordered
