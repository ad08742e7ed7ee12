"""The passport's measurements on made-up layers: what is right passes, what is silently not in force is found."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.api import KVProtocol, TensorRecord
from harness.engines.vllm import kv, passport
from harness.engines.vllm.shards import Shard
from harness.models.decoder import DecoderConfig, tensor_shapes
from harness.numerics.formats import format_named
from harness.numerics.kv_scales import INFERENCE_DIVISOR, MARGIN
from harness.numerics.quantize import dequantize, fake_quantize, quantize

BF16 = torch.bfloat16
Rounding = Callable[[Tensor], Tensor]


class FakeLinear(nn.Module):
    """A stand-in for vLLM's linear layers; multiplies `weight` [N, K] with what `enters` makes of x."""

    def __init__(self, weight: Tensor, enters: Rounding) -> None:
        super().__init__()
        self.held, self.enters, self.input_size = weight, enters, weight.shape[1]
        self.quant_method = SimpleNamespace(apply=self.multiply)
        self.scheme = SimpleNamespace(kernel=SimpleNamespace())

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        assert layer is self and bias is None
        return (self.enters(x).float() @ self.held.T).to(x.dtype)


def model_of(layers: dict[str, FakeLinear]) -> nn.Module:
    """A module tree in which each layer stands under its dotted name."""
    root = nn.Module()
    for name, layer in layers.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, layer)
    return root


def block(
    weights: str, enters: Rounding, *, spoil: Rounding = lambda w: w, width: int = 128
) -> tuple[nn.Module, dict[str, passport.Sent]]:
    """A fused and a plain linear that hold what was sent, `spoil` applied to the live side."""
    fmt, draws = format_named(weights), torch.Generator().manual_seed(5)
    sent: dict[str, passport.Sent] = {}
    layers: dict[str, FakeLinear] = {}
    for whole, parts in (("self_attn.qkv_proj", "qkv"), ("self_attn.o_proj", "o")):
        rows: list[Tensor] = []
        for part in parts:
            q = quantize(torch.randn(128, width, generator=draws).to(BF16), fmt)
            sent[f"layers.0.self_attn.{part}_proj.weight"] = passport.sent_of(q, BF16)
            rows.append(dequantize(q))
        layers[f"layers.0.{whole}"] = FakeLinear(spoil(torch.cat(rows)), enters)
    return model_of(layers), sent


def entering(
    model: nn.Module, sent: dict[str, passport.Sent], dtype: torch.dtype = BF16, planned: str | None = None
) -> dict[str, str]:
    return passport.input_formats(model, sent, dtype, torch.device("cpu"), planned)


def rounded(name: str) -> Rounding:
    return lambda x: fake_quantize(x, format_named(name))


def as_it_is(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("weights", ["e4m3_channel", "int8_channel", "nvfp4", "e4m3_block", "e4m3_tensor"])
def test_a_right_layer_passes(weights: str) -> None:
    model, sent = block(weights, as_it_is)
    records = passport.weight_records(model, sent, BF16)
    assert [r.name for r in records] == [f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    assert {(r.format, r.kernel) for r in records} == {(weights, "SimpleNamespace")}
    assert len({r.hash for r in records}) == 4
    assert records[0].scale_shape == {"e4m3_channel": (128, 1), "int8_channel": (128, 1), "nvfp4": (128, 8),
                                      "e4m3_block": (1, 1), "e4m3_tensor": ()}[weights]  # fmt: skip


@pytest.mark.parametrize("weights", ["int4_g32", "int4_g32_qat", "int8_g64"])
def test_group_scales_are_compared_as_the_engine_holds_them(weights: str) -> None:
    fmt = format_named(weights)
    master = torch.randn(128, 128, generator=torch.Generator().manual_seed(5)).to(BF16)
    q = quantize(master, fmt)
    sent = {"o_proj.weight": passport.sent_of(q, BF16)}
    narrow = quantize(master, fmt, scale=None if q.scale is None else q.scale.to(BF16).float())
    assert q.scale is not None and not torch.equal(q.scale, q.scale.to(BF16).float())
    held = q.codes.float().view(128, -1, fmt.tile[1] if fmt.tile else 1) * q.scale.to(BF16).float()[:, :, None]
    passport.weight_records(model_of({"o_proj": FakeLinear(held.view(128, 128), as_it_is)}), sent, BF16)
    assert narrow.codes.shape == q.codes.shape


@pytest.mark.parametrize(("weights", "again"), [("e4m3_channel", "e4m3_tensor"), ("int8_channel", "int4_g32"),
                                                ("e4m3_block", "e4m3_channel"), ("nvfp4", "int4_g32")])  # fmt: skip
def test_weights_that_were_quantized_twice_are_found(weights: str, again: str) -> None:
    model, sent = block(weights, as_it_is, spoil=rounded(again))
    with pytest.raises(RuntimeError, match=rf"^layers.0.self_attn.q_proj.weight is not the {weights} tensor"):
        passport.weight_records(model, sent, BF16)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.roll(1, 0),  # rows of another part
        lambda w: w.roll(1, 1),  # columns
        lambda w: w * 1.01,  # a wrong scale
        lambda w: torch.where(torch.arange(128) == 7, 0.0, w),  # one channel lost
        lambda w: torch.full_like(w, float("nan")),
    ],
    ids=["rows", "columns", "scale", "channel", "nan"],
)
def test_other_damage_to_weights_is_found(spoil: Rounding) -> None:
    model, sent = block("e4m3_channel", rounded("e4m3_token"), spoil=spoil)
    with pytest.raises(RuntimeError, match="is not the e4m3_channel tensor that was loaded"):
        passport.weight_records(model, sent, BF16)


