"""The embedded engine: against the trainer's forward pass, against itself asked differently, and against chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from harness.api import Plan
from harness.engines.embedded import engine as embedded
from harness.engines.embedded import forward
from harness.engines.embedded.engine import EmbeddedEngine
from harness.engines.requests import requests_of
from harness.models.decoder import DecoderConfig, response_hidden
from harness.numerics.casting import cast_model
from harness.numerics.formats import format_named
from harness.numerics.logprobs import selected_logp
from tests.engines.engine_cases import (
    EOS,
    EVEN,
    FP32,
    MOE,
    PAD,
    QWEN2,
    QWEN3,
    UNEVEN,
    decoder,
    loaded,
    sample,
    trainer_logp,
    weights,
)


@pytest.mark.parametrize("std", [0.05, 0.2])
@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("config", [QWEN3, QWEN2, MOE], ids=["qwen3", "qwen2", "moe"])
def test_log_probs_are_the_trainers(config: DecoderConfig, prompts: list[list[int]], std: float) -> None:
    model = decoder(config, std=std)
    out = sample(loaded(model), prompts, num_samples=16, temperature=0.8)
    expected = trainer_logp(model, prompts, out, temperature=0.8)
    assert (expected - out.logp).abs().max() < 1e-5
    assert expected.min() < -1.0
    for row, length, cut in zip(out.token_ids.tolist(), out.lengths.tolist(), out.truncated.tolist(), strict=True):
        assert EOS not in row[: length - 1] and set(row[length:]) <= {PAD}
        assert (row[length - 1] != EOS) == cut and (not cut or length == 12)
    assert out.truncated.any() and not out.truncated.all()
    assert out.token_ids.shape[1] == out.lengths.max()


def test_every_end_id_ends_a_row_and_changes_no_token_before() -> None:
    """Asked with the same seed, rows are those that one end id gives, cut at the first token of either."""
    model, stops = decoder(), (5, 9)
    plain = sample(loaded(model, retire_at=None), UNEVEN, num_samples=16)
    found = sample(loaded(model, retire_at=None, stop_ids=stops), UNEVEN, num_samples=16)
    shorter = 0
    for row, end, cut, other, width in zip(
        found.token_ids.tolist(), found.lengths.tolist(), found.truncated.tolist(), plain.token_ids.tolist(),
        plain.lengths.tolist(), strict=True,
    ):  # fmt: skip
        ends = [place for place, token in enumerate(other[:width]) if token in (EOS, *stops)]
        assert end == (ends[0] + 1 if ends else 12) and cut == (not ends)
        assert row[:end] == other[:end] and set(row[end:]) <= {PAD}
        shorter += end < width
    assert shorter > 10
    retired = sample(loaded(model, stop_ids=stops), UNEVEN, num_samples=16)  # rows that end are dropped on the way
    for row, end in zip(retired.token_ids.tolist(), retired.lengths.tolist(), strict=True):
        assert not {EOS, *stops} & set(row[: end - 1])


def test_greedy_takes_the_trainers_argmax_and_reports_temperature_one() -> None:
    model = decoder()
    out = sample(loaded(model), UNEVEN, num_samples=1, temperature=0.0)
    for prompt, row, length in zip(UNEVEN, out.token_ids.tolist(), out.lengths.tolist(), strict=True):
        ids = list(prompt)
        for token in row[:length]:
            with torch.no_grad():
                assert int(model(torch.tensor([ids]))[0, -1].argmax()) == token
            ids.append(token)
    assert (trainer_logp(model, UNEVEN, out) - out.logp).abs().max() < 1e-5


def test_dropping_ended_rows_changes_nothing() -> None:
    model = decoder(std=0.15)
    options: dict[str, Any] = {"num_samples": 32, "max_new_tokens": 40}
    eager = sample(loaded(model, retire_at=1e-9), UNEVEN, **options)
    never = sample(loaded(model, retire_at=None), UNEVEN, **options)
    default = sample(loaded(model), UNEVEN, **options)
    assert len(set(eager.lengths.tolist())) > 5  # rows end at many different steps
    for out in (never, default):
        assert torch.equal(eager.token_ids, out.token_ids) and torch.equal(eager.lengths, out.lengths)
        torch.testing.assert_close(eager.logp, out.logp, atol=1e-5, rtol=0)


def test_prompts_of_other_lengths_do_not_matter() -> None:
    """Left padding: a row samples the same tokens beside longer and shorter prompts as beside equal ones."""
    engine = loaded(decoder())
    mixed = sample(engine, UNEVEN)
    for i, prompt in enumerate(UNEVEN):
        alike = sample(engine, [prompt] * len(UNEVEN))  # the same rows draw the same noise
        rows = slice(4 * i, 4 * i + 4)
        width = min(mixed.token_ids.shape[1], alike.token_ids.shape[1])
        assert torch.equal(mixed.token_ids[rows, :width], alike.token_ids[rows, :width])
        assert torch.equal(mixed.lengths[rows], alike.lengths[rows])
        torch.testing.assert_close(mixed.logp[rows, :width], alike.logp[rows, :width], atol=1e-5, rtol=0)


def test_greedy_rows_of_a_mixed_batch_equal_runs_of_one_prompt() -> None:
    engine = loaded(decoder())
    mixed = sample(engine, UNEVEN, num_samples=2, temperature=0.0)
    for i, prompt in enumerate(UNEVEN):
        alone = sample(engine, [prompt], num_samples=1, temperature=0.0)
        length = int(alone.lengths[0])
        for row in (2 * i, 2 * i + 1):
            assert mixed.lengths[row] == length
            assert torch.equal(mixed.token_ids[row, :length], alone.token_ids[0, :length])
            torch.testing.assert_close(mixed.logp[row, :length], alone.logp[0, :length], atol=1e-5, rtol=0)


def test_shared_prompts_equal_repeated_ones() -> None:
    engine = loaded(decoder())
    shared = sample(engine, EVEN, num_samples=5)
    repeated = sample(engine, [prompt for prompt in EVEN for _ in range(5)], num_samples=1)
    assert torch.equal(shared.token_ids, repeated.token_ids) and torch.equal(shared.logp, repeated.logp)
    assert len(shared.token_ids[:5].unique(dim=0)) > 1  # samples of one prompt differ


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_prefill_blocks_change_nothing(
    prompts: list[list[int]], num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(decoder())
    whole = sample(engine, prompts * 3, num_samples=num_samples)
    monkeypatch.setitem(embedded.BLOCK_TOKENS, "cpu", 13)  # two or three prompts at a time
    parts = sample(engine, prompts * 3, num_samples=num_samples)
    assert torch.equal(whole.token_ids, parts.token_ids)
    torch.testing.assert_close(whole.logp, parts.logp, atol=1e-5, rtol=0)


def test_a_padded_block_of_one_prompt_is_read_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a prefill may hold one prompt: its rotary tables are those of its own positions."""
    model = decoder()
    whole = sample(loaded(model), UNEVEN[:3], num_samples=2)
    monkeypatch.setitem(embedded.BLOCK_TOKENS, "cpu", 12)  # two prompts of at most 6 tokens, then one
    blocks = sample(loaded(model), UNEVEN[:3], num_samples=2)
    assert torch.equal(blocks.token_ids, whole.token_ids)
    assert (blocks.logp - whole.logp).abs().max() < 1e-5


