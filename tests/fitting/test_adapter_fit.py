"""Fitting adapters: the student is the engine's arithmetic, the objective the written one, the best is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.api import Plan, Rollout
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.embedded.weights import FUSED
from harness.fitting.adapter_fit import (
    Recipe,
    Texts,
    aligned_output,
    fit,
    held_out,
    objective,
    site_texts,
    targets,
    texts_of,
    validate,
)
from harness.fitting.adapter_start import gaussian_start, local_start, modules_of, shifted_values
from harness.fitting.low_bit_decoder import LORA_B, adapters_of, input_grams, low_bit_student, low_bit_weights
from harness.foundation.seeds import generator
from harness.models.adapters import freeze_base
from harness.models.decoder import Decoder, DecoderConfig
from harness.numerics.formats import Adapters, format_named
from harness.numerics.low_rank import cloq, svd_residual
from harness.numerics.quantize import dequantize, quantize
from tests.source_tree import ROOT
from tests.toy import site_of

SHAPE = DecoderConfig(
    vocab_size=32, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
INT2 = Plan(rollout_weights=format_named("int2_g16_asym"))
SCALE = 0.25


def decoder(std: float = 0.15, **shape: object) -> Decoder:
    """A tiny random model whose layers matter."""
    return Decoder(replace(SHAPE, **shape), generator("cpu", "adapter fit"), init_std=std)  # type: ignore[arg-type]


def weights_of(model: Decoder) -> dict[str, Tensor]:
    """Its checkpoint tensors."""
    return dict(model.named_parameters())


def zero_adapters(model: Decoder, rank: int = 8) -> dict[str, Tensor]:
    """RILQ's start."""
    weights = weights_of(model)
    modules = modules_of(weights, Adapters.targets)
    return gaussian_start(weights, modules, rank, lambda name: generator("cpu", "start", name))


def student_of(model: Decoder, plan: Plan = INT2, adapters: dict[str, Tensor] | None = None) -> Decoder:
    """The quantized twin."""
    values = low_bit_weights(weights_of(model), plan, {})
    held = zero_adapters(model) if adapters is None else adapters
    student = low_bit_student(model, values, held, scale=SCALE, acts=plan.rollout_acts)
    assert isinstance(student, Decoder)
    return student


def some_texts(rows: int = 10, length: int = 12) -> Texts:
    """Random sequences with prompts of 3 and uneven responses; every other row is text."""
    rng = generator("cpu", "texts")
    lengths = torch.randint(2, length - 2, (rows,), generator=rng)
    ids = torch.randint(2, 32, (rows, length), generator=rng)
    return texts_of(ids, torch.full((rows,), 3), lengths, torch.arange(rows) % 2 == 0, "response")


@pytest.mark.parametrize(
    "name", ["int2_g16_asym", "int3_g32", "int4_g32", "nvfp4", "nf4", "mxfp4", "int8_channel", "bf16"]
)
def test_student_weights_are_the_engines_bit_for_bit(name: str) -> None:
    model = decoder()
    plan = Plan(rollout_weights=format_named(name), exceptions=(("model.layers.0.*.k_proj.weight", None),))
    values = low_bit_weights(weights_of(model), plan, {})
    engine = EmbeddedEngine(SHAPE, plan, eos_id=1, pad_id=0)
    engine.load_weights((n, p.detach()) for n, p in model.named_parameters())
    for i in range(SHAPE.num_layers):
        for fused, parts in FUSED.items():
            kind = "self_attn" if fused in ("qkv", "out") else "mlp"
            own = torch.cat([values[f"model.layers.{i}.{kind}.{part}.weight"] for part in parts])
            assert torch.equal(own, engine.weights.stacks[fused][i])
    assert torch.equal(values["model.embed_tokens.weight"], engine.weights.stacks["embed"])


def test_student_weights_are_the_frozen_bases_and_take_given_scales() -> None:
    for name in ("int3_g32", "nvfp4"):
        fmt, model = format_named(name), decoder()
        values = low_bit_weights(weights_of(model), Plan(rollout_weights=fmt), {})
        frozen = dict(freeze_base(decoder(), Plan(train_weights=fmt)).named_parameters())
        assert all(torch.equal(frozen[n], v) for n, v in values.items() if "_proj" in n)
    fmt, name = format_named("int4_g32"), "model.layers.0.mlp.up_proj.weight"
    w = weights_of(decoder())[name].detach().bfloat16()
    scale = quantize(w, fmt).scale
    assert scale is not None
    values = low_bit_weights(weights_of(decoder()), Plan(rollout_weights=fmt), {f"{name}_scale": 1.5 * scale})
    assert torch.equal(values[name], dequantize(quantize(w, fmt, scale=1.5 * scale)))