@pytest.mark.parametrize("name", passport.ACTS_TRIED)
@pytest.mark.parametrize("weights", ["e4m3_channel", "int8_channel", "nvfp4"])
def test_every_input_format_is_recognized(weights: str, name: str) -> None:
    model, sent = block(weights, rounded(name), width=256)
    assert set(entering(model, sent, planned=name).values()) == {name}
    # Powers of two as scales move no mantissa: what is in reach of both is rounded alike.
    alike = {"e4m3_1x128_ue8m0", "mxfp8"}
    for planned in (None, "bf16", *passport.ACTS_TRIED):
        found = set(entering(model, sent, planned=planned).values())
        assert found == {name} or (name in alike and found <= alike)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_answer_that_is_not_finite_is_no_evidence_of_the_planned_format(value: float) -> None:
    model, sent = block("e4m3_channel", lambda x: torch.full_like(x, value))
    with pytest.raises(RuntimeError) as error:
        entering(model, sent, planned="e4m3_token")
    name = "layers.0.self_attn.q_proj.weight"
    assert str(error.value) == f"inputs of {name}: its kernel answers a finite input with NaN or infinity"


def test_of_formats_that_round_alike_the_planned_one_is_named() -> None:
    model, sent = block("e4m3_channel", rounded("e4m3_token"), width=128)  # one group is the whole row
    assert set(entering(model, sent, planned="e4m3_1x128").values()) == {"e4m3_1x128"}
    assert set(entering(model, sent, planned="e4m3_token").values()) == {"e4m3_token"}
    assert set(entering(model, sent, planned="int8_token").values()) == {"e4m3_token"}