def test_seeds_and_chunks_make_the_stream() -> None:
    model = decoder()
    first, again = sample(loaded(model), EVEN), sample(loaded(model), EVEN)
    assert torch.equal(first.token_ids, again.token_ids) and torch.equal(first.logp, again.logp)
    assert not torch.equal(first.token_ids[:, :4], sample(loaded(model), EVEN, seed=6).token_ids[:, :4])
    chunked = sample(loaded(model, max_batch=5), EVEN)  # 12 rows in chunks of 5, 5, 2
    assert chunked.token_ids.shape[0] == 12
    assert (trainer_logp(model, EVEN, chunked) - chunked.logp).abs().max() < 1e-5


def in_room(monkeypatch: pytest.MonkeyPatch, room: int) -> list[int]:
    """Let the engine's memory run out at more than `room` rows. Returns the rows of every step that was tried."""
    tried: list[int] = []

    def decode(weights: Any, kv: Any, token: Tensor, *rest: Any) -> Tensor:
        tried.append(len(token))
        if len(token) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward.decode(weights, kv, token, *rest)

    monkeypatch.setattr(embedded, "decode", decode)
    return tried


def test_chunks_are_halved_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with room for three rows gives what chunks of three give, whatever it was asked for."""
    model = decoder()
    expected = sample(loaded(model, max_batch=3), EVEN)
    tried = in_room(monkeypatch, 3)
    found = sample(loaded(model), EVEN)
    assert torch.equal(found.token_ids, expected.token_ids) and torch.equal(found.logp, expected.logp)
    assert tried[:3] == [12, 6, 3] and max(tried[2:]) == 3


def test_chunks_that_are_computed_together_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of five chunks side by side, three chunks at a time or, without memory for three, one by one."""
    model = decoder()
    expected = sample(loaded(model, max_batch=5), EVEN, num_samples=6)  # 24 rows
    for room, at_first in ((15, [15]), (10, [15, 5])):
        tried = in_room(monkeypatch, room)
        engine = loaded(model, max_batch=5)
        engine.rows_at_once = 17
        found = sample(engine, EVEN, num_samples=6)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert (found.logp - expected.logp).abs().max() < 1e-5
        assert tried[: len(at_first)] == at_first and max(tried[1:]) == at_first[-1]