def test_zero_adapters_change_nothing_and_activations_are_quantized() -> None:
    model, ids = decoder(), some_texts().ids
    plain = decoder()
    plain.load_state_dict(low_bit_weights(weights_of(model), INT2, {}), strict=False)
    with torch.no_grad():
        assert torch.equal(student_of(model).hidden(ids), plain.hidden(ids))
        acted = student_of(model, replace(INT2, rollout_acts=format_named("int8_token"))).hidden(ids)
    assert 1e-4 < (acted - plain.hidden(ids)).abs().mean() < 0.5


def test_head_of_its_own_format_is_untied() -> None:
    model = decoder()
    head, embed = model.get_parameter("lm_head.weight"), "model.embed_tokens.weight"
    apart, tied = student_of(model, replace(INT2, lm_head=format_named("fp32"))), student_of(model)
    assert torch.equal(apart.get_parameter("lm_head.weight"), head)
    assert torch.equal(apart.get_parameter(embed), head.bfloat16().float()) and not torch.equal(
        apart.get_parameter(embed), head
    )
    assert tied.get_parameter("lm_head.weight") is tied.get_parameter(embed)
    excepted = student_of(model, replace(INT2, exceptions=(("lm_head.*", format_named("fp32")),)))
    assert torch.equal(excepted.get_parameter("lm_head.weight"), head)


def test_masks_of_prompts_and_responses() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    args = (ids, torch.tensor([2, 3]), torch.tensor([3, 0]), torch.tensor([False, True]))
    texts = texts_of(*args, "response")
    assert texts.aligned.tolist() == [[False, True, True, True, False, False], [False] * 6]
    assert not texts.labelled.any()
    assert texts_of(*args, "all").aligned.tolist()[0] == [True] * 4 + [False] * 2
    assert texts.used().tolist()[0] == [True] * 4 + [False] * 2 and not texts.used()[1].any()


@pytest.mark.parametrize("align", ["hidden_postnorm", "hidden_prenorm", "logit", "kl"])
def test_objective_is_the_masked_mean_and_padding_counts_nothing(align: str) -> None:
    model, texts = decoder(), some_texts()
    student, recipe = student_of(model), Recipe(align=align, a=0.5, g=0.25)  # type: ignore[arg-type]
    wanted = targets(model, texts.ids, recipe.align)
    h = student.hidden(texts.ids)
    logits, teacher = student.head(h), model.head(model.hidden(texts.ids))
    if align == "kl":
        p, log_q = teacher.softmax(-1), logits.log_softmax(-1)
        distances = (p * (p.log() - log_q)).sum(-1)
    elif align == "logit":
        distances = (logits - teacher).square().mean(-1)
    elif align == "hidden_postnorm":
        distances = (h - model.hidden(texts.ids)).square().mean(-1)
    else:
        gain = model.model.norm.weight.bfloat16().float()
        post = torch.nn.functional.normalize(aligned_output(student, texts.ids, "hidden_prenorm")[0], dim=-1) * 8 * gain
        torch.testing.assert_close(post, h, rtol=1e-3, atol=1e-4)
        distances = (aligned_output(student, texts.ids, "hidden_prenorm")[0] - wanted).square().mean(-1)
    here = texts.labelled[:, :-1]
    ce = F.cross_entropy(logits[:, :-1][here], texts.ids[:, 1:][here])
    expected = (0.5 * distances[texts.aligned].mean() + 0.25 * ce).detach()
    torch.testing.assert_close(objective(student, texts, wanted, recipe).detach(), expected)
    assert validate(student, texts, wanted, recipe, rows_per_pass=3) == pytest.approx(float(expected), rel=1e-5)
    spoilt = torch.where(texts.aligned[:, :, None], wanted, torch.nan)
    ids = torch.where(texts.used() | torch.roll(texts.used(), 1, 1), texts.ids, 31)
    torch.testing.assert_close(objective(student, replace(texts, ids=ids), spoilt, recipe).detach(), expected)


