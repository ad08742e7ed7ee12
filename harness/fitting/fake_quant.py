"""Linear layers that train through quantization: the forward pass reads the rollout's grid, the gradient ignores it.

    y = base(acts(base(x)) fq(W)^T + b),   d fq / d W = 1, or 0 where the code is clipped  (Bengio et al., 1308.3432)

W, the latent, is a float32 parameter under its checkpoint's name. Its scales are

    dynamic   recomputed at every pass from the latent rounded to bf16, shared by merged layers where the format has
              a tensor-level scale: the function that an engine applies to the tensor it receives. Nothing else travels.
    frozen    given once, buffers `weight_scale` and `weight_zero_point`.
    learned   the same as a parameter with LSQ's gradient (1902.08153), integers only; zero points stay.

With given scales the latent is rounded to the grid from float32: bf16 would carry 1 of 100 of GPTQ's pre-round values
over a bin edge. `shipped` then sends values and scales, from which an engine arrives at the same codes, with the
exceptions that `quantize.receiver_scale` names. Left out: a cache of the rounded weight between passes, and scales that
follow observed ranges.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from itertools import groupby
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.api import Fixed, Plan, WeightStream, fused, weight_format
from harness.numerics import tiles
from harness.numerics.formats import Format
from harness.numerics.linear import round_both_ways, ste
from harness.numerics.quantize import dequantize, fake_quantize, has_tensor_scale, merged_amax, quantize
from harness.numerics.rounding import FLOAT_EDGE, INT_BITS
from harness.numerics.scales import int_range, stored_multiplier

ScaleMode = Literal["dynamic", "frozen", "learned"]
SCALE, ZERO = "weight_scale", "weight_zero_point"
SMALLEST_SCALE = 1e-12
"""Given float32 scales are at least this, so that a learned one cannot turn negative."""


def is_integer(fmt: Format | None) -> bool:
    """True for integer codes with float32 scales, one or several a row: those that LSQ and GPTQ starts are defined
    for."""
    return fmt is not None and fmt.element in INT_BITS and fmt.tile is not None and fmt.tile[0] == 1


def grid_values(
    latent: Tensor,
    fmt: Format,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    tensor_amax: Tensor | None = None,
) -> Tensor:
    """The weight that a rollout engine computes with where the trainer holds `latent` [N, K] float32: float32 [N, K],
    detached.

    scale, zero_point: as in `quantize`; None for dynamic scales. tensor_amax: float32 [], of the merged group.
    """
    latent, scale = _received(latent, fmt, scale), None if scale is None else _floored(scale)
    if tensor_amax is not None:
        return dequantize(quantize(latent, fmt, tensor_amax=tensor_amax))
    return fake_quantize(latent, fmt, scale=scale, zero_point=zero_point)


def _received(latent: Tensor, fmt: Format, scale: Tensor | None) -> Tensor:
    """Block scales of NVFP4 are dynamic even under a given tensor-level scale."""
    return latent.to(torch.bfloat16) if scale is None or fmt.scale_dtype == "e4m3" else latent


def _floored(scale: Tensor) -> Tensor:
    return scale.clamp_min(SMALLEST_SCALE) if scale.dtype == torch.float32 else scale


def in_range(
    latent: Tensor, fmt: Format, scale: Tensor | None, zero_point: Tensor | None, tensor_amax: Tensor | None = None
) -> Tensor:
    """[N, K] bool: True where rounding, not clipping, gives the code. Arguments: `grid_values`. All True for NF4."""
    latent, scale = _received(latent.detach(), fmt, scale), None if scale is None else _floored(scale)
    if fmt.element == "nf4":
        return torch.ones_like(latent, dtype=torch.bool)
    q = quantize(latent, fmt, scale=scale, zero_point=zero_point, tensor_amax=tensor_amax)
    assert q.scale is not None and fmt.tile is not None
    multiplier = stored_multiplier(q.scale, q.global_scale, fmt)
    v = tiles.split(latent.float(), fmt.tile) / tiles.spread(multiplier, fmt.tile, latent.shape)
    if fmt.element in FLOAT_EDGE:
        inside = v.abs() <= FLOAT_EDGE[fmt.element]
    else:
        low, high = int_range(fmt)
        code = v.round()
        if q.zero_point is not None:
            code = code + tiles.spread(q.zero_point.float(), fmt.tile, latent.shape)
        inside = (code >= low) & (code <= high)
    return tiles.join(inside, fmt.tile, latent.shape)


def lsq_scale_gradient(
    grad: Tensor, latent: Tensor, values: Tensor, inside: Tensor, scale: Tensor, fmt: Format
) -> Tensor:
    """LSQ's gradient of the scale, shaped as `scale`: 1 / sqrt(G (2^(b-1) - 1)) times the sum over a group of
    grad (values - w) / s inside the range and grad values / s outside it. All [N, K] float32 but `scale`."""
    assert fmt.tile is not None
    group = fmt.tile[1] or latent.shape[-1]
    terms = tiles.split(grad * (values - torch.where(inside, latent, 0.0)), fmt.tile).sum(-1)
    factor = (group * (2 ** (INT_BITS[fmt.element] - 1) - 1)) ** -0.5
    return terms.view(scale.shape) / scale * factor


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        latent: Tensor,
        scale: Tensor | None,
        zero: Tensor | None,
        amax: Tensor | None,
        fmt: Format,
        clip: bool,
    ) -> Tensor:
        values = grid_values(latent, fmt, scale, zero, amax)
        ctx.fmt, ctx.clip, ctx.amax = fmt, clip, amax
        ctx.save_for_backward(latent, scale, zero, values if ctx.needs_input_grad[1] else None)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (latent, scale, zero, values) = grads, ctx.saved_tensors
        if not ctx.clip and values is None:
            return grad, None, None, None, None, None
        inside = in_range(latent, ctx.fmt, scale, zero, ctx.amax)
        of_scale = None
        if values is not None:
            of_scale = lsq_scale_gradient(grad, latent, values, inside, _floored(scale), ctx.fmt)
        return torch.where(inside, grad, 0.0) if ctx.clip else grad, of_scale, None, None, None, None


class FakeQuantLinear(nn.Linear):
    """An nn.Linear that computes with its weight on the grid of `fmt`. The parameters keep their names.

    `acts` fake-quantizes what enters, straight through; `base` (bf16, fp16) rounds input, output, bias and their
    gradients, as `EmulatedLinear` does forward; None leaves them float32. `ste_clip`: no gradient where clipped.
    Raises ValueError for scales that are missing, and for learned ones of a format that is no integer.
    """

    def __init__(
        self,
        linear: nn.Linear,
        fmt: Format,
        *,
        scale_mode: ScaleMode = "dynamic",
        scale: Tensor | None = None,
        zero_point: Tensor | None = None,
        acts: Format | None = None,
        base: Format | None = None,
        ste_clip: bool = False,
    ) -> None:
        """scale, zero_point: as in `quantize`, NVFP4's being the tensor-level one; not read where dynamic."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.fmt, self.acts, self.base = fmt, acts, base
        self.scale_mode: ScaleMode = scale_mode
        self.ste_clip = ste_clip
        self.merged: tuple[FakeQuantLinear, ...] = ()
        """Layers that share a tensor-level scale with this one, itself included; empty where none is shared. Not their
        weights: FSDP puts other tensors in the place of those."""
        if scale_mode != "dynamic":
            self._keep(scale, zero_point)
        self.train(linear.training)

    def _keep(self, scale: Tensor | None, zero_point: Tensor | None) -> None:
        if scale is None or (zero_point is None and not self.fmt.symmetric):
            raise ValueError(
                f"scale_mode={self.scale_mode}: format {self.fmt.name} needs its scale and zero point given"
            )
        scale = scale.detach().to(self.weight.device, copy=True)
        if self.scale_mode == "frozen":
            self.register_buffer(SCALE, scale)
        elif not is_integer(self.fmt) or self.in_features % (cast(tuple[int, int], self.fmt.tile)[1] or 1):
            raise ValueError(f"scale_mode=learned: {self.fmt.name} is no integer format in whole groups; choose frozen")
        else:
            self.register_parameter(SCALE, nn.Parameter(scale))
        if zero_point is not None:
            self.register_buffer(ZERO, zero_point.detach().to(self.weight.device, copy=True))

    def values(self) -> Tensor:
        """The weight on its grid: float32 [N, K] with the straight-through gradient."""
        scale, zero = (cast(Tensor | None, getattr(self, name, None)) for name in (SCALE, ZERO))
        amax = None
        if scale is None and self.merged:
            weights = [layer.weight.detach().to(torch.bfloat16) for layer in self.merged]
            amax = merged_amax(weights, self.fmt)
        return cast(Tensor, _FakeQuantize.apply(self.weight, scale, zero, amax, self.fmt, self.ste_clip))

    def forward(self, input: Tensor) -> Tensor:
        """float32 [..., K] -> float32 [..., N]."""
        x, bias, base = input, cast(Tensor | None, self.bias), self.base
        if base is not None:
            x, bias = round_both_ways(x, base), None if bias is None else round_both_ways(bias, base)
        y = F.linear(x if self.acts is None else ste(x, self.acts), self.values(), bias)
        return y if base is None else round_both_ways(y, base)

    def extra_repr(self) -> str:
        """Shape and formats, for printing."""
        acts, base = (None if fmt is None else fmt.name for fmt in (self.acts, self.base))
        return f"{super().extra_repr()}, weights={self.fmt.name}, scale={self.scale_mode}, acts={acts}, base={base}"