def test_chunks_of_one_row_are_computed_apart_before_memory_is_called_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    expected = sample(loaded(model, max_batch=1), EVEN)
    tried, engine = in_room(monkeypatch, 2), loaded(model, max_batch=1)
    engine.rows_at_once = 5
    found = sample(engine, EVEN)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert tried[:2] == [5, 2] and max(tried[1:]) == 2


def test_memory_for_no_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = decoder()
    monkeypatch.setattr(embedded, "decode", fail)
    with pytest.raises(torch.OutOfMemoryError):
        sample(loaded(model), EVEN)
    exact = Plan(rollout_weights=format_named("fp32"), sampler="trainer")
    monkeypatch.setattr(embedded, "sample_exact", fail)
    engine = loaded(model, exact, trainer_model=model)
    with pytest.raises(torch.OutOfMemoryError):  # never in other chunks than those that the trainer scores
        sample(engine, EVEN)
    engine.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("a GPU's memory was asked for"))
    assert engine._fitting(requests_of(EVEN, 4, 12, 1.0, model.config)) == 12


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_tokens_are_drawn_from_the_reported_distribution(temperature: float) -> None:
    model = decoder(std=0.15)
    count = 6000
    out = sample(loaded(model), [EVEN[0]], num_samples=count, max_new_tokens=1, temperature=temperature)
    with torch.no_grad():
        probability = torch.softmax(model(torch.tensor([EVEN[0]]))[0, -1] / temperature, -1).double()
    torch.testing.assert_close(out.logp[:, 0].exp().double(), probability[out.token_ids[:, 0]], rtol=1e-4, atol=1e-6)
    expected, observed = probability * count, torch.bincount(out.token_ids[:, 0], minlength=24).double()
    is_rare = (expected < 5) | (expected == expected.min())  # chi-square wants its cells filled
    cells = [torch.cat((x[~is_rare], x[is_rare].sum(0, keepdim=True))) for x in (observed, expected)]
    assert (~is_rare).sum() >= 5
    assert chisquare(cells[0].numpy(), cells[1].numpy() * (count / cells[1].sum().item())).pvalue > 1e-3


def test_generation_does_not_touch_the_global_generator() -> None:
    engine = loaded(decoder())
    state = torch.get_rng_state()
    sample(engine, EVEN)
    assert torch.equal(state, torch.get_rng_state())


