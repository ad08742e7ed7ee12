"""The module that is trained, made of a prepared decoder: the same for every trainer.

Masters are float32 under each of them, and a module that computes in fewer bits casts by itself; no autocast, and no
mixed precision of a framework, stands around it.
"""

from __future__ import annotations

from typing import cast

from harness.api import Plan, weight_format
from harness.config.compose import Composed
from harness.models.adapters import add_adapters, freeze_base
from harness.models.decoder import Decoder
from harness.numerics.casting import cast_model
from harness.numerics.formats import Format
from harness.trainers.local.products import use_fp8


def policy(model: Decoder, composed: Composed, base_seed: int, fp8_kernels: str) -> Decoder:
    """Make the module that is trained: a quantized base is frozen, every part wraps, trained adapters come last. In
    place, on the module's device.

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


def computing(model: Decoder, plan: Plan) -> Decoder:
    """Round the products, embeddings and gains of a 16-bit trainer, in place; any other model stays as it is. The head
    stays in float32 where engines keep it so, tied to the embedding or not."""
    compute = sixteen_bits(plan)
    if compute is None:
        return model
    head = weight_format(plan, "lm_head.weight")
    keeps_head = head is not None and head.element == "fp32"
    return cast_model(model, compute, leave=("lm_head",) if keeps_head else ())


def sixteen_bits(plan: Plan) -> Format | None:
    """The format that a 16-bit trainer rounds to; None for any other trainer."""
    compute = plan.train_compute
    return None if compute is None or compute.tile is not None or compute.element == "fp32" else compute


def is_loss_scaled(plan: Plan) -> bool:
    """Does the trainer scale its loss? It does in FP16, whose gradients would underflow."""
    return plan.train_compute is not None and plan.train_compute.name == "fp16"