def test_accumulation_changes_nothing_and_only_adapters_move() -> None:
    model, texts = decoder(), some_texts(12)
    recipe = Recipe(updates=3, validate_every=1, lr=1e-3, g=0.0)
    students = [student_of(model), student_of(model)]
    frozen = {n: b.clone() for n, b in students[0].state_dict().items() if "lora" not in n}
    wanted = targets(model, texts.ids, "hidden_postnorm")
    logs = [fit(s, wanted, texts, replace(recipe, rows_per_pass=n)).log for s, n in zip(students, (8, 3), strict=True)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-4) and len(logs[0]) == 4
    assert logs[0][-1] < logs[0][0]
    after = students[0].state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
    assert all(not p.requires_grad for n, p in students[0].named_parameters() if "lora" not in n)


def test_nothing_to_undo_moves_nothing() -> None:
    """Without quantization the model loss and its gradient are 0; with the text term the adapter does move."""
    model, texts = decoder(), some_texts()
    plan = Plan(rollout_weights=format_named("fp32"))
    wanted = targets(model, texts.ids, "hidden_postnorm")
    for g, should_move in ((0.0, False), (0.5, True)):
        student = student_of(model, plan)
        went = fit(student, wanted, texts, Recipe(g=g, updates=4, validate_every=2, lr=1e-3))
        moved = [t for name, t in adapters_of(student).items() if name.endswith(LORA_B) and t.any()]
        assert bool(moved) == should_move
        assert g or went.log == (0.0, 0.0, 0.0)


def test_one_sequence_is_overfitted() -> None:
    model = decoder(num_layers=2)
    texts = some_texts(2)
    texts = texts.take(torch.tensor([0, 0]))
    student = student_of(model, adapters=zero_adapters(model, rank=16))
    wanted = targets(model, texts.ids, "hidden_postnorm")
    went = fit(student, wanted, texts, Recipe(g=0.0, a=1.0, lr=1e-2, updates=150, patience=99, batch_size=1))
    assert went.log[0] > 0.1 and went.best < 0.01 * went.log[0]


def test_best_validation_is_kept_and_patience_ends() -> None:
    model, texts = decoder(), some_texts(20)
    recipe = Recipe(g=0.0, lr=0.05, updates=60, validate_every=2, patience=3)
    student = student_of(model)
    wanted = targets(model, texts.ids, "hidden_postnorm")
    went = fit(student, wanted, texts, recipe)
    unseen = torch.arange(len(texts.ids) - held_out(len(texts.ids)), len(texts.ids))
    final = validate(student, texts.take(unseen), wanted[unseen], recipe)
    assert final == went.best == min(went.log)
    assert went.updates < recipe.updates and went.log[-3:] == tuple(x for x in went.log[-3:] if x >= went.best)
    with pytest.raises(ValueError, match="adapter fit: 1 sequences"):
        fit(student, wanted, texts.take(torch.tensor([0])), recipe)


def test_local_starts_are_the_matrix_rules_with_the_scale_in_them() -> None:
    model, texts = decoder(), some_texts()
    weights = weights_of(model)
    modules = modules_of(weights, Adapters.targets)
    grams = input_grams(model, modules, texts.ids, texts.used(), rows=4)
    whole = input_grams(model, modules, texts.ids, texts.used())
    assert all(torch.allclose(grams[m], whole[m], rtol=1e-4, atol=1e-4) for m in modules)
    module, fmt = "model.layers.1.mlp.down_proj", INT2.rollout_weights
    assert fmt is not None
    w, w_hat = weights[f"{module}.weight"], low_bit_weights(weights, INT2, {})[f"{module}.weight"]

    def product(found: dict[str, Tensor]) -> Tensor:
        return SCALE * found[f"{module}.lora_B.weight"] @ found[f"{module}.lora_A.weight"]

    svd = local_start("svd", weights, modules, INT2, {}, 4, SCALE)
    a, b = svd_residual(w, w_hat, 4)
    torch.testing.assert_close(product(svd), b @ a)
    a, b = cloq(w, w_hat, grams[module], 4)
    torch.testing.assert_close(product(local_start("cloq", weights, modules, INT2, {}, 4, SCALE, 1, grams)), b @ a)
    once = local_start("loftq", weights, modules, INT2, {}, 4, SCALE, 1)
    assert once.keys() == svd.keys() and torch.equal(product(once), product(svd))
    found = local_start("loftq", weights, modules, INT2, {}, 4, SCALE, 3)
    source = w
    for _ in range(3):
        last, (a, b) = source, svd_residual(w, dequantize(quantize(source.bfloat16(), fmt)), 4)
        source = w - b @ a
    torch.testing.assert_close(product(found), b @ a, rtol=1e-3, atol=1e-4)
    shift = found[f"{module}.shift_B.weight"] @ found[f"{module}.shift_A.weight"]
    torch.testing.assert_close(w - shift, last, rtol=1e-3, atol=1e-5)


