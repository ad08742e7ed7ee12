"""Every method by name: the explicit dict, joined by what other packages offer as entry points `lowbit.methods`.

bf16.py                  control: high-precision rollouts
bf16_tis.py              control: truncated importance sampling without quantization
bf16_train.py            BF16 training, as a part
naive.py                 control: a quantized sampler without correction
zero_mismatch.py         control: the trainer's own graph samples
flashrl.py               FlashRL: truncated importance sampling (TIS), profiled scales
mis.py                   masked importance sampling, rejection by divergence
icepop.py                IcePop: weight 0 where the two policies disagree too much
ais_r.py                 AIS-R: truncated importance sampling, mixed in by an adaptive coefficient
acrl.py                  ACRL: importance weights raised to an adaptive power
m2po.py                  M2PO: tokens masked until the second moment is small
trm.py                   TRM: responses masked by their largest token divergence
opsm.py                  OPSM: off-policy responses with negative advantage masked
calibrated_clipping.py   a clip band that cuts in FP8 as the usual one in high precision
dppo.py                  DPPO: a trust region on divergence in place of the ratio
tbpo.py                  TBPO: the response as one action with a trust band
vespo.py                 VESPO: a soft weight of the response's importance ratio
verl_presets.py          verl's rollout-correction presets
qurl.py                  QuRL: adaptive clip range (ACR), update-aware quantization (UAQ)
qerl.py                  QeRL: LoRA over a shared NVFP4 base, adaptive noise (AQN)
qlora.py                 LoRA over a frozen base, and its two controls
jet_rl.py                Jet-RL: one FP8 flow for rollout and training
fp8_rl.py                FP8-RL: block FP8 and an FP8 KV cache, recalibrated
fp16.py                  FP16 in place of BF16
fp32_head.py             the output head in float32
qat_kd.py                Reasoning-QAT: GPTQ start, distillation, then RL on fake quantization
qat_aligned.py           4-bit QAT on the rollout's own codes; QUADS
qarl.py                  QaRL: the trainer's forward pass is the rollout's, with TBPO's objective
gptq_start.py            fake-quantized training that starts on GPTQ's grid
rilq.py                  RILQ: adapters that compensate a frozen low-bit sampler
rilq_refresh.py          RILQ, fitted again every K steps
rilq_init.py             LoRA over a shared low-bit base, started from compensating adapters
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from harness.api import Method
from harness.foundation.did_you_mean import nearest
from methods import (
    acrl,
    ais_r,
    bf16,
    bf16_tis,
    bf16_train,
    calibrated_clipping,
    dppo,
    flashrl,
    fp8_rl,
    fp16,
    fp32_head,
    gptq_start,
    icepop,
    jet_rl,
    m2po,
    mis,
    naive,
    opsm,
    qarl,
    qat_aligned,
    qat_kd,
    qerl,
    qlora,
    qurl,
    rilq,
    rilq_init,
    rilq_refresh,
    tbpo,
    trm,
    verl_presets,
    vespo,
    zero_mismatch,
)

GROUP = "lowbit.methods"
_OWN = (
    bf16.METHOD,
    bf16_train.METHOD,
    naive.METHOD,
    zero_mismatch.METHOD,
    bf16_tis.METHOD,
    qlora.METHOD,
    qlora.BF16_LORA,
    fp16.METHOD,
    fp32_head.METHOD,
    flashrl.METHOD,
    qurl.METHOD,
    qurl.QURL_ACR,
    qurl.QURL_LR,
    qerl.METHOD,
    qerl.QERL_NO_AQN,
    qerl.AQN_BF16,
    jet_rl.METHOD,
    fp8_rl.METHOD,
    fp8_rl.MASKED,
    fp8_rl.END_TO_END,
    qat_kd.METHOD,
    qat_kd.SFT,
    gptq_start.METHOD,
    gptq_start.QAT_RTN,
    rilq.METHOD,
    rilq_refresh.METHOD,
    rilq_init.METHOD,
    mis.METHOD,
    mis.GEO_RS,
    mis.GEO_RS_TIS,
    mis.K3_RS,
    mis.K3_RS_TIS,
    icepop.METHOD,
    dppo.TV,
    dppo.KL,
    dppo.PRIME_RL,
    trm.METHOD,
    trm.SAMPLED,
    opsm.METHOD,
    opsm.SLIME,
    m2po.METHOD,
    m2po.AREAL,
    vespo.METHOD,
    acrl.METHOD,
    ais_r.METHOD,
    tbpo.METHOD,
    qarl.METHOD,
    qat_aligned.METHOD,
    qat_aligned.QUADS,
    calibrated_clipping.METHOD,
    *verl_presets.METHODS,
)


def joined(own: Iterable[Method], offered: Iterable[EntryPoint]) -> dict[str, Method]:
    """Name -> method. Raises ValueError for two methods of one name and for an entry point that is no method."""
    found: dict[str, Method] = {}
    sources: dict[str, str] = {}
    for source, method in [("methods", m) for m in own] + [(f"entry point {e.value}", _loaded(e)) for e in offered]:
        if method.name in found:
            raise ValueError(f"method {method.name}: offered by {sources[method.name]} and by {source}")
        found[method.name], sources[method.name] = method, source
    return found


def _loaded(entry: EntryPoint) -> Method:
    try:
        method = entry.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"entry point {entry.name} = {entry.value} of {GROUP} does not load: {error}") from error
    if not isinstance(method, Method):
        raise ValueError(f"entry point {entry.name} = {entry.value} of {GROUP} is not a Method")
    return method


METHODS: dict[str, Method]
"""Every method by name. Entry points are loaded when it is first read, for their modules import this package."""


@cache
def _registry() -> dict[str, Method]:
    return joined(_OWN, entry_points(group=GROUP))


def __getattr__(name: str) -> dict[str, Method]:
    if name != "METHODS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _registry()


def method_named(name: str) -> Method:
    """The method called `name`. Raises ValueError with the nearest names and all of them."""
    known = _registry()
    if name not in known:
        raise ValueError(f"method={name}: unknown; {nearest(name, known)}")
    return known[name]
