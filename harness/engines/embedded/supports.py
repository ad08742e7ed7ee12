"""Capability names of the embedded engine: the formats and features that it emulates."""

from __future__ import annotations

from harness.numerics.formats import FORMATS, Format, format_named

GROUP_SIZES = (8, 16, 32, 64, 128, 256)


def _is_activation(fmt: Format) -> bool:
    """Does a format make its scales from the input alone, row by row or over the batch?"""
    if fmt.tile is None:
        return True
    return (
        fmt.rule != "kv"
        and fmt.symmetric
        and fmt.tile[0] in (0, 1)
        and fmt.element not in ("nf4", "int4", "int3", "int2")
    )


def _weight_names() -> set[str]:
    names = {name for name, fmt in FORMATS.items() if fmt.rule not in ("kv", "ct_token")}
    for bits in "2348":
        for columns in GROUP_SIZES:
            names |= {f"int{bits}_g{columns}{asym}{qat}" for asym in ("", "_asym") for qat in ("", "_qat")}
    return names


SUPPORTS: frozenset[str] = frozenset(
    {f"rollout_weights:{name}" for name in _weight_names()}
    | {f"rollout_acts:{name}" for name, fmt in FORMATS.items() if _is_activation(fmt)}
    | {f"rollout_kv:{name}" for name, fmt in FORMATS.items() if fmt.rule == "kv"}
    | {"sampler:cached", "sampler:trainer", "samplers", "allowed_ids", "routing", "adapters", "residual"}
)
assert all(format_named(name.partition(":")[2]) for name in SUPPORTS if name.startswith("rollout"))