@pytest.mark.parametrize("weights", ["e4m3_channel", "int8_channel", "int4_g32"])
@pytest.mark.parametrize(("dtype", "name"), [(BF16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")])
def test_inputs_that_are_left_alone_are_found(weights: str, dtype: torch.dtype, name: str) -> None:
    model, sent = block(weights, as_it_is)
    for planned in (None, "e4m3_token", "int8_token"):
        found = entering(model, sent, dtype, planned)
        assert found == {f"layers.0.self_attn.{part}_proj.weight": name for part in "qkvo"}


def test_inputs_of_unquantized_linears_are_the_base_dtype() -> None:
    model, _ = block("bf16", as_it_is)
    assert set(entering(model, {}).values()) == {"bf16"}


@pytest.mark.parametrize("name", ["bf16", *(n for n in passport.ACTS_TRIED if n not in ("mxfp8", "e4m3_tensor"))])
@pytest.mark.parametrize("width", [1152, 4864, 18944])
def test_inputs_of_wide_layers_are_told_apart(width: int, name: str) -> None:
    """18944: the MLP of a 7B Qwen2.5, where columns one by one would be alone in their groups of 128."""
    model, sent = block("e4m3_channel", rounded(name), width=width)
    assert {len(told.columns) for told in sent.values()} == {64}
    for planned in ("bf16", "e4m3_1x128", "e4m3_token"):
        assert set(entering(model, sent, planned=planned).values()) == {name}


@pytest.mark.parametrize("name", ["e4m3_token", "int8_token", "e4m3_1x128"])
def test_wide_layers_are_asked_at_some_columns(name: str) -> None:
    columns = passport.columns_of(4096, torch.device("cpu"))
    assert (len(columns), int(columns[0]), int(columns[-1]), len(set(columns.tolist()))) == (64, 0, 4095, 64)
    assert torch.equal(passport.columns_of(1024, torch.device("cpu")), torch.arange(1024))
    model, sent = block("e4m3_channel", rounded(name), width=2048)
    assert len(passport.weight_records(model, sent, BF16)) == 4
    assert set(entering(model, sent).values()) == {name}
    spoiled, _ = block("e4m3_channel", rounded(name), spoil=rounded("e4m3_tensor"), width=2048)
    with pytest.raises(RuntimeError, match="is not the e4m3_channel tensor"):
        passport.weight_records(spoiled, sent, BF16)


def line(name: str, x: Tensor, kernel: str = "") -> TensorRecord:
    return passport.plain_records([(name, x)], {name: kernel})[0]


def test_plain_tensors_are_hashed_whole_or_by_an_even_sample() -> None:
    x = torch.arange(6, dtype=BF16)
    record = line("model.norm.weight", x, "Kernel")
    assert (record.format, record.dtype, record.scale_shape, record.kernel) == ("bf16", "bfloat16", None, "Kernel")
    assert record.hash == line("other", x.clone()).hash
    assert record.hash != line("other", x.flip(0)).hash
    large = torch.zeros(4 * passport.SAMPLE)
    before = line("x", large).hash
    large[1::4] = 1.0  # between the samples
    assert line("x", large).hash == before
    large[0] = 1.0
    assert line("x", large).hash != before


def test_a_gathered_tensor_does_not_outlive_its_line() -> None:
    """Whole tensors of a shared engine are made for their hashes alone: at most one more is there when one is made."""
    made = list[weakref.ref[torch.UntypedStorage]]()

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name in "abcd":
            assert sum(ref() is not None for ref in made) <= 1  # `held`'s loop variable has the last one
            x = torch.ones(3 * passport.SAMPLE, dtype=torch.uint8)
            made.append(weakref.ref(x.untyped_storage()))
            yield name, x

    assert len({record.hash for record in passport.plain_records(gathered(), {})}) == 1
    assert len(made) == 4 and not any(ref() is not None for ref in made)


class FakeAttention(nn.Module):
    """vLLM's attention as `kv` sees it."""

    def __init__(self, has_host: bool, kind: str = "fp8_e4m3", width: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.kv_cache_dtype, self.kv_cache = kind, [torch.zeros(2, dtype=width)]
        for role in kv.ROLES:
            setattr(self, f"_{role}_scale", torch.ones(1))
            setattr(self, f"_{role}_scale_float", 1.0)
            if has_host:
                setattr(self, f"_{role}_scale_cpu", torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q


def attention_model(**options: Any) -> nn.Module:
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Module(), nn.Module()])
    for layer in root.layers:
        layer.attn = FakeAttention(**options)
    return root


@pytest.mark.parametrize("has_host", [True, False])
def test_scales_are_written_to_every_copy(has_host: bool) -> None:
    model = attention_model(has_host=has_host)
    modules = kv.attentions(model)
    assert sorted(modules) == [0, 1]
    kv.set_scales(modules[1], {"k": 0.1, "v": 0.25})
    assert kv.all_scales(model)[1] == pytest.approx({"q": 1.0, "k": 0.1, "v": 0.25})
    assert kv.all_scales(model)[0] == {"q": 1.0, "k": 1.0, "v": 1.0}
    if has_host:
        assert float(modules[1]._k_scale_cpu) == pytest.approx(0.1)
    modules[1]._v_scale.fill_(0.5)
    with pytest.raises(RuntimeError, match=r"^layer 1: v_scale is 0.5 on the device, 0.25 on the host$"):
        kv.all_scales(model)


def test_a_stale_host_copy_is_found() -> None:
    model = attention_model(has_host=True)
    module = kv.attentions(model)[0]
    kv.set_scales(module, {"k": 0.5})
    module._k_scale_cpu.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"^layer 0: k_scale is 0.5 on the device, 1.0 on the host$"):
        kv.all_scales(model)


@pytest.mark.parametrize("protocol", ["trainer", "inference"])
def test_an_attention_takes_its_scales_before_it_stores(protocol: KVProtocol) -> None:
    model, fmt = attention_model(has_host=True), format_named("e4m3_kv")
    first, second = kv.attentions(model).values()
    stored: list[float] = []
    first.register_forward_hook(lambda module, inputs, output: stored.append(float(module._k_scale)))
    tops = INFERENCE_DIVISOR if protocol == "inference" else dict.fromkeys(kv.ROLES, 448 / MARGIN)
    with kv.calibrated(model, fmt, protocol, has_queries=True):
        for factor in (1.0, -3.0, 2.0):
            first(torch.tensor([0.5]), torch.tensor([factor]), torch.tensor([10 * factor]))
    first(torch.ones(1), torch.full((1,), 99.0), torch.ones(1))
    assert stored == pytest.approx([1 / tops["k"], 3 / tops["k"], 3 / tops["k"], 3 / tops["k"]])
    assert kv.all_scales(model)[0] == pytest.approx({"q": 0.5 / tops["q"], "k": 3 / tops["k"], "v": 30 / tops["v"]})
    assert kv.all_scales(model)[1] == {"q": 1.0, "k": 1.0, "v": 1.0}
    with kv.calibrated(model, fmt, protocol, has_queries=False):
        second(torch.ones(1), torch.ones(1), torch.ones(1))
    assert kv.all_scales(model)[1]["q"] == 1.0


def test_a_caches_format_is_what_its_memory_holds() -> None:
    names = {"e4m3_kv": "fp8_e4m3"}
    assert kv.cache_format(attention_model(has_host=False), names) == "e4m3_kv"
    assert kv.cache_format(attention_model(has_host=False, kind="auto", width=BF16), names) is None
    with pytest.raises(RuntimeError, match=r"kv_cache_dtype=fp8_e4m3, but the cache holds elements of \[2\] bytes"):
        kv.cache_format(attention_model(has_host=False, width=BF16), names)
    mixed = attention_model(has_host=False)
    mixed.layers[1].attn.kv_cache_dtype = "auto"  # pyright: ignore
    with pytest.raises(RuntimeError, match="kv_cache_dtype differs between layers: auto, fp8_e4m3"):
        kv.cache_format(mixed, names)
    silent = attention_model(has_host=False, kind="int8_per_token_head", width=torch.int8)
    with pytest.raises(RuntimeError, match="kv_cache_dtype=int8_per_token_head"):
        kv.cache_format(silent, names)


def shared(weights: str, enters: Rounding) -> tuple[dict[str, passport.Sent], list[nn.Module], DecoderConfig]:
    """Tensors that were sent of a block's attention, and the live layers of each of two ranks that share it."""
    config = DecoderConfig(
        vocab_size=64, num_layers=1, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=512
    )
    fmt, draws = format_named(weights), torch.Generator().manual_seed(7)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    sent: dict[str, passport.Sent] = {}
    values: dict[str, Tensor] = {}
    for name in names:
        q = quantize(torch.randn(tensor_shapes(config)[name], generator=draws).to(BF16), fmt)
        sent[name], values[name] = passport.sent_of(q, BF16), dequantize(q)
    models: list[nn.Module] = []
    for rank in range(2):
        shard = Shard(config=config, rank=rank, size=2)
        cuts = [shard.cut(name, values[name]) for name in names]
        layers = {"model.layers.0.self_attn.qkv_proj": FakeLinear(torch.cat(cuts[:3]), enters),
                  "model.layers.0.self_attn.o_proj": FakeLinear(cuts[3], enters)}  # fmt: skip
        models.append(model_of(layers))
    return sent, models, config


@pytest.mark.parametrize("weights", ["e4m3_channel", "int8_channel", "e4m3_block", "e4m3_tensor"])
def test_ranks_that_share_a_layer_have_the_passport_of_one(weights: str) -> None:
    sent, models, config = shared(weights, rounded("e4m3_token"))
    alone = {name: one.hash for name, one in ((r.name, r) for r in passport.weight_records(*whole_of(sent), BF16))}
    for rank, model in enumerate(models):
        shard = Shard(config=config, rank=rank, size=2)
        plain = [m for m in model.modules() if isinstance(m, FakeLinear)]
        found = passport.input_formats(model, sent, BF16, torch.device("cpu"), "e4m3_token", shard)
        assert set(found.values()) == {"e4m3_token"}
        for layer in plain:
            layer.enters = as_it_is
        assert {r.name: r.hash for r in passport.weight_records(model, sent, BF16, shard)} == alone
        plain[-1].held = plain[-1].held.roll(1, 1)  # the columns of another rank's neighbour
        with pytest.raises(RuntimeError, match=r"o_proj\.weight is not the .* tensor that was loaded") as error:
            passport.weight_records(model, sent, BF16, shard)
        assert f" of {256 * 256} weights that were asked for differ" in str(error.value)  # half of 256 x 512


def whole_of(sent: dict[str, passport.Sent]) -> tuple[nn.Module, dict[str, passport.Sent]]:
    """The same layers on one device."""
    names = list(sent)
    stem = "model.layers.0.self_attn."
    return model_of({
        f"{stem}qkv_proj": FakeLinear(torch.cat([sent[name].values for name in names[:3]]), as_it_is),
        f"{stem}o_proj": FakeLinear(sent[names[3]].values, as_it_is),
    }), sent  # fmt: skip
