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
weight_noise.py          control: random noise in the sampler's weights
mixed_rollouts.py        control: two samplers share every prompt's responses
dc_grpo.py               DC-GRPO: the probability gap as a cost with an adaptive multiplier
keep_sampling_mask.py    top-p sampling, and the trainer over the same tokens
router_replay.py         R3 and R2: experts of a mixture replayed in training
areal_prox.py            AReaL: a proximal policy interpolated by the version of each token
max_age.py               prime-rl: prompts that are too old leave the loss
rspo.py                  RSPO: ratios shrunk by the shift of a mixture's router
r2vpo.py                 R2VPO: a penalty on the variance of the policy ratio in place of the clip
jackpot.py               Jackpot: budgeted rejection of tokens, and the weight that it leaves
alp.py                   ALP: noise in the hidden states during updates
mipu.py                  MIPU, step 1: the truncated weight of a response outside the clip
vcpo.py                  VCPO: a learning rate that follows the effective sample size
lr_decay.py              a learning rate that halves once responses have surged
sapo.py                  SAPO: a smooth gate in place of the clip
minirl.py                MiniRL: REINFORCE with the ratio to the sampler, and a gate on staleness
ipo.py                   IPO: prime-rl's loss, masked by the change of probability
kpop.py                  KPop: tokens masked by a two-sided binary KL
slime_mismatch.py        slime's mismatch example
vespo.py                 VESPO: a soft weight of the response's importance ratio
verl_presets.py          verl's rollout-correction presets
qurl.py                  QuRL: adaptive clip range (ACR), update-aware quantization (UAQ)
qerl.py                  QeRL: LoRA over a shared NVFP4 base, adaptive noise (AQN)
mxfp4_rl.py              MXFP4 RL: W4A4 rollouts with macro-block scaling, outlier fallback and noise
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
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, cast

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
    "sapo": "sapo.METHOD",
    "minirl": "minirl.METHOD",
    "ipo": "ipo.METHOD",
    "kpop": "kpop.METHOD",
    "slime_mismatch": "slime_mismatch.METHOD",
    "acrl": "acrl.METHOD",
    "ais_r": "ais_r.METHOD",
    "tbpo": "tbpo.METHOD",
    "qarl": "qarl.METHOD",
    "qat_aligned": "qat_aligned.METHOD",
    "quads": "qat_aligned.QUADS",
    "calibrated_clipping": "calibrated_clipping.METHOD",
    "mixed_rollouts": "mixed_rollouts.METHOD",
    "weight_noise": "weight_noise.METHOD",
    "dc_grpo": "dc_grpo.METHOD",
    "keep_sampling_mask": "keep_sampling_mask.METHOD",
    "router_replay": "router_replay.METHOD",
    "router_replay_r2": "router_replay.R2",
    "rspo": "rspo.METHOD",
    "areal_prox": "areal_prox.METHOD",
    "max_age": "max_age.METHOD",
    "r2vpo": "r2vpo.METHOD",
    "jackpot": "jackpot.METHOD",
    "alp": "alp.METHOD",
    "mipu_step1": "mipu.METHOD",
    "vcpo": "vcpo.METHOD",
    "vcpo_baseline": "vcpo.WITH_BASELINE",
    "lr_decay": "lr_decay.METHOD",
    "mxfp4_rl": "mxfp4_rl.METHOD",
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


RECORDED = frozenset((
    "acrl", "ais_r", "alp", "areal_prox", "bf16", "bf16_tis", "bf16_train", "calibrated_clipping", "dc_grpo", "dppo",
    "flashrl", "fp16", "fp32_head", "fp8_rl", "gptq_start", "icepop", "ipo", "jackpot", "jet_rl",
    "keep_sampling_mask", "kpop", "lr_decay", "m2po", "max_age", "minirl", "mipu", "mis", "mixed_rollouts",
    "mxfp4_rl", "naive", "opsm", "qarl", "qat_aligned", "qat_kd", "qerl", "qlora", "qurl", "r2vpo", "rilq",
    "rilq_init", "rilq_refresh", "router_replay", "rspo", "sapo", "slime_mismatch", "tbpo", "trm", "vcpo",
    "verl_presets", "vespo", "weight_noise", "zero_mismatch",
))  # fmt: skip
"""Files whose runs have ids without a hash of the file, as they were first recorded: there the version of the numerics
tells of a change. Every other file of this package is hashed (`harness.config.outside`), so that an edited method is
another run."""


