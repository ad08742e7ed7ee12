"""Shares of a model over several devices: cut and gathered again to the bit, by ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.engines.vllm.shards import Shard, check_shards
from harness.models.decoder import DecoderConfig, tensor_shapes

CONFIG = DecoderConfig(
    vocab_size=150, num_layers=1, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, intermediate_size=512,
    qk_norm=True, tie_embeddings=False,
)  # fmt: skip
LORA = {
    f"model.layers.0.{part}.weight": shape
    for part, shape in {
        "self_attn.q_proj.lora_A": (4, 256), "self_attn.q_proj.lora_B": (256, 4),
        "mlp.down_proj.lora_A": (4, 512), "mlp.down_proj.lora_B": (256, 4),
    }.items()
}  # fmt: skip


def at_once(size: int, config: DecoderConfig, work: Callable[[Shard], object]) -> list[object]:
    """Answers of `size` ranks that run side by side and meet at every exchange."""
    slots, found, barrier = [torch.empty(0)] * size, list[object]([None] * size), threading.Barrier(size, timeout=20)

    def run(rank: int) -> None:
        def exchange(x: Tensor) -> list[Tensor]:
            slots[rank] = x
            barrier.wait()
            told = list(slots)
            barrier.wait()
            return told

        found[rank] = work(Shard(config=config, rank=rank, size=size, exchange=exchange))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_cut_is_gathered_to_the_bit(size: int, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(1)
    shapes = tensor_shapes(CONFIG) | LORA
    whole = {name: torch.randn(shape, generator=draws).to(dtype) for name, shape in shapes.items()}

    def work(shard: Shard) -> tuple[dict[str, Tensor], int, bool]:
        cuts = {name: shard.cut(name, x) for name, x in whole.items()}
        fits = all(cuts[name].shape == shape for name, shape in shard.shapes(shapes).items())
        held = sum(x.numel() for x in cuts.values())
        return {name: shard.gather(name, cut) for name, cut in cuts.items()}, held, fits

    told = at_once(size, CONFIG, work)
    total = sum(x.numel() for x in whole.values())
    for gathered, held, fits in told:  # type: ignore[misc]
        assert fits
        assert gathered.keys() == whole.keys()
        for name, x in whole.items():
            assert torch.equal(gathered[name].view(torch.uint8), x.view(torch.uint8)), name
        assert held == total if size == 1 else held < 0.8 * total


def test_who_holds_what() -> None:
    """8 heads of 32, 2 key-value heads, 150 words padded to 192, on 4 ranks."""
    third = Shard(config=CONFIG, rank=2, size=4)
    at = "model.layers.0."
    assert third.span(f"{at}self_attn.q_proj.weight") == (0, 128, 192)
    assert third.span(f"{at}self_attn.q_proj.bias") == (0, 128, 192)
    assert third.span(f"{at}self_attn.k_proj.weight") == (0, 32, 64)  # the second head, as the fourth rank
    assert third.span(f"{at}self_attn.o_proj.weight") == (1, 128, 192)
    assert third.span(f"{at}mlp.down_proj.weight") == (1, 256, 384)
    assert third.span(f"{at}mlp.up_proj.weight") == (0, 256, 384)
    assert third.span("model.embed_tokens.weight") == (0, 96, 144)
    assert replace(third, rank=3).span("lm_head.weight") == (0, 144, 150)
    assert third.span(f"{at}mlp.down_proj.lora_A.weight") == (1, 256, 384)
    assert third.span(f"{at}mlp.up_proj.lora_B.weight") == (0, 256, 384)
    for whole in ("input_layernorm.weight", "self_attn.q_norm.weight", "mlp.up_proj.lora_A.weight",
                  "mlp.down_proj.lora_B.weight"):  # fmt: skip
        assert third.span(f"{at}{whole}") is None


def test_scales_are_cut_by_their_tiles() -> None:
    scale = torch.arange(8.0).view(2, 4)  # of [256, 512] in blocks of 128 x 128
    name = "model.layers.0.mlp.down_proj.weight"

    def work(shard: Shard) -> tuple[list[float], Tensor, Tensor]:
        own = shard.cut(name, scale, 128)
        return own.flatten().tolist(), shard.gather(name, own, 128), shard.cut(name, torch.ones(256, 1), 0)

    told = at_once(2, CONFIG, work)
    assert [t[0] for t in told] == [[0, 1, 4, 5], [2, 3, 6, 7]]  # type: ignore[index]
    for _, gathered, rows in told:  # type: ignore[misc]
        assert torch.equal(gathered, scale)
        assert rows.shape == (256, 1)  # one scale a row, whatever columns a rank has


@pytest.mark.parametrize(
    ("change", "size", "said"),
    [
        ({}, 3, "tp=3: 8 heads, 2 key-value heads and 512 MLP channels do not divide by 3 devices"),
        ({"intermediate_size": 511}, 2, "tp=2: 8 heads, 2 key-value heads and 511 MLP channels do not divide"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, 2, "tp=2: a mixture of experts"),
    ],
)
def test_models_that_cannot_be_shared(change: dict[str, int], size: int, said: str) -> None:
    check_shards(CONFIG, 2, "tp=2")
    check_shards(CONFIG, 8, "tp=8")
    with pytest.raises(ValueError, match=said):
        check_shards(replace(CONFIG, **change), size, f"tp={size}")
