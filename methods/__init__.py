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
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from harness.foundation.did_you_mean import nearest

if TYPE_CHECKING:
    from harness.api import Method

GROUP = "lowbit.methods"
OWN = {
    "bf16": "bf16.METHOD",
    "bf16_train": "bf16_train.METHOD",
    "naive": "naive.METHOD",
    "zero_mismatch": "zero_mismatch.METHOD",
    "bf16_tis": "bf16_tis.METHOD",
    "qlora": "qlora.METHOD",
    "bf16_lora": "qlora.BF16_LORA",
    "fp16": "fp16.METHOD",
    "fp32_head": "fp32_head.METHOD",
    "flashrl": "flashrl.METHOD",
    "qurl": "qurl.METHOD",
    "qurl_acr": "qurl.QURL_ACR",
    "qurl_lr": "qurl.QURL_LR",
    "qerl": "qerl.METHOD",
    "qerl_no_aqn": "qerl.QERL_NO_AQN",
    "aqn_bf16": "qerl.AQN_BF16",
    "jet_rl": "jet_rl.METHOD",
    "fp8_rl": "fp8_rl.METHOD",
    "fp8_rl_mis": "fp8_rl.MASKED",
    "fp8_rl_e2e": "fp8_rl.END_TO_END",
    "qat_kd": "qat_kd.METHOD",
    "qat_kd_sft": "qat_kd.SFT",
    "qat_no_kd": "gptq_start.METHOD",
    "qat_rtn": "gptq_start.QAT_RTN",
    "rilq": "rilq.METHOD",
    "rilq_refresh": "rilq_refresh.METHOD",
    "rilq_init": "rilq_init.METHOD",
    "mis": "mis.METHOD",
    "geo_rs": "mis.GEO_RS",
    "geo_rs_tis": "mis.GEO_RS_TIS",
    "k3_rs": "mis.K3_RS",
    "k3_rs_tis": "mis.K3_RS_TIS",
    "icepop": "icepop.METHOD",
    "dppo_tv": "dppo.TV",
    "dppo_kl": "dppo.KL",
    "dppo_prime_rl": "dppo.PRIME_RL",
    "trm": "trm.METHOD",
    "trm_sampled": "trm.SAMPLED",
    "opsm": "opsm.METHOD",
    "opsm_slime": "opsm.SLIME",
    "m2po": "m2po.METHOD",
    "m2po_areal": "m2po.AREAL",
    "vespo": "vespo.METHOD",
    "acrl": "acrl.METHOD",
    "ais_r": "ais_r.METHOD",
    "tbpo": "tbpo.METHOD",
    "qarl": "qarl.METHOD",
    "qat_aligned": "qat_aligned.METHOD",
    "quads": "qat_aligned.QUADS",
    "calibrated_clipping": "calibrated_clipping.METHOD",
    **dict.fromkeys(
        (
            "verl_decoupled_token_is",
            "verl_decoupled_seq_is",
            "verl_decoupled_token_icepop",
            "verl_decoupled_seq_is_rs",
            "verl_decoupled_geo_rs",
            "verl_decoupled_geo_rs_seq_tis",
            "verl_decoupled_geo_rs_token_tis",
            "verl_decoupled_k3_rs",
            "verl_decoupled_k3_rs_seq_tis",
            "verl_decoupled_k3_rs_token_tis",
            "verl_bypass_ppo_clip",
            "verl_bypass_ppo_clip_geo_rs",
            "verl_bypass_ppo_clip_k3_rs",
            "verl_bypass_pg_is",
            "verl_bypass_pg_token_icepop",
            "verl_bypass_pg_geo_rs",
            "verl_bypass_pg_geo_rs_seq_tis",
            "verl_bypass_pg_geo_rs_token_tis",
        ),
        "verl_presets.METHODS",
    ),
}
"""Name -> module and attribute of the method; the attribute may be a dict by name. Nothing is imported before methods
are asked for, so that a wrong name is refused at once."""


def own() -> list[Method]:
    """The methods of this package, in the order in which they are listed."""
    found: list[Method] = []
    for name, where in OWN.items():
        module, _, attribute = where.partition(".")
        value: Method | dict[str, Method] = getattr(import_module(f"methods.{module}"), attribute)
        found.append(value[name] if isinstance(value, dict) else value)
    return found


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
    from harness.api import Method

    if not isinstance(method, Method):
        raise ValueError(f"entry point {entry.name} = {entry.value} of {GROUP} is not a Method")
    return method


METHODS: dict[str, Method]
"""Every method by name. Entry points are loaded when it is first read, for their modules import this package."""


@cache
def _registry() -> dict[str, Method]:
    return joined(own(), entry_points(group=GROUP))


def __getattr__(name: str) -> dict[str, Method]:
    if name != "METHODS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _registry()


def check_name(name: str) -> None:
    """Raises ValueError with the nearest names for an unknown method. Imports methods only where other packages offer
    some, since their names are not known before."""
    if name not in OWN and name not in (known := _registry() if entry_points(group=GROUP) else OWN):
        raise ValueError(f"method={name}: unknown; {nearest(name, known)}")


def method_named(name: str) -> Method:
    """The method called `name`. Raises ValueError with the nearest names and all of them."""
    check_name(name)
    return _registry()[name]
