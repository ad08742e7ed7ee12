"""Loss-side methods: the sources' own constants, what is said to be ours, and compositions that count a ratio twice."""

from __future__ import annotations

from typing import Any

import pytest

from harness.api import knobs
from harness.config.compose import compose
from harness.config.load import run_id
from harness.config.resolve import choose_parts, resolve
from methods import METHODS
from methods.mis import Reject
from tests.toy import small_config

TIS2, BAND = {"cap": 2.0, "level": "token"}, {"lo": 0.999, "hi": 1.001}
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "flashrl": {"Profile": {"refit_above": None, "keep_high": ()}, "TIS": TIS2},
    "qurl": {"UAQ": {"s": 1.5, "tensors": "qkv"}, "ACR": {"cap": 2.0, "level": "token", "u_max": None}},
    "fp8_rl": {"RecalibratedKV": {}, "TIS": TIS2},
    "fp8_rl_e2e": {"FP8Flow": {}, "RecalibratedKV": {}, "TIS": TIS2},
    "fp8_rl_mis": {"RecalibratedKV": {}, "MIS": {"level": "token", "lo": 0.5, "hi": 2.0, "weight": "token"}},
    "mis": {"MIS": {"level": "sequence", "lo": None, "hi": 3.0, "weight": "sequence", "veto": None}},
    "geo_rs": {"GeoRS": {"stat": "k1", "over": "seq_mean", "is_inverse": False, **BAND}},
    "geo_rs_tis": {"GeoRS": BAND, "TIS": TIS2},
    "k3_rs": {"K3RS": {"stat": "k3", "over": "seq_mean", "hi": 0.01}},
    "k3_rs_tis": {"K3RS": {"stat": "k3", "over": "seq_mean", "hi": 0.001}, "TIS": TIS2},
    "icepop": {"IcePop": {"alpha": 0.5, "beta": 5.0}},
    "dppo_tv": {"DPPO": {"divergence": "tv", "delta_low": 0.15, "delta_high": 0.15, "cap": 20.0, "kappa": 0.0}},
    "dppo_kl": {"DPPO": {"divergence": "kl", "delta_low": 0.05, "delta_high": 0.05, "mask_anchor": "rollout"}},
    "dppo_prime_rl": {"DPPO": {"delta_low": 0.2, "delta_high": 0.2, "cap": None, "kappa": 1e-3}},
    "trm": {"TRM": {"source": "full", "delta_max": 0.05, "delta_mean": None}},
    "trm_sampled": {"TRM": {"source": "sampled", "policy": "current", "delta_max": 0.05, "delta_mean": None}},
    "opsm": {"OPSM": {"anchor": "rollout", "delta": 0.5}},
    "opsm_slime": {"OPSM": {"anchor": "old", "delta": 1e-4}},
    "m2po": {"M2PO": {"tau": 0.04, "policy": "current", "at_least": 0}},
    "m2po_areal": {"M2Mask": {"tau": 0.04, "policy": "old", "scope": "all", "at_least": 1}},
    "vespo": {"TIS": TIS2, "VESPO": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}},
    "acrl": {"ACRL": {"gamma": 0.65, "over": "response", "num_batches": 4, "bound": 5.0}},
    "alp": {"ALP": {"std": 1e-4, "first": 0, "count": None}},
    "ais_r": {"AISR": {"cap": 2.0, "ess_role": "trust", "div0": 0.01, "cv0": 1.0, "beta": 0.0, "lam_max": 1.0}},
    "tbpo": {"TBPO": {"eps_low": 3e-4, "eps_high": 4e-4, "delta_n": 7e-4, "cap": 2.0, "lo": None, "hi": None}},
    "calibrated_clipping": {
        "FP8Flow": {},
        "TIS": TIS2,
        "CalibratedClipping": {"interval": 20, "smoothing": 0.9, "max_high": 5.0},
    },
    "sapo": {"SAPO": {"tau_pos": 1.0, "tau_neg": 1.05}},
    "minirl": {"MiniRL": {"cap": 5.0, "low": 0.80, "high": 1.27}},
    "ipo": {"IPO": {"threshold": 0.1, "tau": 1.0, "kappa": 1e-3}},
    "kpop": {"KPop": {"phi": 0.1, "policy": "old"}},
    "slime_mismatch": {
        "NormalizedTIS": TIS2,
        "MIS": {"level": "token", "lo": 0.5, "hi": 2.0, "weight": "none", "veto": 1e-4},
    },
    "mxfp4_rl": {
        "TIS": TIS2,
        "OutlierFallback": {"alpha": 0.5},
        "AQN": {"sigma_start": 1e-2, "sigma_end": 1e-3},
        "MXErrors": {},
    },
    "vcpo": {"TIS": {"cap": 8.0, "level": "sequence"}, "ESSStep": {"q0": 1.0, "rule": "sqrt", "cap": None}},
    "lr_decay": {
        "LengthDecay": {"baseline_steps": 50, "surge": 3.0, "period_factor": 1.8, "counts_from": "surge", "floor": 0.1}
    },
    "dc_grpo": {"GapCost": {"lam": 0.1, "level": 0.0037, "eta": 1.0, "lam_min": 0.0, "lam_max": 1.0}},
    "jackpot": {"Jackpot": {"lam": 1.0, "cap": 2.0, "source": "sampled"}},
    "r2vpo": {"R2VPO": {"lam": 1.0, "delta": 0.01, "eta": 1.0, "anchor": "old"}},
    "mipu_step1": {"TIS": {"cap": 2.0, "level": "geometric"}},
}
OURS = {
    "qurl": "direction", "qurl_acr": "direction", "fp8_rl_mis": "", "k3_rs_tis": "which divergence",
    "opsm": "threshold", "acrl": "bound", "ais_r": "whole rule", "tbpo": "widths", "qarl": "",
    "calibrated_clipping": "guards", "minirl": "cap of 5", "kpop": "old or the current", "lr_decay": "surge",
    "dc_grpo": "bounds", "r2vpo": "dual step", "jackpot": "budget and the cap", "mipu_step1": "step 2",
    "alp": "standard deviation", "keep_sampling_mask": "reference", "jet_rl": "once or twice",
    "mxfp4_rl": "mantissa",
}  # fmt: skip
"""Method -> a word of what it says is ours."""
PUBLISHED = {
    "flashrl", "fp8_rl", "mis", "geo_rs", "geo_rs_tis", "k3_rs", "icepop", "dppo_tv", "dppo_kl", "dppo_prime_rl", "trm",
    "trm_sampled", "opsm_slime", "m2po", "m2po_areal", "vespo", "sapo", "ipo", "slime_mismatch", "vcpo",
    *(name for name in METHODS if name.startswith("verl_")),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_constants_of_the_sources(name: str) -> None:
    parts = {type(part).__name__: part for part in METHODS[name].parts}
    assert list(parts) == list(DEFAULTS[name])
    for part, values in DEFAULTS[name].items():
        assert {knob: getattr(parts[part], knob) for knob in values} == values


def test_what_is_ours_is_said() -> None:
    for name, word in OURS.items():
        assert METHODS[name].reconstructed and word in METHODS[name].reconstructed, name
    for name in PUBLISHED:
        assert not METHODS[name].reconstructed, name
    sampled = METHODS["trm_sampled"]
    assert sampled.paper == METHODS["trm"].paper and "sampled tokens" in sampled.summary


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        (
            "mode",
            "decoupled",
            "qurl qurl_acr tbpo qarl vespo calibrated_clipping sapo minirl r2vpo rspo jackpot dc_grpo",
        ),
        ("mode", "decoupled", "jackpot dc_grpo mipu_step1 slime_mismatch"),
        ("mode", "bypass_ppo", "alp"),
        ("agg", "seq-mean-token-sum", "trm trm_sampled minirl"),
        ("agg", "seq-mean-token-mean", "tbpo qarl sapo vcpo rspo"),
        ("agg", "token-mean", "ipo m2po dppo_prime_rl"),
        ("denom", "kept", "kpop slime_mismatch"),
        ("denom", "original", "trm trm_sampled opsm m2po dppo_tv dppo_kl dppo_prime_rl ipo minirl jackpot"),
    ],
)
def test_settings_that_an_objective_fixes(field: str, value: str, names: str) -> None:
    for name in names.split():
        assert getattr(METHODS[name], field) == value, name