def test_an_expert_that_padding_alone_reaches_gets_no_gram_and_starts_by_svd() -> None:
    model, ids = decoder(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), some_texts().ids
    weights = weights_of(model)
    modules = modules_of(weights, ("down_proj",))
    with torch.no_grad():
        model(ids)
    chosen = model.model.layers[0].mlp.chosen
    used = ~(chosen == 1).any(-1).view(ids.shape)
    assert used.any() and not used.all()
    grams = input_grams(model, modules, ids, used)
    lost, kept = (f"model.layers.0.mlp.experts.{number}.down_proj" for number in (1, 2))
    assert lost not in grams and kept in grams
    found = local_start("cloq", weights, modules, INT2, {}, 4, SCALE, 1, grams)
    svd = local_start("svd", weights, modules, INT2, {}, 4, SCALE)
    assert torch.equal(found[f"{lost}.lora_A.weight"], svd[f"{lost}.lora_A.weight"])
    assert not torch.allclose(found[f"{kept}.lora_A.weight"], svd[f"{kept}.lora_A.weight"])


@pytest.mark.parametrize("case", ["square", "tall"])
@pytest.mark.parametrize("steps", [1, 3])
def test_loftq_equals_peft(case: str, steps: int) -> None:
    keys = ("w", *(f"{steps}/{key}" for key in ("w_hat", "a", "b")))
    with np.load(ROOT / "tests" / "oracles" / "peft.npz", allow_pickle=False) as npz:
        w, w_hat, a, b = (torch.from_numpy(npz[f"{case}/{key}"]) for key in keys)
    plan = Plan(rollout_weights=format_named("fp32"), exceptions=(("m.weight", format_named("nf4")),))
    found = local_start("loftq", {"m.weight": w}, ["m"], plan, {}, len(a), 1.0, steps)
    own_hat = shifted_values({"m.weight": w}, found, plan, {})["m.weight"]
    own_a, own_b = found["m.lora_A.weight"], found["m.lora_B.weight"]
    if steps == 1:
        assert torch.equal(own_hat, w_hat)
    # From the second step on, a weight within the SVD's error of a tie may fall to the other side.
    assert (~own_hat.isclose(w_hat, rtol=1e-4)).float().mean() <= 1e-3
    assert (own_b @ own_a - b @ a).norm() < 1e-3 * (b @ a).norm()
    # Signs of singular vectors are anyone's choice; sizes are not.
    assert torch.allclose(own_a.norm(dim=1), a.norm(dim=1), rtol=1e-3)


def test_calibration_texts_take_turns() -> None:
    def sample(model: object, prompts: list[tuple[int, ...]], seed: int) -> Rollout:
        ids = torch.tensor([[20 + i % 3, 1, 0] for i in range(len(prompts))])
        lengths = torch.full((len(prompts),), 2)
        return Rollout(token_ids=ids, logp=torch.zeros(ids.shape), lengths=lengths, truncated=lengths > 2)

    demos = [((5, 6, 7), (8, 9, 1)), ((5, 6), (9, 1))]
    site = site_of(decoder(), calibration=((3, 4),), demonstrations=lambda count: demos[:count], sample=sample)
    texts = site_texts(site, 5, 0.4, "response", 0)
    assert texts.ids.tolist() == [
        [5, 6, 7, 8, 9, 1], [3, 4, 20, 1, 0, 0], [5, 6, 9, 1, 0, 0], [3, 4, 21, 1, 0, 0], [3, 4, 22, 1, 0, 0],
    ]  # fmt: skip
    assert texts.labelled.any(1).tolist() == [True, False, True, False, False]
    assert texts.aligned.sum(1).tolist() == [3, 2, 2, 2, 2]
    with pytest.raises(ValueError, match="neither enough demonstrations nor prompts"):
        site_texts(site_of(decoder()), 5, 0.0, "all", 0)
