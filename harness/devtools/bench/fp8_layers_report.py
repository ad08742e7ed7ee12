"""What the FP8 layer benchmark found, in columns: its tables, its best choices and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from harness.devtools.bench.fp8_layers_parts import PLAIN, Row


def table(rows: Sequence[Row]) -> str:
    """Rows as text, in columns; a column that is empty throughout is left out."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row)
               if any(row.get(name) is not None for row in rows)]  # fmt: skip
    cells = [columns, *([_text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def best_launch(quantizers: Sequence[Row]) -> str | None:
    """The launch that is fastest over the uses that most launches were timed at; None where none was."""
    times: dict[str, dict[tuple[str, int], float]] = {}
    for row in quantizers:
        if row["ms"] is not None:
            times.setdefault(row["launch"], {})[row["quantizer"], row["width"]] = row["ms"]
    uses = {use for found in times.values() for use in found}
    most = max((sum(use in found for found in times.values()) for use in uses), default=0)
    shared = {use for use in uses if sum(use in found for found in times.values()) == most}
    whole = {launch: found for launch, found in times.items() if shared <= set(found)}
    return min(whole, key=lambda launch: sum(whole[launch][use] for use in shared), default=None)


def best_wgrad(products: Sequence[Row]) -> dict[str, float]:
    """Who computes WGrad -> ms of the layer's products together, of those who were timed at all; fastest first."""
    sums: dict[str, list[float]] = {}
    for row in products:
        if row["product"] == "WGrad" and row["ms"] is not None:
            sums.setdefault(row["what"], []).append(row["ms"])
    most = max(map(len, sums.values()), default=0)
    return dict(sorted(((who, sum(ms)) for who, ms in sums.items() if len(ms) == most), key=lambda item: item[1]))


def budget(found: Row) -> list[Row]:
    """Where the milliseconds of "bf16" and of the fastest faithful FP8 layer go, by what was timed alone."""
    layers = {row["what"]: row["ms"] for row in found.get("layers", ()) if row.get("ms")}
    held = {name: ms for name, ms in layers.items() if name.startswith("fp8 held") and "square" not in name}
    chosen, rows = [name for name in (PLAIN, *sorted(held, key=held.__getitem__)[:1]) if name in layers], []
    for name in chosen:
        products = _products(found.get("products", ()), is_bf16=name == PLAIN)
        quantizers = 0.0 if name == PLAIN else _quantizers(found.get("quantizers", ()), found.get("launch"))
        if products is None or quantizers is None:
            continue
        rows += [{"what": name, "of which": part, "ms": ms} for part, ms in (
            ("products", products), ("quantizers", quantizers),
            ("attention and the rest", layers[name] / found["deep"] - products - quantizers)) if ms]  # fmt: skip
    return rows


def _products(rows: Sequence[Row], *, is_bf16: bool) -> float | None:
    """One layer's, each by the fastest that is no variant; None where one is missing."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["ms"] is not None and (row["what"] == PLAIN) == is_bf16 and not row["what"].startswith("square"):
            key = row["layer"], row["product"]
            best[key] = min(row["ms"], best.get(key, row["ms"]))
    return sum(best.values()) if len(best) == 12 else None


def _quantizers(rows: Sequence[Row], launch: str | None) -> float | None:
    """One layer's; None where one is missing."""
    found = [row for row in rows if row["launch"] == launch and row["times"]]
    if not found or any(row["ms"] is None for row in found):
        return None
    return sum(row["ms"] * row["times"] for row in found)


def summary(found: Row) -> list[Row]:
    """The short table: what was best, and by how much."""
    rows: list[Row] = []
    if launch := best_launch(found.get("quantizers", ())):
        rows.append({"best": "launch of the quantizers", "is": launch})
    for who, ms in list(best_wgrad(found.get("products", ())).items())[:3]:
        rows.append({"best": "WGrad of all products", "is": who, "ms": ms})
    timed = [row for row in found.get("layers", ()) if row.get("ms")]
    for what, start in (("layer", "bf16"), ("layer", "fp8"), ("graph of a layer", "")):
        chosen = (
            timed if start else [row | {"ms": row["graph_ms"]} for row in found.get("graphs", ()) if row["graph_ms"]]
        )
        for row in sorted((row for row in chosen if row["what"].startswith(start)), key=lambda row: row["ms"])[:4]:
            rows.append({"best": what, "is": row["what"], **{name: row.get(name) for name in
                        ("ms", "x_bf16", "x_compiled", "output_error", "grad_error")}})  # fmt: skip
    failed = [row for part in ("layers", "products", "quantizers", "graphs") for row in found.get(part, ())
              if row.get("failed")]  # fmt: skip
    rows += [
        {"best": "failed", "is": f"{row.get('what') or row.get('quantizer')}: {row['failed']}"} for row in failed[:6]
    ]
    rows += [{"best": "cut by the time", "is": name} for name in found.get("cut", ())]
    return [*rows, *({"best": row["what"], "is": row["of which"], "ms": row["ms"]} for row in budget(found))] or [
        {"best": "nothing was timed"}]  # fmt: skip
