"""Every method by name: the explicit dict, joined by what other packages offer as entry points `lowbit.methods`."""

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
