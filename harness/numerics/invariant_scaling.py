"""Invariant scaling: W x = (W / s)(s x), the factor s absorbed by the gain of the norm that makes x.

QuRL, arXiv 2602.13953, eq. 11 and 12 (known through summaries). Every matrix that reads a scaled norm is divided by s,
routers and gates of experts included; output and down projections have no norm before them and stay; biases stay, since
the product that they are added to does; the offset of a LayerNorm is multiplied like its gain. Names are those of
Hugging Face checkpoints. A tensor of an attention or MLP block that no rule covers is refused, because it might read
the norm. Left out: linear attention, parallel towers, packed weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["all", "qkv"]
"""all: attention and MLP inputs; qkv: attention inputs alone."""
Role = Literal["gain", "reader"]

_LAYER = re.compile(r"(.*?\blayers\.\d+)\.(.+)")
_ATTENTION = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj",
}  # fmt: skip
"""Attention modules that read the norm; the last four are multi-head latent attention."""
_ATTENTION_OTHER = {
    "o_proj", "dense", "q_norm", "k_norm", "q_b_proj", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm", "sinks",
    "q_scale", "k_scale", "v_scale", "rotary_emb",
}  # fmt: skip
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "gate", "router", "shared_expert_gate"}
"""MLP modules that read the norm; `gate`, `router` and `shared_expert_gate` choose and mix experts."""
_MLP_OTHER = {"down_proj", "w2", "fc2", "gate_up_proj_bias", "down_proj_bias"}
_BLOCKS = {
    "self_attn": (_ATTENTION, _ATTENTION_OTHER),
    "mlp": (_MLP, _MLP_OTHER),
    "block_sparse_moe": (_MLP, _MLP_OTHER),
}
_INNER = {"experts", "shared_expert", "shared_experts", "base_layer"}
"""Containers between a block and its matrices."""
_SCALED = {"weight", "weight_scale", "lora_B"}
_UNSCALED = {"bias", "weight_zero_point", "lora_A", "e_score_correction_bias"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def roles(names: Iterable[str], scope: Scope = "all") -> dict[str, Role]:
    """Role of every tensor that the transform changes: "gain" is multiplied by s, "reader" divided; others are not
    listed.

    `names`: all tensor names of a checkpoint, adapters and frozen scales too. The norm before the MLP is
    `pre_feedforward_layernorm` where a layer has one (Gemma 2 and 3), else `post_attention_layernorm`, else the norm
    before attention (parallel blocks). Raises ValueError for layers without a norm before their blocks and for
    tensors that no rule covers.
    """
    layers: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(match[1], []).append((name, match[2]))
    found: dict[str, Role] = {}
    for layer, members in layers.items():
        attention, mlp = _norms(layer, {rest.split(".")[0] for _, rest in members})
        scaled = {attention, mlp} if scope == "all" else {attention}
        for name, rest in members:
            head, *tail = [part for part in rest.split(".") if part not in _INNER and not part.isdigit()]
            if head.endswith("norm"):
                if head in scaled:
                    found[name] = "gain"
            elif _reads(name, head, tail) and (attention if head == "self_attn" else mlp) in scaled:
                found[name] = "reader"
    return found


def _norms(layer: str, heads: set[str]) -> tuple[str, str]:
    """The norms before attention and before the MLP."""
    has_before = "pre_feedforward_layernorm" in heads
    if "input_layernorm" not in heads or ("post_feedforward_layernorm" in heads and not has_before):
        raise ValueError(f"{layer}: invariant scaling needs a norm before each block (input_layernorm, ...)")
    if has_before:
        return "input_layernorm", "pre_feedforward_layernorm"
    is_parallel = "post_attention_layernorm" not in heads
    return "input_layernorm", "input_layernorm" if is_parallel else "post_attention_layernorm"


def _reads(name: str, block: str, path: list[str]) -> bool:
    """True where the tensor multiplies the output of its block's norm."""
    readers, others = _BLOCKS.get(block, (set[str](), set[str]()))
    module, leaf = (path[0] if path else ""), (path[1] if len(path) > 1 else "weight")
    if module in others:
        return False
    if module not in readers or leaf not in _SCALED | _UNSCALED:
        raise ValueError(f"{name}: may read a scaled norm, and invariant scaling has no rule for it")
    return leaf in _SCALED


def role_of(name: str, scope: Scope = "all") -> Role | None:
    """The role of one tensor in a decoder with the two norms of Llama and Qwen; None where nothing is done with it."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    norms = [f"{match[1]}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
    return roles([name, *norms], scope).get(name)


def scaled(tensors: Mapping[str, Tensor], s: float, scope: Scope = "all") -> dict[str, Tensor]:
    """Tensors of the same function, with gains * s and their readers / s; unchanged ones are passed on as they are.

    tensors: {checkpoint name: float tensor of any shape}; changed ones come back as float32 (float64 stays), because
    rounding W / s to BF16 is a perturbation of its own. Raises ValueError for s <= 0, for quantized tensors among the
    changed ones, and as `roles`.
    """
    if not 0 < s < float("inf"):
        raise ValueError(f"s: {s} is not a positive factor")
    out = dict(tensors)
    for name, role in roles(tensors, scope).items():
        if tensors[name].dtype not in _FLOATS:
            raise ValueError(f"{name}: is {tensors[name].dtype}; invariant scaling comes before quantization")
        x = tensors[name].to(torch.promote_types(tensors[name].dtype, torch.float32))
        out[name] = x * s if role == "gain" else x / s
    return out


def is_power_of_two(s: float) -> bool:
    """True where multiplying by s only moves the exponent."""
    return math.frexp(s)[0] == 0.5
