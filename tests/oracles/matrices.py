"""The matrices that the number-format oracles answer for: numpy only, so that every oracle environment can run it.

Each script beside this one stores the matrices together with its library's answers, so a change here needs all of
them to be run again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SEED = 20261121
Matrix = NDArray[np.float32]


def bf16(x: NDArray[np.floating]) -> Matrix:
    """Rounded to bfloat16, ties to even, as float32; finite values only."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def matrices(smallest: float = 1e-30, largest: float = 1e30) -> dict[str, Matrix]:
    """float32 [8, 256] by name; rows of "range" lie between `smallest` and `largest` in magnitude."""
    rng = np.random.default_rng(SEED)
    shape = (8, 256)
    gauss = (0.02 * rng.standard_normal(shape)).astype(np.float32)
    outliers = bf16(0.02 * rng.standard_t(3, shape))
    exponents = np.linspace(np.log10(smallest), np.log10(largest), shape[0])[:, None]
    spread = (rng.standard_normal(shape) * 10**exponents).clip(-largest, largest).astype(np.float32)
    zeros = bf16(rng.standard_normal(shape))
    zeros[0] = 0.0
    zeros[1, :128] = 0.0
    zeros[2, 32:64] = -0.0
    zeros[3, 1:] = 0.0
    zeros[4] = np.abs(zeros[4])
    zeros[5] = -np.abs(zeros[5])
    zeros[6, ::2] = 1e-30
    zeros[7] = zeros[7, 0]
    # Quarters below 8: with a power of two as scale, most lie on a decision point of some format.
    ties = (rng.integers(-32, 33, shape) / 4).astype(np.float32)
    ties[:, ::16] = np.array([6.0, 7.0, 3.5, 1.75], dtype=np.float32)[rng.integers(0, 4, (8, 16))]
    ties[6:, 0] = 448.0
    return {"gauss": gauss, "outliers": outliers, "range": spread, "zeros": zeros, "ties": ties}


def ragged() -> dict[str, Matrix]:
    """bfloat16-rounded float32 matrices whose sizes no tile divides."""
    rng = np.random.default_rng(SEED + 1)
    shapes = {"short": (3, 40), "odd": (131, 9), "wide": (5, 200)}
    return {name: bf16(0.02 * rng.standard_normal(shape)) for name, shape in shapes.items()}


def save(name: str, version: str, answers: dict[str, NDArray[np.generic]]) -> None:
    """Write tests/oracles/<name>.npz beside this file: the answers and the library's version, nothing pickled."""
    path = Path(__file__).with_name(f"{name}.npz")
    np.savez_compressed(path, version=np.array(version), **answers)
    print(f"{path.name}: {len(answers)} arrays, {path.stat().st_size / 1000:.0f} kB, version {version}")