def own() -> tuple[list[Method], dict[str, str]]:
    """The methods of this package, in the order in which they are listed; and those whose file cannot be used, by name
    with why, one line: it ends no command but those that ask for the method."""
    from harness.api import Method

    found, broken = list[Method](), dict[str, str]()
    for name, where in OWN.items():
        module, _, attribute = where.partition(".")
        try:
            value = getattr(import_module(f"methods.{module}"), attribute)
        except (Exception, SystemExit) as error:  # whatever a file that is being written raises while it is imported
            told = f"OWN of methods: {name!r} is {where}, which does not load: {type(error).__name__}: {error}"
            broken[name] = told.partition("\n")[0]
            continue
        several = list(cast("dict[str, object]", value).values()) if isinstance(value, dict) else [value]
        named = {method.name: method for method in several if isinstance(method, Method)}
        if len(named) < len(several):
            broken[name] = f"OWN of methods: {name!r} is {where}, which is not a Method"
        elif name not in named:
            theirs = ", ".join(named)
            broken[name] = f"OWN of methods: {name!r} is {where}, whose Method.name is {theirs}; name both alike"
        else:
            found.append(named[name])
    return found, broken


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Every method that can be used, and what other packages offer that cannot."""

    methods: dict[str, Method]
    entries: dict[str, EntryPoint]
    """Method -> the entry point that offers it; only those of other packages."""
    broken: dict[str, str]
    """Name of an entry point, or of a method in OWN -> why it cannot be used, one line."""


def joined(own: Iterable[Method], offered: Iterable[EntryPoint]) -> Registry:
    """This package's methods and those that others offer. An entry point that does not load, is no method, or takes a
    name that is taken is left out and told in `broken`: it ends no command but those that ask for it."""
    found = {method.name: method for method in own}
    entries, broken = dict[str, EntryPoint](), dict[str, str]()
    for entry in offered:
        where = f"entry point {entry.name} = {entry.value} of {GROUP}"
        try:
            method = entry.load()
        except (Exception, SystemExit) as error:  # whatever an outside module raises while it is imported
            broken[entry.name] = f"{where} does not load: {type(error).__name__}: {error}".partition("\n")[0]
            continue
        from harness.api import Method

        if not isinstance(method, Method):
            broken[entry.name] = f"{where} is not a Method"
        elif method.name in found:
            holder = entries[method.name].value if method.name in entries else "this package"
            broken[entry.name] = f"{where} offers {method.name}, which {holder} has"
        else:
            found[method.name], entries[method.name] = method, entry
    return Registry(methods=found, entries=entries, broken=broken)


METHODS: dict[str, Method]
"""Every method by name. Entry points are loaded when it is first read, for their modules import this package."""


@cache
def registry() -> Registry:
    """The methods of this environment."""
    found, broken = own()
    theirs = joined(found, entry_points(group=GROUP))
    return replace(theirs, broken=broken | theirs.broken)


def __getattr__(name: str) -> dict[str, Method]:
    if name != "METHODS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return registry().methods


def check_name(name: str) -> None:
    """Raises ValueError with the nearest names for an unknown method. Imports methods only where other packages offer
    some, since their names are not known before."""
    if name in OWN:
        return
    known = list(OWN)
    if entry_points(group=GROUP):
        if name in registry().broken:
            raise ValueError(f"method={name}: {registry().broken[name]}")
        known = list(registry().methods)
    if name not in known:
        hint = "; TIS alone is method=flashrl" if name.lower() == "tis" else ""
        files = {where.partition(".")[0] for where in OWN.values()}
        if name.isidentifier() and name not in files and Path(__file__).with_name(f"{name}.py").exists():
            raise ValueError(f"method={name}: methods/{name}.py is there, but OWN of methods/__init__.py lacks it")
        raise ValueError(f"method={name}: unknown; {nearest(name, known)}{hint}")


def method_named(name: str) -> Method:
    """The method called `name`. Raises ValueError with the nearest names and all of them, or why it cannot be used."""
    check_name(name)
    found = registry()
    if name not in found.methods:
        raise ValueError(f"method={name}: {found.broken[name]}")
    return found.methods[name]
