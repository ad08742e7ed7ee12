"""Element casts of ml_dtypes, both ways -> ml_dtypes.npz."""

from __future__ import annotations

import matrices
import ml_dtypes
import numpy as np

ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}


def numbers(values: np.ndarray, largest: float) -> np.ndarray:
    """Every code's value, the points half-way between neighbours, the floats next to those, and random magnitudes."""
    rng = np.random.default_rng(matrices.SEED + 4)
    finite = np.unique(values[np.isfinite(values)])
    middles = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(s)) for s in (-np.inf, np.inf)]
    random = rng.standard_normal(1000) * 10 ** rng.uniform(-12, 6, 1000)
    edges = [largest * f for f in (1.01, 1.05, 1.2, 100.0)] + [1e-45, 3e38, 0.0]
    parts = [finite, middles, *around, random, edges, np.negative(edges)]
    return np.concatenate(parts).astype(np.float32)


def main() -> None:
    answers: dict[str, np.ndarray] = {}
    for name, (dtype, largest) in ELEMENTS.items():
        codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8)
        values = codes.view(dtype).astype(np.float32)
        x = numbers(values, largest)
        answers[f"{name}/values"] = values
        answers[f"{name}/input"] = x
        answers[f"{name}/codes"] = x.clip(-largest, largest).astype(dtype).view(np.uint8)
    answers["e8m0/values"] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    answers["bf16/input"] = answers["e4m3/input"]
    answers["bf16/codes"] = answers["e4m3/input"].astype(ml_dtypes.bfloat16).view(np.uint16)
    matrices.save("ml_dtypes", ml_dtypes.__version__, answers)


if __name__ == "__main__":
    main()
