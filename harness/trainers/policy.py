"""The module that is trained, made of a prepared decoder: the same for every trainer."""

from __future__ import annotations

from typing import cast

from harness.compose import Composed
from harness.models.adapters import add_adapters, freeze_base
from harness.models.decoder import Decoder
from harness.trainers.products import use_fp8


def policy(model: Decoder, composed: Composed, base_seed: int, fp8_kernels: str) -> Decoder:
    """A quantized base is frozen, every part wraps, trained adapters come last. In place, on the module's device.

    `fp8_kernels`: as in `Launch`. Raises ValueError for kernels that are not here.
    """
    plan = composed.plan
    if plan.train_weights is not None and plan.train_weights.tile is not None:
        model = freeze_base(model, plan)
    model = cast(Decoder, composed.wrap(model))
    device = next(model.parameters()).device
    use_fp8(model, device.type, fp8_kernels)
    if plan.adapters is None or not plan.adapters.is_trained:
        return model
    return add_adapters(model, plan.adapters, composed.fixed, base_seed).to(device)
