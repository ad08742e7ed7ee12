"""Plans merge or conflict, knobs are checked, hooks fold left to right, a passport that differs is fatal."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from harness.api import (
    Correction,
    Fixed,
    Memory,
    Part,
    Passport,
    Plan,
    Step,
    TensorRecord,
    TokenBatch,
    WeightStream,
)
from harness.config.compose import (
    OUTSIDE_LOSS,
    Composed,
    advice,
    check_passport,
    check_supported,
    compose,
    merge,
    plan_json,
)
from harness.config.load import load
from harness.config.resolve import resolve
from harness.numerics.formats import format_named
from harness.numerics.quantize import fake_quantize
from harness.objective.loss import part_loss, start
from methods import METHODS
from tests.loss_cases import STEP, random_batch


def test_plans_merge_where_opinions_agree_or_are_missing() -> None:
    int8, fp16 = format_named("int8_channel"), format_named("fp16")
    merged = merge(
        [("a", Plan(rollout_weights=int8)), ("b", Plan(train_compute=fp16)), ("c", Plan(rollout_weights=int8))]
    )
    assert merged == Plan(rollout_weights=int8, train_compute=fp16)


def test_plans_conflict_by_name() -> None:
    plans = [
        ("A", Plan(rollout_weights=format_named("int8_channel"))),
        ("B", Plan(rollout_weights=format_named("nvfp4"))),
    ]
    with pytest.raises(ValueError, match=r"A wants rollout_weights=int8_channel, B wants nvfp4"):
        merge(plans)
    exceptions = [
        ("A", Plan(exceptions=(("*.o_proj.weight", None),))),
        ("B", Plan(exceptions=(("*.o_proj.weight", format_named("bf16")),))),
    ]
    with pytest.raises(ValueError, match=r"disagree on the format of \*.o_proj.weight"):
        merge(exceptions)


def test_every_method_composes_at_every_precision_it_declares() -> None:
    config = load([])
    precisions = {
        name: load([f"precision={name}"]).precision for name in {p for m in METHODS.values() for p in m.precisions}
    }
    for name, method in METHODS.items():
        algo = resolve(replace(config, method=name, precision=precisions[method.precisions[0]])).algo
        for field in ("mode", "agg", "denom"):
            assert getattr(method, field) in (None, getattr(algo, field)), (name, field)
        for precision in method.precisions:
            composed = compose(replace(config, method=name, precision=precisions[precision]))
            assert composed.method is method and composed.plan.rollout_weights is not None
            words = plan_json(composed.plan)
            assert json.loads(json.dumps(words)) == words
            assert ("samplers" in words) == (composed.plan.samplers is not None) == (name == "mixed_rollouts")
            assert words.get("residual_alpha") == (0.5 if name == "mxfp4_rl" else None)
            assert words.keys() - {"samplers", "residual_alpha"} == {
                "train_weights", "train_compute", "rollout_weights", "rollout_acts", "rollout_kv", "lm_head", "sampler",
                "adapters", "exceptions", "residual",
            }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=naiv"], ["naiv", "naive"]),
        (["method=bf16", "precision=int4"], ["int4", "bf16"]),
        (["method=flashrl", "precision=int8", "knobs.TIS.caps=2"], ["knobs.TIS.caps", "cap"]),
        (["method=flashrl", "precision=int8", "knobs.TIZ.cap=2"], ["knobs.TIZ", "TIS"]),
        (["method=flashrl", "precision=int8", "knobs.TIS.cap=high"], ["knobs.TIS.cap", "high"]),
        (["method=flashrl", "precision=int8", "algo.mode=bypass_ppo"], ["bypass_ppo", "TIS", "decoupled"]),
        (["method=bf16", "parts=[flashrl.TSI]"], ["flashrl.TSI", "flashrl.TIS"]),
        (["method=bf16", "parts=[flashrl.TIS,icepop.IcePop]"], ["TIS", "IcePop", "weight"]),
        (["method=bf16", "engine.top_p=0.9"], ["top_p", "0.9"]),
        (["method=zero_mismatch", "precision=fp32+kv8"], ["cache"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        compose(load(overrides))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_knobs_reach_the_part_and_resolve_lists_all_of_them() -> None:
    config = resolve(load(["method=flashrl", "precision=int8", "knobs.TIS.cap=4"]))
    assert config.knobs["TIS"]["cap"] == 4.0
    part = next(p for p in compose(config).parts if type(p).__name__ == "TIS")
    assert part.cap == 4.0
    default = resolve(load(["method=flashrl", "precision=int8"]))
    assert set(default.knobs["TIS"]) == set(config.knobs["TIS"])


def test_parts_of_other_methods_compose_by_name() -> None:
    composed = compose(load(["method=bf16", "parts=[flashrl.TIS]"]))
    assert [type(p).__name__ for p in composed.parts] == ["TIS"]


@dataclass(frozen=True, kw_only=True)
class Add(Part):
    by: float = 1.0

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        memory["calls"] = memory.get("calls", 0.0) + 1.0
        return replace(c, clip_high=c.clip_high + self.by)


@dataclass(frozen=True, kw_only=True)
class Double(Part):
    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        return replace(c, clip_high=c.clip_high * 2)


def test_hooks_fold_left_to_right_and_keep_memory_apart() -> None:
    ones = torch.ones(1, 1)
    batch = TokenBatch(
        token_ids=torch.zeros(1, 1, dtype=torch.int64), mask=ones.bool(), adv=ones, rollout_logp=-ones, old_logp=-ones,
        step=Step(index=0, total=1, seed=0),
    )  # fmt: skip
    start = Correction(weight=ones, keep=ones.bool(), clip_low=ones, clip_high=ones)
    for parts, expected in (((Add(by=3), Double()), 8.0), ((Double(), Add(by=3)), 5.0)):
        composed = composed_of(*parts)
        assert composed.correct(start, batch).clip_high.item() == expected
        assert [m.get("calls") for m in composed.memory if m] == [1.0]


@dataclass(frozen=True, kw_only=True)
class Slower(Part):
    factor: float = 0.5

    def update_lr_factor(self, b: TokenBatch, memory: Memory) -> float:
        memory["calls"] = memory.get("calls", 0.0) + 1.0
        return self.factor * float(b.mask.sum())


@dataclass(frozen=True, kw_only=True)
class Around(Part):
    name: str

    @contextmanager
    def during_update(self, model: nn.Module, step: Step, number: int) -> Generator[None]:
        SEEN.append(f"{self.name} in {number}")
        yield
        SEEN.append(f"{self.name} out {number}")


SEEN: list[str] = []


def composed_of(*parts: Part, plan: Plan | None = None) -> Composed:
    """Parts by themselves."""
    return Composed(method=METHODS["bf16"], plan=plan or Plan(), parts=parts, fixed={}, memory=[{} for _ in parts])


def test_factors_on_the_learning_rate_multiply_and_must_be_factors() -> None:
    _, batch = random_batch("factors")
    tokens = float(batch.mask.sum())
    composed = composed_of(Slower(factor=0.5), Double(), Slower(factor=3.0))
    assert composed.update_lr_factor(batch) == pytest.approx(1.5 * tokens**2)
    assert composed.update_lr_factor(batch) > 0 and composed.memory == [{"calls": 2.0}, {}, {"calls": 2.0}]
    assert composed_of(Double()).update_lr_factor(batch) == 1.0
    assert composed_of(Slower(factor=0.0)).update_lr_factor(batch) == 0.0
    for bad in (-0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"Slower.update_lr_factor=.*: a finite factor from 0 on is needed"):
            composed_of(Slower(factor=bad)).update_lr_factor(batch)


def test_contexts_of_an_update_nest_in_the_order_of_the_parts() -> None:
    SEEN.clear()
    with composed_of(Around(name="a"), Double(), Around(name="b")).during_update(nn.Identity(), STEP, 4):
        SEEN.append("pass")
    assert SEEN == ["a in 4", "b in 4", "pass", "b out 4", "a out 4"]


@dataclass(frozen=True, kw_only=True)
class Rounding(Part):
    """A sync that rounds the weights of some linears, and says so where `tells`."""

    format: str = "int4_g32"
    pattern: str = "*.q_proj.weight"
    tells: bool = False

    def plan(self, rollout: Plan) -> Plan:
        return Plan(exceptions=((self.pattern, format_named(self.format)),)) if self.tells else Plan()

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        for name, tensor in weights:
            chosen = fnmatchcase(name, self.pattern)
            yield name, fake_quantize(tensor, format_named(self.format)) if chosen else tensor


def pushed(part: Part, plan: Plan) -> list[str]:
    """Names that arrive at the engine."""
    rng = torch.Generator().manual_seed(0)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"] + ["model.norm.weight"]
    stream = ((n, torch.randn(64, generator=rng) if "norm" in n else torch.randn(64, 64, generator=rng)) for n in names)
    plan = merge([("axis", plan), ("part", part.plan(plan))])
    return [name for name, _ in composed_of(part, plan=plan).sync(stream, STEP)]


def test_a_grid_that_no_plan_declares_ends_the_push_at_its_weight() -> None:
    bf16, int8, int4 = (Plan(rollout_weights=format_named(x)) for x in ("bf16", "int8_channel", "int4_g32"))
    with pytest.raises(
        RuntimeError, match=r"Rounding.sync puts model.layers.0.self_attn.q_proj.weight on a grid \(int4"
    ):
        pushed(Rounding(), bf16)
    with pytest.raises(RuntimeError, match=r"planned int8_channel: declare the format in the part's plan"):
        pushed(Rounding(), int8)
    with pytest.raises(RuntimeError, match=r"k_proj.weight on a grid"):
        pushed(Rounding(pattern="*.k_proj.weight", format="mxfp4"), bf16)
    with pytest.raises(RuntimeError, match=r"q_proj.weight on a grid .*, planned 16 bits"):
        pushed(Rounding(format="e4m3_channel"), Plan())
    for part, plan in (
        (Rounding(), int4), (Rounding(format="int8_channel"), int4), (Rounding(tells=True), bf16),
        (Rounding(format="bf16"), bf16), (Rounding(pattern="*.nothing"), bf16), (Double(), bf16),
    ):  # fmt: skip
        assert len(pushed(part, plan)) == 4


def passport(fmt: str, acts: str = "int8_token", kv: str | None = None) -> Passport:
    name = "model.layers.0.self_attn.q_proj.weight"
    record = TensorRecord(name=name, format=fmt, dtype="int8", scale_shape=(4, 1), hash="0")
    return Passport(engine="test", weights=(record,), acts={name: acts}, kv=kv, sampler="cached")


def test_a_format_that_did_not_take_effect_is_fatal() -> None:
    plan = Plan(rollout_weights=format_named("int8_channel"), rollout_acts=format_named("int8_token"))
    check_passport(plan, passport("int8_channel"))
    for wrong in (passport("bf16"), passport("int8_channel", acts="bf16"), passport("int8_channel", kv="e4m3_kv")):
        with pytest.raises(RuntimeError, match="did not take effect"):
            check_passport(plan, wrong)


def test_a_passport_that_lists_nothing_and_one_of_another_sampler_or_cache_are_fatal() -> None:
    plan = Plan(rollout_weights=format_named("int8_channel"), rollout_acts=format_named("int8_token"))
    good, begin = passport("int8_channel"), "a format did not take effect: "
    for changes, words in (
        ({"weights": ()}, "the passport lists no weights (1 differences)"),
        ({"acts": {}}, "the passport lists no inputs (1 differences)"),
        ({"sampler": "trainer"}, "the sampler is trainer, planned cached (1 differences)"),
        ({"kv": "e4m3_kv"}, "the KV cache is e4m3_kv, planned not quantized (1 differences)"),
    ):
        with pytest.raises(RuntimeError) as caught:
            check_passport(plan, replace(good, **changes))
        assert str(caught.value) == begin + words


def test_inputs_that_nobody_planned_to_quantize_are_fatal() -> None:
    """vLLM's CPU build does that to 4-bit weights where the processor has AMX tiles, unless told not to."""
    plan = Plan(rollout_weights=format_named("int4_g32"))
    check_passport(plan, passport("int4_g32", acts="bf16"))
    with pytest.raises(RuntimeError, match=r"inputs of .* are int8_token, planned not quantized"):
        check_passport(plan, passport("int4_g32", acts="int8_token"))
    exempt = Plan(
        rollout_weights=format_named("int8_channel"), rollout_acts=format_named("int8_token"), exceptions=(("*", None),)
    )
    check_passport(exempt, passport("bf16", acts="bf16"))
    with pytest.raises(RuntimeError, match="planned not quantized"):
        check_passport(exempt, passport("bf16", acts="int8_token"))


