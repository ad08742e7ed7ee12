"""Response weights of VESPO and the off-policy sequence mask of TRL's GRPOTrainer -> trl_methods.npz.

Runs in the environment of make_trl.py.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from log_probs import batches, save
from trl import GRPOTrainer

CAP = 2.0
THRESHOLDS = (0.0, 0.05, 0.5)


def answers(b: dict[str, Any]) -> dict[str, Any]:
    """phi with and without token weights capped at `CAP`, masks against both anchors."""
    x = {name: torch.tensor(value) for name, value in b.items() if name != "group"}
    adv = x["adv"][:, :1]
    capped = torch.where(x["mask"].bool(), (x["old"] - x["rollout"]).exp().clamp(max=CAP), 1.0)
    found: dict[str, Any] = {}
    for name, weights in (("capped", capped), ("plain", None)):
        phi = GRPOTrainer.get_gamma_weights(adv, x["logp"] - x["old"], x["mask"], weights)
        found[f"vespo/{name}"] = {"phi": phi.numpy()}
    for anchor in ("rollout", "old"):
        for delta in THRESHOLDS:
            keep = GRPOTrainer.get_off_policy_mask(adv, x["logp"], x[anchor], x["mask"].double(), delta)
            found[f"opsm/{anchor}/{delta}"] = {"keep": keep.numpy()}
    return found


def main() -> None:
    """Every batch through both functions."""
    found: dict[str, dict[str, Any]] = {}
    for name, b in batches().items():
        found |= {f"{name}/{case}": fields for case, fields in answers(b).items()}
    save("trl_methods", version("trl"), found)


if __name__ == "__main__":
    main()