def test_trainer_sampler_is_exact_bit_for_bit() -> None:
    model = decoder(std=0.15)
    engine = loaded(
        model, Plan(rollout_weights=format_named("fp32"), sampler="trainer"), trainer_model=model, max_batch=8
    )
    for prompts, temperature in ((EVEN, 1.0), (EVEN, 0.7), (UNEVEN, 1.0)):
        out = sample(engine, prompts, num_samples=4, max_new_tokens=9, temperature=temperature)
        assert out.token_ids.shape == (4 * len(prompts), 9)
        rows = [prompt for prompt in prompts for _ in range(4)]
        ids = torch.full((len(rows), max(map(len, rows)) + 9), PAD)
        for i, prompt in enumerate(rows):
            ids[i, : len(prompt) + 9] = torch.cat((torch.tensor(prompt), out.token_ids[i]))
        even = prompts is EVEN
        lens = torch.tensor([len(row) for row in rows])
        logp: list[Tensor] = []
        for part in torch.arange(len(rows)).split(
            8
        ):  # the trainer's micro-batches: the sampler's chunks, with gradient
            logits = model.head(response_hidden(model, ids[part], len(rows[0]) if even else lens[part], 9))
            assert logits.requires_grad
            logp.append(selected_logp(logits.flatten(0, 1), out.token_ids[part].flatten(), temperature)[0].view(-1, 9))
        sampled = torch.arange(9) < out.lengths[:, None]
        assert torch.equal(torch.cat(logp)[sampled], out.logp[sampled])  # exactly 0 difference
        assert out.lengths.float().mean() > 2
    # the cached sampler is close, but not this: the equality above is not trivial
    cached = sample(loaded(model), UNEVEN, num_samples=16)
    assert not torch.equal(trainer_logp(model, UNEVEN, cached), cached.logp)


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_kept_experts_are_those_of_the_trainer_at_every_position(prompts: list[list[int]], num_samples: int) -> None:
    model = decoder(MOE)
    out = sample(loaded(model, keeps_experts=True, max_batch=7), prompts, num_samples=num_samples, max_new_tokens=15)
    assert out.experts is not None and out.experts.dtype == torch.int16
    rows = [prompt for prompt in prompts for _ in range(num_samples)]
    assert out.experts.shape == (len(rows), max(map(len, prompts)) + 15, 3, 2)
    for prompt, response, found in zip(rows, out.responses(), out.experts.long(), strict=True):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            model(ids)
        own = torch.stack([layer.mlp.chosen[0] for layer in model.model.layers], 1)  # [L, layers, k]
        first, last = len(prompt) - 1, ids.shape[1] - 1
        assert torch.equal(found[:last, :-1], own[:last, :-1])
        assert torch.equal(found[first:last, -1], own[first:last, -1])
        assert (found[:first, -1] == -1).all() and (found[last:] == -1).all()
    assert num_samples == 1 or len(set(out.lengths.tolist())) > 1
    assert len(out.experts.unique()) == 6  # every expert, and none
    plain = sample(loaded(model, max_batch=7), prompts, num_samples=num_samples, max_new_tokens=15)
    assert torch.equal(plain.token_ids, out.token_ids) and torch.equal(plain.logp, out.logp) and plain.experts is None
    with pytest.raises(ValueError, match="keeps_experts=true: a dense model has no experts"):
        loaded(decoder(), keeps_experts=True)


def test_trainer_sampler_refuses_a_mixture_of_experts() -> None:
    model = decoder(MOE)
    with pytest.raises(ValueError, match=r"sampler=trainer: a mixture of experts .* choose a dense model"):
        EmbeddedEngine(model.config, replace(FP32, sampler="trainer"), eos_id=EOS, pad_id=PAD, trainer_model=model)


def test_trainer_sampler_refuses_a_quantized_cache() -> None:
    model, plan = decoder(), replace(FP32, sampler="trainer", rollout_kv=format_named("e4m3_kv"))
    with pytest.raises(ValueError, match=r"^rollout_kv: the trainer's own forward \(sampler=trainer\) has no cache$"):
        EmbeddedEngine(model.config, plan, eos_id=EOS, pad_id=PAD, trainer_model=model)


