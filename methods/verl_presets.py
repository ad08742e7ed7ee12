"""verl's rollout-correction presets by name: the factory methods of `RolloutCorrectionConfig`, verl 0.9.1.

Papers: those of the parts (blog "When Speed Kills Stability", arXiv 2512.23075, arXiv 2510.18855); code verl
trainer/config/algorithm.py, trainer/ppo/rollout_corr_helper.py.
Claim: none of its own; these are what practitioners run, so a row here is a row of their configuration.
decoupled: weights and rejection from the old policy over the sampler, once per batch, before PPO's clip. bypass_ppo:
the clip's ratio is the current policy over the sampler, no weights. bypass_pg: REINFORCE, weights from the current
policy over the sampler. Thresholds are the factories' defaults; k1 bounds act on 1 / rho, as verl's do.
Denominators: verl's decoupled mode overwrites the response mask before the actor counts tokens ("kept"); its bypass
loss rejects after they were counted ("original"). In decoupled mode its rejected tokens leave the KL and entropy
terms too; here they leave the policy term alone. Its seq-* aggregations always divide by the configured number of
sequences, so there only token counts follow. Left out: `disabled`, which is `naive`.
"""

from harness.api import Method, Part
from methods.flashrl import TIS
from methods.icepop import IcePop
from methods.mis import K3RS, GeoRS, Reject
from methods.naive import LOW_BIT

TOKEN, SEQUENCE, ICEPOP = TIS(), TIS(level="sequence"), IcePop()
SUM = Reject(stat="k1", over="seq_sum", lo=0.5, hi=2.0, is_inverse=True)
GEO, K3 = GeoRS(is_inverse=True), K3RS()

PRESETS: dict[str, tuple[str, tuple[Part, ...]]] = {
    "decoupled_token_is": ("decoupled", (TOKEN,)),
    "decoupled_seq_is": ("decoupled", (SEQUENCE,)),
    "decoupled_token_icepop": ("decoupled", (ICEPOP,)),
    "decoupled_seq_is_rs": ("decoupled", (SUM, SEQUENCE)),
    "decoupled_geo_rs": ("decoupled", (GEO,)),
    "decoupled_geo_rs_seq_tis": ("decoupled", (GEO, SEQUENCE)),
    "decoupled_geo_rs_token_tis": ("decoupled", (GEO, TOKEN)),
    "decoupled_k3_rs": ("decoupled", (K3,)),
    "decoupled_k3_rs_seq_tis": ("decoupled", (K3, SEQUENCE)),
    "decoupled_k3_rs_token_tis": ("decoupled", (K3, TOKEN)),
    "bypass_ppo_clip": ("bypass_ppo", ()),
    "bypass_ppo_clip_geo_rs": ("bypass_ppo", (GEO,)),
    "bypass_ppo_clip_k3_rs": ("bypass_ppo", (K3,)),
    "bypass_pg_is": ("bypass_pg", (SEQUENCE,)),
    "bypass_pg_token_icepop": ("bypass_pg", (ICEPOP,)),
    "bypass_pg_geo_rs": ("bypass_pg", (GEO,)),
    "bypass_pg_geo_rs_seq_tis": ("bypass_pg", (GEO, SEQUENCE)),
    "bypass_pg_geo_rs_token_tis": ("bypass_pg", (GEO, TOKEN)),
}
"""verl's name -> (mode, parts: rejection first, then weights)."""
WORDS: dict[Part, str] = {
    TOKEN: "token weights cut at 2",
    SEQUENCE: "sequence weights cut at 2",
    ICEPOP: "token weights 0 outside [0.5, 5]",
    SUM: "responses kept whose ratio is within [0.5, 2]",
    GEO: "responses kept whose geometric mean ratio is within 0.1 % of 1",
    K3: "responses kept whose mean k3 is at most 0.01",
}
LOSSES = {"decoupled": "PPO's clip", "bypass_ppo": "PPO's clip against the sampler", "bypass_pg": "REINFORCE"}


def preset(name: str) -> Method:
    """The method `verl_<name>` of a row of `PRESETS`."""
    mode, parts = PRESETS[name]
    return Method(
        name=f"verl_{name}",
        paper=f"verl 0.9.1, {name}",
        parts=parts,
        precisions=(*LOW_BIT, "bf16"),
        mode=mode,
        claim="a rollout-correction preset that verl recommends by name",
        denom="kept" if mode == "decoupled" else "original",
        summary=", ".join([LOSSES[mode], *(WORDS[part] for part in parts)]),
    )


METHODS = {f"verl_{name}": preset(name) for name in PRESETS}