def test_a_weight_that_nobody_planned_to_quantize_is_fatal() -> None:
    """FlashRL's `keep_high` leaves layers in 16 bits; an engine that quantizes them all the same must not pass."""
    kept = Plan(rollout_weights=format_named("int8_channel"), exceptions=(("*.q_proj.weight", None),))
    check_passport(kept, passport("bf16", acts="bf16"))
    with pytest.raises(RuntimeError, match=r"q_proj\.weight is int8_channel, planned not quantized \(1 diff"):
        check_passport(kept, passport("int8_channel", acts="bf16"))


def test_missing_capabilities_and_needs_are_named() -> None:
    composed = compose(load(["method=naive", "precision=int4"]))
    with pytest.raises(ValueError, match="rollout_weights:int4_g32"):
        check_supported(composed, frozenset({"sampler:cached"}), "toy", frozenset())
    supports = frozenset({"sampler:cached", "rollout_weights:int4_g32"})
    check_supported(composed, supports, "toy", frozenset())
    mixed = compose(load(["method=mixed_rollouts", "precision=int4"]))
    with pytest.raises(ValueError, match=r"engine=toy: cannot do rollout_weights:bf16, samplers of method mixed"):
        check_supported(mixed, supports, "toy", frozenset())
    check_supported(mixed, supports | {"rollout_weights:bf16", "samplers"}, "toy", frozenset())
    masked = compose(load(["method=keep_sampling_mask", "precision=int4"]))
    with pytest.raises(ValueError, match=r"engine=toy: cannot do allowed_ids"):
        check_supported(masked, supports, "toy", frozenset({"allowed_ids"}))
    with pytest.raises(ValueError, match=r"KeepSamplingMask needs allowed_ids; the trainer offers \[\]"):
        check_supported(masked, supports | {"allowed_ids"}, "toy", frozenset())
    full = compose(load(["method=jackpot", "precision=int4", "knobs.Jackpot.source=full"]))
    with pytest.raises(ValueError, match=r"Jackpot needs rollout_tv; the trainer offers \['rollout_kl'\]"):
        check_supported(full, supports, "toy", frozenset({"rollout_kl"}))


