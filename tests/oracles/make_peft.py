"""LoftQ of peft on bitsandbytes' NF4, for random weights -> peft.npz. peft computes on "cuda": here that is the CPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import matrices
import numpy as np
import torch
from peft.utils.loftq_utils import loftq_init
from torch.overrides import TorchFunctionMode

CASES = {"square": (96, 128, 8), "tall": (160, 64, 16)}
"""name -> rows, columns (a multiple of the NF4 block), rank."""


class OnTheCPU(TorchFunctionMode):
    """Moves to "cuda" stay where they are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def local(value: Any) -> Any:
            is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
            return torch.device("cpu") if is_cuda else value

        return func(*map(local, args), **{key: local(value) for key, value in (kwargs or {}).items()})


def main() -> None:
    rng = np.random.default_rng(matrices.SEED + 5)
    answers: dict[str, np.ndarray] = {}
    for name, (rows, columns, rank) in CASES.items():
        w = (0.02 * rng.standard_t(5, (rows, columns))).astype(np.float32)
        answers[f"{name}/w"] = w
        for steps in (1, 3):
            with OnTheCPU():
                w_hat, a, b = loftq_init(torch.from_numpy(w), num_bits=4, reduced_rank=rank, num_iter=steps)
            for key, value in {"w_hat": w_hat, "a": a, "b": b}.items():
                answers[f"{name}/{steps}/{key}"] = value.numpy()
    matrices.save("peft", version("peft"), answers)


if __name__ == "__main__":
    main()