def fake_quantized(
    model: nn.Module,
    plan: Plan,
    *,
    scale_mode: ScaleMode = "dynamic",
    fixed: Fixed | None = None,
    is_w_and_a: bool = False,
    base: Format | None = None,
    ste_clip: bool = False,
) -> nn.Module:
    """Replace, in place, every linear layer that the plan rolls out in a scaled format. The head stays.

    fixed: "<module>.weight_scale" and "<module>.weight_zero_point" of given scales. is_w_and_a: inputs are quantized
    as at the rollout. Raises ValueError for a layer that is wrapped or quantized already, for dynamic scales where the
    rollout is given some, and as `FakeQuantLinear`.
    """
    fixed = fixed or {}
    acts = plan.rollout_acts if is_w_and_a and plan.rollout_acts is not None and plan.rollout_acts.tile else None
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    for names in fused(name for name, module in modules if isinstance(module, nn.Linear) and name != "lm_head"):
        found = [(name, weight_format(plan, f"{name}.weight")) for name in names]
        for fmt, run in groupby(found, key=lambda pair: pair[1]):
            if fmt is None or fmt.tile is None:
                continue
            layers: list[FakeQuantLinear] = []
            for name, _ in run:
                linear = model.get_submodule(name)
                if type(linear) is not nn.Linear:
                    raise ValueError(f"{name} is a {type(linear).__name__} already; no other part may wrap it")
                if plan.train_weights is not None:  # its codes would be rounded a second time
                    raise ValueError(f"{name} is frozen in {plan.train_weights.name}; leave out the adapters' part")
                given = fixed.get(f"{name}.{SCALE}"), fixed.get(f"{name}.{ZERO}")
                if given[0] is not None and scale_mode == "dynamic":
                    raise ValueError(f"{name}: another part gives the rollout's scales; dynamic ones would not be them")
                layer = FakeQuantLinear(linear, fmt, scale_mode=scale_mode, scale=given[0], zero_point=given[1],
                                        acts=acts, base=base, ste_clip=ste_clip)  # fmt: skip
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, layer)
                layers.append(layer)
            if has_tensor_scale(fmt) and len(layers) > 1:
                for layer in layers:
                    layer.merged = tuple(layers)
    return model


def shipped(weights: WeightStream, plan: Plan) -> WeightStream:
    """A trainer's stream as the engine is to read it: where a scale travels with a weight, the latent becomes its value
    on that grid. Latents with dynamic scales travel as they are. One module's tensors, which come together, are held at
    a time."""
    for _, group in groupby(weights, key=lambda pair: pair[0].rpartition(".")[0]):
        held = dict(group)
        for name, tensor in held.items():
            fmt, scale = weight_format(plan, name), held.get(f"{name}_scale")
            if fmt is not None and fmt.scale_dtype != "e4m3" and scale is not None:
                yield name, grid_values(tensor, fmt, scale, held.get(f"{name}_zero_point"))
            elif name.endswith(f".{SCALE}"):
                yield name, _floored(tensor)
            else:
                yield name, tensor