def test_parts_that_cannot_work_together_are_named() -> None:
    def composed(*words: str) -> None:
        compose(load(["precision=int4", *words]))

    with pytest.raises(ValueError, match="parts ACR and TIS both set the correction weight"):
        composed("method=qurl", "parts=[qurl.ACR,flashrl.TIS]")
    with pytest.raises(ValueError, match="parts ACR and CalibratedClipping both set the upper clip"):
        composed("method=qurl", "parts=[qurl.ACR,calibrated_clipping.CalibratedClipping]")
    with pytest.raises(ValueError, match=r"algo\.loss=gspo: ACR needs ppo"):
        composed("method=qurl", "algo.loss=gspo")
    composed("method=qurl", "parts=[qurl.UAQ,flashrl.TIS]", "knobs.TIS.cap=4")


def test_a_part_that_needs_more_updates_is_remarked() -> None:
    config = load(["method=qurl", "precision=int8"])
    (line,) = advice(config, compose(config))
    assert line.startswith("ACR changes nothing below 2 updates per rollout batch, this run has 1: raise")
    config = load(["method=qurl", "precision=int8", "algo.num_epochs=2"])
    assert advice(config, compose(config)) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["method=fp8_rl", "precision=fp8_block"], "RecalibratedKV changes nothing at precision=fp8_block"),
        (["method=fp8_rl", "precision=fp8_block+kv8"], None),
        (["method=fp8_rl", "precision=fp8_block+kv8", "knobs.RecalibratedKV.protocol=inference"], None),
        (["method=qarl", "precision=bf16", "algo=grpo"], "AlignedQAT changes nothing at precision=bf16"),
        (["method=keep_sampling_mask"], "KeepSamplingMask changes nothing at engine.top_p=1: the sampler may draw "
         "every token"),
        (["method=keep_sampling_mask", "engine.top_p=0.9"], None),
        (["method=max_age"], "MaxAge goes by the age of tokens, which are all new: raise algo.staleness or "
         "algo.partial_rollouts"),
        (["method=max_age", "algo.staleness=2"], None),
        (["method=areal_prox", "algo.partial_rollouts=4"], None),
        (["method=sapo", "algo.loss=gspo", "algo=grpo"], "algo.loss=gspo changes nothing: SAPO replaces the objective"),
        (["method=flashrl", "algo.loss=gspo"], None),
        (["method=flashrl", "algo.loss=gspo", "algo.mode=bypass_pg"], "algo.loss=gspo changes nothing: algo.mode="
         "bypass_pg is the plain policy gradient"),
        (["method=verl_bypass_pg_is", "algo=gspo"], "algo.loss=gspo changes nothing: algo.mode=bypass_pg is the plain "
         "policy gradient"),
        (["method=flashrl", "algo=dr_grpo", "algo.loss=gspo"], "algo.agg=seq-mean-token-sum-norm changes nothing: "
         "algo.loss=gspo is defined with seq-mean-token-mean"),
        (["method=flashrl", "algo=gspo"], None),
        (["method=naive", "algo.batch_normalize=token"], "algo.batch_normalize=token changes nothing: no part "
         "of naive sets weights"),
        (["method=flashrl", "algo.batch_normalize=token"], None),
        (["method=minirl", "algo=grpo"], "algo.agg=seq-mean-token-mean changes nothing: method minirl is defined with "
         "seq-mean-token-sum"),
        (["method=naive", "trainer.min_lr_ratio=0.1"], "trainer.min_lr_ratio=0.1 changes nothing: trainer.schedule="
         "constant never falls"),
        (["method=naive", "trainer.min_lr_ratio=0.1", "trainer.schedule=linear"], None),
        (["method=naive", "trainer.warmup_steps=1"], "trainer.warmup_steps=1 changes nothing: the first update has the "
         "whole rate"),
        (["method=naive", "trainer.warmup_steps=2"], None),
        (["method=naive", "trainer.warmup_steps=20", "trainer.schedule=cosine", "trainer.steps=10"],
         "trainer.schedule=cosine changes nothing: of 10 updates 10 are warm-up"),
        (["method=naive", "trainer.warmup_steps=9", "trainer.schedule=cosine", "trainer.steps=10"],
         "trainer.schedule=cosine changes nothing: of 10 updates 9 are warm-up"),
        (["method=naive", "trainer.warmup_steps=8", "trainer.schedule=cosine", "trainer.steps=10"], None),
        (["method=ipo", "algo.denom=kept"], "algo.denom=kept changes nothing: method ipo is defined with original"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_remarked(words: list[str], line: str | None) -> None:
    config = load([*words] if any(word.startswith("precision") for word in words) else [*words, "precision=int4"])
    assert advice(config, compose(config)) == ([] if line is None else [line])


@dataclass(frozen=True, kw_only=True)
class Forgetful(Part):
    """Hooks that return what they were made with."""

    result: object = None

    def correct(self, c: Correction, b: TokenBatch, memory: Memory) -> Correction:
        return self.result  # pyright: ignore[reportReturnType]

    def correct_update(self, c: Correction, logp: torch.Tensor, b: TokenBatch, memory: Memory) -> Correction:
        return self.result  # pyright: ignore[reportReturnType]

    def wrap(self, model: nn.Module, plan: Plan, fixed: Fixed) -> nn.Module:
        return self.result  # pyright: ignore[reportReturnType]

    def sync(self, weights: WeightStream, step: Step, plan: Plan, fixed: Fixed, memory: Memory) -> WeightStream:
        return self.result  # pyright: ignore[reportReturnType]

    def token_loss(self, logp: torch.Tensor, c: Correction, b: TokenBatch) -> torch.Tensor | None:
        return self.result  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("hook", ["correct", "correct_update"])
def test_what_a_correction_hook_returns_is_checked_in_one_line(hook: str) -> None:
    logp, batch = random_batch(0)
    c = start(batch, 0.2, 0.2)

    def call(result: object) -> Correction:
        composed = composed_of(Forgetful(result=result))
        return composed.correct(c, batch) if hook == "correct" else composed.correct_update(c, logp, batch)

    rows, tokens = batch.mask.shape
    shape = rf"expected a tensor of shape \[{rows}, {tokens}\]"
    for wrong, said in (
        (None, r"returned None; expected Correction; is a `return` missing\?$"),
        (c.weight, r"returned a Tensor; expected Correction$"),
        (replace(c, weight=c.weight[:, 0]), rf"returned a Correction whose weight is shape \[{rows}\]; {shape}"),
        (replace(c, keep=None), rf"returned a Correction whose keep is a NoneType; {shape}"),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=rf"^Forgetful\.{hook} {said}"):
            call(wrong)
    assert call(c) is c and call(shifted := replace(c, adv_shift=c.weight)) is shifted
    with pytest.raises(ValueError, match=rf"^Forgetful\.{hook} sets the weight; say sets_weight = True in the part$"):
        call(replace(c, weight=2.0 * c.weight))


def test_other_hooks_that_return_nothing_are_named() -> None:
    composed = composed_of(Forgetful())
    with pytest.raises(ValueError, match=r"^Forgetful\.wrap returned None; expected Module"):
        composed.wrap(nn.Identity())
    with pytest.raises(ValueError, match=r"^Forgetful\.sync returned None; expected Iterable"):
        list(composed.sync(iter([]), STEP))
    logp, batch = random_batch(0)
    with pytest.raises(ValueError, match=r"^Forgetful\.token_loss returned shape \[\]; expected \["):
        part_loss(Forgetful(result=torch.tensor(1.0)), logp, batch, start(batch, 0.2, 0.2))


def test_every_hook_acts_on_the_loss_or_outside_of_it() -> None:
    hooks = {name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")}
    on_loss, asked = {"correct", "correct_update", "token_loss"}, {"needs", "idle", "check"}
    assert hooks == on_loss | asked | set(OUTSIDE_LOSS) and len(OUTSIDE_LOSS) == len(hooks) - 6