def test_the_first_precision_is_the_papers() -> None:
    first = {"flashrl": "int8", "qurl": "int8", "fp8_rl": "fp8_block+kv8", "fp8_rl_e2e": "fp8_block+kv8",
             "jet_rl": "fp8_block", "calibrated_clipping": "fp8_block", "qerl": "nvfp4", "qlora": "nf4"}  # fmt: skip
    assert {name: METHODS[name].precisions[0] for name in first} == first


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parts=[tbpo.TBPO]", "algo.mode=bypass_pg"], "algo.mode=bypass_pg: TBPO needs decoupled"),
        (["parts=[flashrl.TIS,vespo.VESPO]", "algo.mode=bypass_pg"], "algo.mode=bypass_pg: VESPO needs decoupled or"),
        (["parts=[calibrated_clipping.CalibratedClipping]", "algo.mode=bypass_ppo"], "CalibratedClipping needs decoup"),
        (["parts=[calibrated_clipping.CalibratedClipping]", "algo.loss=gspo"], "CalibratedClipping needs ppo"),
        (["parts=[qurl_acr.ACR]", "algo.mode=bypass_pg"], "algo.mode=bypass_pg: ACR needs decoupled"),
        (["parts=[dppo_tv.DPPO]", "knobs.DPPO.ratio_anchor=old", "algo.mode=bypass_pg"], "DPPO needs decoupled or"),
        *(
            (
                [f"parts=[{part}]", *knobs, f"algo.mode={mode}"],
                f"algo.mode={mode}: {part.split('.')[1]} needs decoupled",
            )
            for mode in ("bypass_ppo", "bypass_pg")
            for part, *knobs in (
                ("opsm_slime.OPSM",),
                ("m2po_areal.M2Mask",),
                ("trm.TRM",),
                ("trm_sampled.TRM", "knobs.TRM.policy=old"),
                ("dppo_tv.DPPO", "knobs.DPPO.mask_anchor=old"),
            )
        ),
        (["parts=[qurl_acr.ACR]", "algo.loss=gspo"], "algo.loss=gspo: ACR needs ppo"),
        (["parts=[jackpot.Jackpot,flashrl.TIS]"], "Jackpot and TIS both set the correction weight"),
        (["parts=[kpop.KPop]", "algo.mode=bypass_ppo"], "the weight of KPop would count it twice"),
        (["parts=[sapo.SAPO,minirl.MiniRL]"], "SAPO and MiniRL both replace the objective"),
        (["parts=[jackpot.Jackpot]", "algo.mode=bypass_pg"], "algo.mode=bypass_pg: Jackpot needs decoupled"),
        (["parts=[mis.MIS,flashrl.TIS]"], "MIS and TIS both set the correction weight"),
        (["parts=[mis.MIS]", "algo.mode=bypass_ppo"], "the weight of MIS would count it twice"),
        (["parts=[k3_rs.K3RS]", "knobs.K3RS.reject_frac=1.5"], "K3RS.reject_frac: 1.5"),
    ],
)
def test_compositions_that_make_no_sense_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose(small_config("method=naive", *overrides))


