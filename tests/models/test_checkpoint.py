"""Folders both ways: logits against transformers, errors by name, the channel spread, the content hash."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.models import checkpoint
from harness.models.checkpoint import (
    INDEX,
    UNREAD,
    WEIGHTS,
    _content_hash,
    content_hash,
    link_folder,
    load_config,
    load_decoder,
    planned_hash,
    read_tensors,
    save_decoder,
    spread_channels,
)
from harness.models.decoder import DecoderConfig, rope_tables
from tests.engines.engine_cases import decoder

QWEN3 = DecoderConfig(
    vocab_size=40, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48,
    rope_theta=5000.0, eos_id=1, pad_id=0, bos_id=2, max_positions=512,
)  # fmt: skip
QWEN2 = replace(QWEN3, qk_norm=False, attention_bias=True, head_dim=8)
LLAMA = replace(QWEN3, qk_norm=False, attention_bias=False)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "llama3": (LLAMA, LLAMA3),
    "yarn": (QWEN2, YARN),
    "yarn_all": (QWEN3, YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}),
    "yarn_mscale": (LLAMA, YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}),
}
"""Rope scaling -> (a shape, pairs of config.json); 512 positions from 64."""
MOE = replace(QWEN3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
IDS = torch.randint(0, 40, (3, 21), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_decoder(decoder(QWEN3), tmp_path / "base")
    return tmp_path / "base"


def _edit(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [QWEN3, QWEN2, LLAMA], ids=["qwen3", "qwen2", "llama"])
def test_transformers_reads_what_we_write_and_back(config: DecoderConfig, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = replace(config, tie_embeddings=tied)
    ours = decoder(config)
    save_decoder(ours, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(IDS).logits
        torch.testing.assert_close(ours(IDS), expected, atol=1e-5, rtol=1e-5)
        assert (expected - expected.roll(1, 0)).abs().max() > 1  # the logits are not trivially equal
    assert set(theirs.state_dict()) == set(ours.state_dict())

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")  # several shards and an index
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert load_config(tmp_path / "theirs") == config
    again = load_decoder(tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(again(IDS), ours(IDS))


def _fused(state: dict[str, torch.Tensor]) -> set[str]:
    """Names of a checkpoint as transformers 5 holds them: the experts of a layer in two tensors."""
    gate_up = (re.sub(r"experts\.\d+\.(gate|up)_proj\.weight", "experts.gate_up_proj", name) for name in state)
    return {re.sub(r"experts\.\d+\.down_proj\.weight", "experts.down_proj", name) for name in gate_up}


@pytest.mark.parametrize(("normed", "tied"), [(True, False), (False, True)])
def test_transformers_reads_a_mixture_of_experts_and_back(normed: bool, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

    config = replace(MOE, norm_topk_prob=normed, tie_embeddings=tied)
    ours = decoder(config)
    save_decoder(ours, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(theirs) is Qwen3MoeForCausalLM
    with torch.no_grad():
        expected = theirs(IDS).logits
        torch.testing.assert_close(ours(IDS), expected, atol=1e-5, rtol=1e-5)
        assert (expected - expected.roll(1, 0)).abs().max() > 1
        used = ours.model.layers[1].mlp.chosen
        assert used.shape == (3, 21, 2) and len(used.unique()) == 6  # every expert has tokens
        model = load_decoder(tmp_path / "ours")
        model.model.layers[0].mlp.experts[5].down_proj.weight.mul_(1.01)
        assert (model(IDS) - expected).abs().max() > 1e-3  # one expert of one layer shows
    assert set(theirs.state_dict()) == _fused(ours.state_dict())

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert {name for name, _ in read_tensors(tmp_path / "theirs")} >= {
        "model.layers.1.mlp.experts.5.down_proj.weight", "model.layers.0.mlp.gate.weight",
    }  # fmt: skip
    assert load_config(tmp_path / "theirs") == config
    again = load_decoder(tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(again(IDS), ours(IDS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: every layer must be a mixture"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported: every layer must be a mixture"),
        ({"num_experts_per_tok": 7}, "config.json: num_experts_per_tok=7: valid: 1 to 6"),
        ({"num_experts": -6}, "config.json: num_experts=-6: a whole number above 0 is expected"),
        ({"moe_intermediate_size": "24"}, "config.json: moe_intermediate_size='24': a whole number above 0 is"),
        ({"num_experts": None, "num_local_experts": 3}, r"mlp\.gate\.weight is \(6, 32\)"),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_unsupported_mixtures_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    save_decoder(decoder(MOE), tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        load_decoder(tmp_path)


def test_low_precision_files_load_as_float32(tmp_path: Path) -> None:
    model = decoder(QWEN3)
    save_decoder(model, tmp_path / "b", torch.bfloat16)
    loaded = load_decoder(tmp_path / "b")
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert b.dtype == torch.float32 and torch.equal(a.bfloat16().float(), b)


def test_saving_over_a_folder_keeps_its_tokenizer_and_drops_stale_shards(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"stale")
    (folder / "model.safetensors.index.json").write_text("stale")
    save_decoder(decoder(QWEN3, std=0.1), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert torch.equal(load_decoder(folder)(IDS), decoder(QWEN3, std=0.1)(IDS))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'.*qwen2, qwen3, qwen3_moe, llama"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope scaling 'yarn' needs a number for factor",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' is not .* default, llama3, yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope scaling 'default' is not supported"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "'yarn' with partial_rotary_factor=0.5"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "'llama3' needs a number for low_freq_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": YARN | {"beta_fast": "32"}}, "'yarn' needs a number for beta_fast"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn': an object is expected"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}}, "rope_theta='1e6': a number above 0 is"),
        ({"layer_types": 3}, "layer_types=3 is not supported"),
        *(
            ({key: value}, re.escape(f"config.json: {key}={value!r}: a whole number above 0 is expected"))
            for key, value in (
                ("hidden_size", None), ("hidden_size", -64), ("hidden_size", "32"), ("num_attention_heads", 0),
                ("num_key_value_heads", 0), ("num_key_value_heads", 2.0), ("head_dim", -16), ("vocab_size", True),
                ("num_hidden_layers", 0), ("intermediate_size", []), ("max_position_embeddings", "512"),
            )
        ),
        ({"num_key_value_heads": 3}, "config.json: num_key_value_heads=3: must divide num_attention_heads=4$"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 30},
         "config.json: hidden_size=30: must be a multiple of num_attention_heads=4$"),
        ({"head_dim": 7}, "config.json: head_dim=7 is odd; rotary embedding needs an even one"),
        ({"rms_norm_eps": "tiny"}, "config.json: rms_norm_eps='tiny': a number above 0 is expected"),
        ({"rms_norm_eps": -1e-6}, "config.json: rms_norm_eps=-1e-06: a number above 0 is expected"),
        ({"eos_token_id": []}, r"config.json: eos_token_id=\[\]: a token id is expected, or a list of them"),
        ({"pad_token_id": "0"}, "config.json: pad_token_id='0': a token id is expected"),
    ],
)  # fmt: skip
def test_unsupported_configs_are_named(folder: Path, changes: dict[str, object], words: str) -> None:
    _edit(folder, **changes)
    with pytest.raises(ValueError, match=words):
        load_decoder(folder)


def test_a_pad_id_of_old_folders_is_read(folder: Path) -> None:
    _edit(folder, pad_token_id=-1, eos_token_id=[7, 9])
    assert (load_config(folder).pad_id, load_config(folder).eos_id) == (-1, 7)


def test_rope_theta_is_read_from_either_place(folder: Path) -> None:
    _edit(folder, rope_parameters=None, rope_theta=777.0)
    assert load_config(folder).rope_theta == 777.0
    _edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 888.0})
    assert load_config(folder).rope_theta == 888.0


def frequencies(config: DecoderConfig, rope: dict[str, Any]) -> tuple[np.ndarray, float]:
    """(radians per position [D / 2], factor of cosine and sine), from the papers, in float64: Llama 3.1's wavelength
    bands; YaRN (arXiv 2309.00071), section 3.2 and eq. 22."""
    plain = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns, factor = 64 * plain / (2 * np.pi), rope["factor"]  # within the original context
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return plain * kept + plain / factor * (1 - kept), 1.0
    fast, slow = rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0)
    dim_of = [config.head_dim * np.log(64 / (n * 2 * np.pi)) / (2 * np.log(config.rope_theta)) for n in (fast, slow)]
    if rope.get("truncate", True):
        dim_of = [np.floor(dim_of[0]), np.ceil(dim_of[1])]
    first, last = max(dim_of[0], 0), min(dim_of[1], config.head_dim - 1)
    scaled = np.clip((np.arange(config.head_dim // 2) - first) / (last - first), 0, 1)
    known = rope.get("attention_factor")
    if known is None and "mscale" in rope:
        known = (0.1 * rope["mscale"] * np.log(factor) + 1) / (0.1 * rope["mscale_all_dim"] * np.log(factor) + 1)
    return plain / factor * scaled + plain * (1 - scaled), 0.1 * np.log(factor) + 1 if known is None else known


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotation_is_that_of_the_papers_and_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config, rope = SCALINGS[name]
    save_decoder(decoder(config), tmp_path / "ours")
    _edit(tmp_path / "ours", rope_parameters=rope | {"rope_theta": config.rope_theta})
    ours = load_decoder(tmp_path / "ours")
    assert dict(ours.config.rope_scaling) == rope

    radians, factor = frequencies(config, rope)
    cos, sin = rope_tables(ours.config, 300)
    angle = np.arange(300)[:, None] * radians
    half = config.head_dim // 2
    np.testing.assert_allclose(cos[:, 0, :half], factor * np.cos(angle), atol=2e-4)
    np.testing.assert_allclose(sin[:, 0, half:], factor * np.sin(angle), atol=2e-4)
    plain, _ = rope_tables(config, 300)
    assert (plain - cos).abs().max() > 0.5  # it is no default rotation

    long = torch.randint(0, 40, (2, 200), generator=torch.Generator().manual_seed(6))  # beyond the original 64
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(long), theirs(long).logits, atol=5e-5, rtol=1e-5)
        assert (decoder(config)(long) - ours(long)).abs().max() > 0.1

    save_decoder(ours, tmp_path / "again")
    theirs.save_pretrained(tmp_path / "theirs")
    assert load_config(tmp_path / "again") == ours.config == load_config(tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(long).logits, theirs(long).logits, atol=0, rtol=0)


def test_older_folders_say_their_scaling_apart_from_the_base(folder: Path) -> None:
    """transformers 4 wrote `rope_scaling` beside `rope_theta`, the kind as `type` or `rope_type`, nulls included."""
    for kind in ("type", "rope_type"):
        older = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": None}
        _edit(folder, rope_parameters=None, rope_theta=777.0, rope_scaling=older)
        config = load_config(folder)
        assert (config.rope_theta, dict(config.rope_scaling)) == (777.0, YARN)


def test_scaling_starts_from_the_positions_that_the_folder_says(folder: Path) -> None:
    """Those of the scaling, else of the folder's own key, else its positions; `model.max_positions` changes none."""
    bare = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    for own, expected in (({"original_max_position_embeddings": 128}, 128), ({}, 512)):
        _edit(folder, rope_parameters=bare, **own)
        assert dict(load_config(folder).rope_scaling)["original_max_position_embeddings"] == expected
        raw = json.loads((folder / "config.json").read_text())
        raw.pop("original_max_position_embeddings", None)
        (folder / "config.json").write_text(json.dumps(raw))
    wide = load_decoder(folder, max_positions=4096)
    assert wide.config == replace(load_config(folder), max_positions=4096)
    for one, other in zip(rope_tables(wide.config, 100), rope_tables(load_config(folder), 100), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rope", [None, {name: value for name, value in YARN.items() if "original" not in name}])
def test_a_linked_folder_is_the_same_model_with_other_positions(
    folder: Path, tmp_path: Path, rope: dict[str, object] | None
) -> None:
    from transformers import AutoModelForCausalLM

    if rope:
        _edit(folder, rope_parameters=rope | {"rope_theta": 5000.0})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    link_folder(folder, tmp_path / "linked", 2048)
    assert load_config(tmp_path / "linked") == replace(load_config(folder), max_positions=2048)
    assert (tmp_path / "linked" / "model.safetensors").resolve() == folder / "model.safetensors"
    assert (tmp_path / "linked" / "generation_config.json").is_symlink()
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "linked", dtype=torch.float32)
        torch.testing.assert_close(theirs(IDS).logits, load_decoder(folder)(IDS), atol=1e-5, rtol=1e-5)


