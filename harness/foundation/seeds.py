"""Seeds as a stable hash of what they are for, so that neighbouring runs never share random streams."""

from __future__ import annotations

import hashlib
import json

import torch


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from (run seed, purpose, index, ...): the same on every machine and Python version."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def generator(device: torch.device | str, *parts: int | str) -> torch.Generator:
    """A fresh generator on `device`, seeded by `stable_seed(*parts)`."""
    return torch.Generator(device=device).manual_seed(stable_seed(*parts))