def test_a_mask_without_a_weight_goes_with_a_weight_and_with_the_bypass() -> None:
    """The veto of slime and miles beside token weights; rejection under the bypassed clip."""
    veto = ["method=naive", "knobs.MIS.weight=none", "knobs.MIS.veto=1e-4"]
    composed = compose(small_config(*veto, "parts=[mis.MIS,flashrl.TIS]"))
    assert [part.sets_weight for part in composed.parts] == [False, True]
    compose(small_config(*veto, "parts=[mis.MIS]", "algo.mode=bypass_ppo"))
    compose(small_config("method=naive", "parts=[vespo.VESPO]", "algo.mode=bypass_ppo"))
    for method in ("dppo_tv", "opsm", "m2po"):
        compose(small_config(f"method={method}", "algo.mode=bypass_pg"))
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"Reject.reject_frac: "):
            Reject(reject_frac=share)


def test_a_knob_that_came_later_is_left_out_of_ids_at_its_default() -> None:
    plain = resolve(small_config("method=icepop", "precision=int4"))
    assert plain.knobs == {"IcePop": {"alpha": 0.5, "beta": 5.0}}
    assert knobs(choose_parts(plain)[0])["reject_frac"] is None
    changed = resolve(small_config("method=icepop", "precision=int4", "knobs.IcePop.reject_frac=0.05"))
    assert changed.knobs["IcePop"]["reject_frac"] == 0.05 and run_id(changed) != run_id(plain)