def test_bad_folders_are_one_clear_error(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    with pytest.raises(ValueError, match=r"config.json"):
        load_decoder(tmp_path / "nowhere")

    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"} | {"extra": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"missing tensors model.norm.weight; unknown tensors extra"):
        load_decoder(folder)

    save_file(tensors | {"model.norm.weight": torch.ones(7)}, file)
    with pytest.raises(ValueError, match=r"model.norm.weight is \(7,\)"):
        load_decoder(folder)

    save_file(tensors | {"lm_head.weight": torch.ones(40, 32)}, file)
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        load_decoder(folder)

    file.write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_decoder(folder)

    file.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        load_decoder(folder)

    for index, words in (("{}", "weight_map is missing"), ('{"weight_map": {}}', "weight_map names no file")):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=f"model.safetensors.index.json: {words}"):
            content_hash(folder)

    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_decoder(folder)


def test_saving_refuses_what_no_architecture_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qk_norm=True with attention_bias=True"):
        save_decoder(decoder(replace(QWEN3, attention_bias=True)), tmp_path / "x")
    with pytest.raises(ValueError, match="head_dim=16: Qwen2"):
        save_decoder(decoder(replace(QWEN2, head_dim=16)), tmp_path / "x")
    model = decoder(QWEN3)
    model.model.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"not a plain decoder.*gate_proj"):
        save_decoder(model, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_spread_keeps_the_function_and_spreads_the_channels() -> None:
    plain, spread, same = decoder(QWEN2), decoder(QWEN2), decoder(QWEN2)
    spread_channels(spread, 0.5, seed=7)
    spread_channels(same, 0.5, seed=7)
    with torch.no_grad():
        torch.testing.assert_close(spread(IDS), plain(IDS), atol=2e-5, rtol=2e-5)
    assert torch.equal(spread(IDS), same(IDS))
    ratios: list[torch.Tensor] = []
    for before, after in zip(plain.model.layers, spread.model.layers, strict=True):
        ratios.append(after.input_layernorm.weight / before.input_layernorm.weight)
        ratios.append(after.post_attention_layernorm.weight / before.post_attention_layernorm.weight)
        torch.testing.assert_close(
            before.self_attn.k_proj.weight / after.self_attn.k_proj.weight, ratios[-2].expand(16, -1)
        )
        torch.testing.assert_close(before.mlp.up_proj.weight / after.mlp.up_proj.weight, ratios[-1].expand(48, -1))
        assert torch.equal(before.mlp.down_proj.weight, after.mlp.down_proj.weight)
        assert torch.equal(before.self_attn.q_proj.bias, after.self_attn.q_proj.bias)
    assert torch.cat(ratios).log().std().item() == pytest.approx(0.5, rel=0.25)
    assert torch.unique(torch.cat(ratios)).numel() == 4 * 32  # independent draws per layer and norm


def test_spread_reaches_routers_and_experts_and_no_token_changes_its_experts() -> None:
    plain, spread = decoder(MOE), decoder(MOE)
    spread_channels(spread, 0.5, seed=7)
    with torch.no_grad():
        torch.testing.assert_close(spread(IDS), plain(IDS), atol=2e-5, rtol=2e-5)
    for before, after in zip(plain.model.layers, spread.model.layers, strict=True):
        assert torch.equal(before.mlp.chosen, after.mlp.chosen)
        ratio = after.post_attention_layernorm.weight / before.post_attention_layernorm.weight
        for name in ("gate", "experts.0.gate_proj", "experts.5.up_proj"):
            old, new = (module.mlp.get_submodule(name).weight for module in (before, after))
            torch.testing.assert_close(old / new, ratio.expand(len(old), -1))


def test_content_hash_follows_content_alone(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first = content_hash(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    (tmp_path / "sharded" / "config.json").write_text((folder / "config.json").read_text())
    assert content_hash(tmp_path / "sharded") == first
    tensors = dict(read_tensors(folder))
    tensors["model.norm.weight"][0] += 1e-6
    save_file(tensors, folder / "model.safetensors")
    assert content_hash(folder) != first
    save_decoder(decoder(QWEN3), folder)
    assert content_hash(folder) == first
    _edit(folder, rms_norm_eps=1e-5)
    assert content_hash(folder) != first


def test_a_folder_that_has_not_changed_is_hashed_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    before = _content_hash.cache_info()
    first = content_hash(folder)
    assert [content_hash(path) for path in (folder, str(folder), tmp_path / "link")] == [first] * 3
    assert _content_hash.cache_info().misses == before.misses + 1
    (folder / "tokenizer.json").write_text("{}")  # another state of the folder, the same weights
    assert content_hash(folder) == first
    assert _content_hash.cache_info().misses == before.misses + 2


def test_a_plan_needs_no_weights_and_a_run_does(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert planned_hash(folder).startswith(UNREAD) and planned_hash(folder) == planned_hash(folder)
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        content_hash(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')  # a part of a download
    with pytest.raises(ValueError, match=r"model-1\.safetensors is missing"):
        planned_hash(folder)


def test_a_large_folder_is_read_once_on_a_machine_and_never_by_a_plan(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = planned_hash(folder)
    assert small == content_hash(folder)  # a small one is read at once
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "LARGE", 1)
    read = list[Path]()

    def counted(place: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
        read.append(Path(place))
        return read_tensors(place)

    monkeypatch.setattr(checkpoint, "read_tensors", counted)
    _content_hash.cache_clear()
    stand_in = planned_hash(folder)
    assert stand_in.startswith(UNREAD) and stand_in == planned_hash(folder) and read == []
    assert content_hash(folder) == small and len(read) == 1
    _content_hash.cache_clear()  # as in another process
    assert planned_hash(folder) == content_hash(folder) == small and len(read) == 1
    (kept,) = (tmp_path / "cache" / "lowbit" / "content_hashes").iterdir()
    kept.write_text("{")
    _content_hash.cache_clear()
    assert content_hash(folder) == small and len(read) == 2
    _edit(folder, rms_norm_eps=1e-5)
    assert planned_hash(folder).startswith(UNREAD) and planned_hash(folder) != stand_in
    assert content_hash(folder) != small and len(read) == 3