def test_trainer_sampler_refuses_a_stream_that_is_not_the_trainers() -> None:
    model = decoder()
    plan = Plan(rollout_weights=format_named("fp32"), sampler="trainer")
    with pytest.raises(ValueError, match="needs trainer_model"):
        EmbeddedEngine(model.config, plan, eos_id=EOS, pad_id=PAD)
    engine = loaded(model, plan, trainer_model=model)
    passport = engine.realized_plan()
    assert passport.sampler == "trainer" and {record.format for record in passport.weights} == {"fp32"}
    assert passport.acts["model.layers.2.mlp.up_proj.weight"] == "fp32" and len(passport.acts) == 7 * 3
    cast = cast_model(decoder(), format_named("fp16"))
    half = loaded(cast, replace(plan, rollout_weights=format_named("fp16")), trainer_model=cast).realized_plan()
    assert set(half.acts.values()) == {"fp16"} and half.acts.keys() == passport.acts.keys()
    noisy = ((name, tensor + 1e-6 if "norm" in name else tensor) for name, tensor in weights(model))
    with pytest.raises(ValueError, match="the stream changes"):
        engine.load_weights(noisy)


def test_bad_requests_are_named() -> None:
    engine = loaded(decoder())
    for change, words in (
        ({"num_samples": 0}, "num_samples=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"max_new_tokens": 125}, "max_positions=128"),
    ):
        with pytest.raises(ValueError, match=words):
            sample(engine, EVEN, **change)
    for prompts, words in (
        ([], r"^prompts: none given$"),
        ([[3], []], "number 1 is empty"),
        ([[24]], "token 24 is outside the vocabulary of 24; ask the task that the model was trained on, "),
    ):
        with pytest.raises(ValueError, match=words):
            sample(engine, prompts)


def test_sleep_frees_the_cache_discard_and_close_the_weights() -> None:
    model = decoder()
    with pytest.raises(RuntimeError, match="no weights"):
        sample(EmbeddedEngine(QWEN3, FP32, eos_id=EOS, pad_id=PAD), EVEN)
    engine = loaded(model)
    before = sample(engine, EVEN)
    assert engine.cache.num_bytes() > 0
    engine.sleep()
    assert engine.cache.num_bytes() == 0
    with pytest.raises(RuntimeError, match="asleep"):
        sample(engine, EVEN)
    engine.wake()
    assert torch.equal(sample(engine, EVEN).token_ids, before.token_ids)
    engine.discard()
    assert {tensor.device.type for tensor in engine.weights.stacks.values()} == {"meta"}
    engine.wake()
    assert {tensor.device.type for tensor in engine.weights.stacks.values()} == {"meta"}  # they come with the next push
    with pytest.raises(RuntimeError, match="no weights"):
        sample(engine, EVEN)
    engine.load_weights(model.named_parameters())
    assert torch.equal(sample(engine, EVEN).token_ids, before.token_ids)
    engine.close()
    with pytest.raises(RuntimeError):
        sample(engine, EVEN)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8_channel"])
@pytest.mark.parametrize("config", [QWEN3, QWEN2, MOE], ids=["qwen3", "qwen2", "moe"])
def test_an_engine_of_evaluations_has_the_same_weights_and_keeps_no_codes(
    config: DecoderConfig, precision: str
) -> None:
    model, plan = decoder(config), Plan(rollout_weights=format_named(precision))
    engine = EmbeddedEngine(config, plan, eos_id=EOS, pad_id=PAD, for_evaluation=True)
    assert {tensor.device.type for tensor in engine.weights.stacks.values()} == {"meta"}
    engine.load_weights(model.named_parameters())
    usual = loaded(model, plan)
    for name, stack in usual.weights.stacks.items():
        assert torch.equal(engine.weights.stacks[name], stack), name
    assert torch.equal(sample(engine, EVEN).logp, sample(usual, EVEN).logp)
    assert usual.weights.loaded and not engine.weights.loaded
    with pytest.raises(RuntimeError, match="no codes"):
        engine.realized_plan()
