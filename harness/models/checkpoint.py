"""Hugging Face folders, both ways: config.json and safetensors of Qwen2, Qwen3, Qwen3-MoE and bias-free Llama decoders.

What is written loads unchanged in transformers 4 and 5, vLLM and verl. Pickled weights, quantized checkpoints,
sliding windows in use, other rope scaling than llama3's and YaRN, other mixtures of experts and Qwen3-MoE with dense
layers are refused by name; tokenizers are not read here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.foundation.did_you_mean import listed
from harness.foundation.json_object import read_json_object
from harness.foundation.seeds import generator
from harness.foundation.whole_folder import replacing
from harness.models.decoder import ROUTER, Decoder, DecoderConfig, tensor_shapes

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}
MODEL_TYPES = tuple(ARCHITECTURES)
LARGE = 2**28
"""Bytes of a folder from which on its hash is kept on the machine, and a plan does not wait for it."""
UNREAD = "unread-"
"""Beginning of a hash that stands in for one of weights that were not read."""
LENGTHS = "original_max_position_embeddings"
ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama3": (
        (LENGTHS, "factor", "low_freq_factor", "high_freq_factor"),
        ("factor", "low_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        (LENGTHS, "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        ("factor",),
    ),
}
"""Kind of rope scaling -> (keys that it knows, keys that it needs), as transformers' `modeling_rope_utils` has them."""
REFUSED: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("hidden_act", lambda v: v not in (None, "silu")),
    ("use_sliding_window", bool),
    ("layer_types", lambda v: v is not None and (not isinstance(v, list) or any(k != "full_attention" for k in v))),
    ("attention_bias", bool),
    ("mlp_bias", bool),
    ("quantization_config", bool),
    ("partial_rotary_factor", lambda v: v not in (None, 1, 1.0)),
)
"""config.json keys whose value, where the test holds, asks for something the decoder does not do."""
EXPERTS = ("num_experts", "num_local_experts")
"""Names of the number of experts; transformers 5 writes the second for Qwen3-MoE, too."""


def _size(raw: dict[str, Any], path: Path, key: str, default: int | None = None) -> int:
    """A size that config.json gives, `default` where it is left out. Raises ValueError for anything but one from 1."""
    value = raw[key] if default is None else raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise ValueError(f"{path}: {key}={value!r}: a whole number above 0 is expected")
    return value


def _number(value: object, path: Path, key: str, default: float) -> float:
    """A number that config.json gives, `default` for None. Raises ValueError for anything but one above 0."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{path}: {key}={value!r}: a number above 0 is expected")
    return float(value)


def _token(raw: dict[str, Any], path: Path, key: str) -> int | None:
    """A token id that config.json gives, the first of a list; old folders of Llama have -1 for none. Raises ValueError
    for anything else."""
    value = raw.get(key)
    first = value[0] if isinstance(value, list) and value else value
    if first is not None and type(first) is not int:
        raise ValueError(f"{path}: {key}={value!r}: a token id is expected, or a list of them")
    return first


def _rope(raw: dict[str, Any], path: Path, positions: int) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """(base, scaling) from `rope_parameters` (transformers 5), else from `rope_theta` and `rope_scaling` (4).

    The positions that scaling starts from are always written out: without them they would be those of the model,
    which `model.max_positions` changes. Raises ValueError for kinds of scaling that the decoder does not do, and for
    what is no number.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    if not isinstance(raw.get(key) or {}, dict):
        raise ValueError(f"{path}: {key}={raw[key]!r}: an object is expected")
    rope = dict(raw.get(key) or {})
    base = rope.pop("rope_theta", None)
    theta = _number(raw.get("rope_theta") if base is None else base, path, "rope_theta", 10000.0)
    older = rope.pop("type", "default")
    kind = rope.pop("rope_type", older)
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values()):
        return theta, ()
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"{path}: rope scaling {kind!r} is not supported (choose from default, {', '.join(ROPE_KINDS)})"
        )
    known, needed = ROPE_KINDS[kind]
    numbers = {*needed, *(name for name, value in rope.items() if value is not None)} & {*known} - {"truncate"}
    if missing := [name for name in known if name in numbers and not isinstance(rope.get(name), int | float)]:
        raise ValueError(f"{path}: rope scaling {kind!r} needs a number for {missing[0]}")
    if unknown := sorted(set(rope) - set(known)):
        raise ValueError(f"{path}: rope scaling {kind!r} with {unknown[0]}={rope[unknown[0]]!r} is not supported")
    rope[LENGTHS] = _size({LENGTHS: rope.get(LENGTHS) or raw.get(LENGTHS)}, path, LENGTHS, positions)
    given = {name: value for name, value in rope.items() if value is not None}
    return theta, tuple(sorted({"rope_type": kind, **given}.items()))


def _mixture(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The decoder's fields of a mixture of experts, defaults as transformers has them; empty for a dense model.

    Raises ValueError for a mixture under another architecture than Qwen3-MoE's, and for one with dense layers.
    """
    count, key = next(((raw[key], key) for key in EXPERTS if raw.get(key)), (None, EXPERTS[0]))
    if raw["model_type"] != "qwen3_moe":
        if count:
            raise ValueError(f"{path}: {key}={count!r} is not supported with model_type={raw['model_type']!r}")
        return {}
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        key = "mlp_only_layers" if raw.get("mlp_only_layers") else "decoder_sparse_step"
        raise ValueError(f"{path}: {key}={raw[key]!r} is not supported: every layer must be a mixture of experts")
    return {
        "num_experts": _size(raw, path, key, 128),
        "num_experts_per_tok": _size(raw, path, "num_experts_per_tok", 8),
        "moe_intermediate_size": _size(raw, path, "moe_intermediate_size", 768),
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
    }


def check_folder(folder: Path) -> None:
    """Raises ValueError, one line, for a folder without a model's configuration."""
    if not folder.exists():
        raise ValueError(f"{folder}: no such folder; a model's, with its {CONFIG}, is expected")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: no model folder; it {f'has no {CONFIG}' if folder.is_dir() else 'is a file'}")


def load_config(folder: Path | str) -> DecoderConfig:
    """The decoder's shape from `<folder>/config.json`. ValueError names what is missing or unsupported."""
    path = Path(folder) / CONFIG
    raw = read_json_object(path)
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{path}: model_type={kind!r} is not supported (choose from {', '.join(MODEL_TYPES)})")
    for key, is_refused in REFUSED:
        if is_refused(raw.get(key)):
            raise ValueError(f"{path}: {key}={raw[key]!r} is not supported")
    d, heads = (_size(raw, path, key) for key in ("hidden_size", "num_attention_heads"))
    kv_heads = _size(raw, path, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{path}: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}")
    if raw.get("head_dim") is None and kind != "qwen3" and d % heads:
        raise ValueError(f"{path}: hidden_size={d}: must be a multiple of num_attention_heads={heads}")
    positions = _size(raw, path, "max_position_embeddings", 2048 if kind == "llama" else 32768)
    theta, scaling = _rope(raw, path, positions)
    values = {
        "vocab_size": _size(raw, path, "vocab_size"),
        "num_layers": _size(raw, path, "num_hidden_layers"),
        "hidden_size": d,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _size(raw, path, "head_dim", 128 if kind == "qwen3" else d // heads),
        **_mixture(raw, path),
        "intermediate_size": _size(raw, path, "intermediate_size"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_eps": _number(raw.get("rms_norm_eps"), path, "rms_norm_eps", 1e-6),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "attention_bias": kind == "qwen2",
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "max_positions": positions,
        **{f"{name}_id": _token(raw, path, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    }
    try:
        return DecoderConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def config_json(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a decoder. Both spellings of the rotary base are written: old and new readers differ.

    Raises ValueError for a shape that no supported architecture has.
    """
    kind = {(True, False): "qwen3", (False, True): "qwen2", (False, False): "llama"}.get(
        (config.qk_norm, config.attention_bias)
    )
    if config.num_experts:
        kind = "qwen3_moe"
    if kind is None:
        raise ValueError("qk_norm=True with attention_bias=True: no Hugging Face architecture has this shape")
    if kind == "qwen2" and config.head_dim * config.num_heads != config.hidden_size:
        raise ValueError(f"head_dim={config.head_dim}: Qwen2 needs hidden_size / num_heads")
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind] + "ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **dict(config.rope_scaling)},
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
    }
    if config.rope_scaling:
        values["rope_scaling"] = dict(config.rope_scaling)
    if config.num_experts:
        values |= {
            "num_experts": config.num_experts, "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size, "norm_topk_prob": config.norm_topk_prob,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    if kind != "qwen2":
        values["attention_bias"] = False
    if kind != "llama":
        values |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.num_layers}
    return values


def link_folder(source: Path | str, target: Path | str, max_positions: int) -> None:
    """Make `target` the same model with other positions: a config.json of its own, all other files of `source` linked.

    What scaling of the rotary embedding starts from is written out, for readers would take it from the positions."""
    source, target, scaling = Path(source).absolute(), Path(target), dict(load_config(source).rope_scaling)
    raw: dict[str, Any] = {**read_json_object(source / CONFIG), "max_position_embeddings": max_positions}
    for key in ("rope_parameters", "rope_scaling"):
        if scaling and raw.get(key):
            raw[key] = raw[key] | {LENGTHS: scaling[LENGTHS]}
    target.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != CONFIG:
            (target / file.name).symlink_to(file)
    (target / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def _files(folder: Path) -> list[Path]:
    """The weight files of a folder: those its index names, or the single one."""
    index, names = folder / INDEX, [WEIGHTS]
    if index.exists():
        places = read_json_object(index)["weight_map"]
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{index}: weight_map names no file")
        names = sorted(set(places.values()))
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing (only safetensors checkpoints are read)")
    return files


def read_tensors(folder: Path | str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor as stored) for every tensor of a folder, one in memory at a time. ValueError if unreadable."""
    for file in _files(Path(folder)):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in sorted(handle.keys()):
                    yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def load_decoder(folder: Path | str, *, max_positions: int | None = None) -> Decoder:
    """The decoder of a folder, float32, in training mode; `max_positions` in place of its own.

    Missing, unknown or misshapen tensors are a ValueError.
    """
    config = load_config(folder)
    config = config if max_positions is None else replace(config, max_positions=max_positions)
    shapes = tensor_shapes(config)
    model = Decoder(config)
    params = dict(model.named_parameters())
    unknown: list[str] = []
    tied: Tensor | None = None
    with torch.no_grad():
        for name, tensor in read_tensors(folder):
            if name == "lm_head.weight" and config.tie_embeddings:
                tied = tensor
            elif name not in shapes:
                unknown += [] if name.endswith("rotary_emb.inv_freq") else [name]
            elif tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"{folder}: {name} is {found}, its config says {shapes[name]} of a float dtype")
            else:
                params[name].copy_(tensor.to(torch.float32))
                del shapes[name]
    if shapes or unknown:
        raise ValueError(f"{folder}: missing tensors {listed(shapes)}; unknown tensors {listed(unknown)}")
    if tied is not None and not torch.equal(tied.to(torch.float32), params["model.embed_tokens.weight"]):
        raise ValueError(f"{folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding")
    return model


def empty_decoder(folder: Path | str) -> Decoder:
    """The decoder of a folder on the meta device: names, shapes and dtypes of `load_decoder`, no values and no memory.
    Only the folder's config.json is read; raises ValueError as `load_config`."""
    with torch.device("meta"):
        return Decoder(load_config(folder))


@torch.no_grad()
def save_decoder(model: Decoder, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors; other files already in the folder (a tokenizer) are kept.

    Everything is written beside the folder and renamed, so a killed process leaves no half-written folder.
    ValueError if the model's tensors are not those of its config (a wrapped or adapted model).
    """
    folder = Path(folder)
    shapes = tensor_shapes(model.config)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in shapes}
    wrong = [name for name, shape in shapes.items() if name not in state or tuple(state[name].shape) != shape]
    if wrong:
        raise ValueError(f"the model is not a plain decoder: {listed(wrong)} missing or misshapen")
    values = config_json(model.config, dtype)
    with replacing(folder) as scratch:
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.is_file() and file.name not in (CONFIG, INDEX) and file.suffix not in (".safetensors", ".bin"):
                shutil.copy2(file, scratch / file.name)
        tensors = {name: state[name].to("cpu", dtype).contiguous() for name in shapes}
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


@torch.no_grad()
def spread_channels(model: Decoder, sigma: float, seed: int) -> None:
    """Imitate the outlier channels of large models without changing the function, in place.

    Each gain of `input_layernorm` and `post_attention_layernorm` is multiplied by exp(sigma z), z ~ N(0, 1), and the
    matching columns of the matrices that read it are divided by the same, so float32 logits stay equal up to rounding.
    """
    for i, layer in enumerate(model.model.layers):
        for norm, readers in (
            ("input_layernorm", [f"self_attn.{name}_proj" for name in "qkv"]),
            ("post_attention_layernorm", _mlp_readers(model.config)),
        ):
            gain = layer.get_submodule(norm).get_parameter("weight")
            z = torch.randn(gain.shape, generator=generator("cpu", seed, "spread_channels", i, norm))
            factor = (sigma * z).exp().to(gain.device)
            gain.mul_(factor)
            for reader in readers:
                layer.get_submodule(reader).get_parameter("weight").div_(factor)


def _mlp_readers(config: DecoderConfig) -> list[str]:
    """Linear layers of a block that read its second norm: a router is one of them."""
    readers = [f"{prefix}{name}" for prefix, _ in config.mlps for name in ("gate_proj", "up_proj")]
    return [ROUTER, *readers] if config.num_experts else readers


_State = tuple[tuple[str, int, int, int], ...]
"""Name, inode, bytes and time of change in nanoseconds of every file of a folder that its content is in."""


def content_hash(folder: Path | str) -> str:
    """SHA-256 (hexadecimal) of config and tensors: the same however the tensors are spread over files. A folder whose
    files have not changed is read once in a process, a large one once on this machine: the user's cache keeps it."""
    return _content_hash(Path(folder).resolve(), _state(Path(folder)))


def planned_hash(folder: Path | str) -> str:
    """`content_hash`, for a plan: where that would read large weights, or where there are none yet, a stand-in that
    begins with `UNREAD`, by config and the files' state."""
    place, state = Path(folder).resolve(), _state(Path(folder))
    is_known = not _is_large(state) or _kept_hash(place, state) is not None
    if is_known and not lacks_weights(folder):
        return content_hash(folder)
    named = f"{place} {state}".encode()
    return UNREAD + hashlib.sha256(named).hexdigest()


def lacks_weights(folder: Path | str) -> bool:
    """Has a model folder its config.json alone, as one has that is still to be downloaded?"""
    names = {path.name for path in Path(folder).iterdir()}
    return CONFIG in names and INDEX not in names and not any(name.endswith(".safetensors") for name in names)


def _state(folder: Path) -> _State:
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".safetensors")]
    stats = [(path.name, path.stat()) for path in files]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _is_large(state: _State) -> bool:
    return sum(size for _, _, size, _ in state) >= LARGE


def _hash_file(folder: Path) -> Path:
    """The file of the user's cache that keeps a folder's hash."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "lowbit" / "content_hashes" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:24]}.json"


def _kept_hash(folder: Path, state: _State) -> str | None:
    """The hash that the user's cache keeps of a folder in this state."""
    try:
        kept = json.loads(_hash_file(folder).read_text())
        return str(kept["hash"]) if kept["state"] == [list(file) for file in state] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _keep_hash(folder: Path, state: _State, found: str) -> None:
    """Keep a hash in the user's cache; without one that can be written the folder is read again next time."""
    file = _hash_file(folder)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"folder": str(folder), "state": state, "hash": found}))
        part.replace(file)


@cache
def _content_hash(folder: Path, state: _State) -> str:
    """The hash of a folder whose files are in this state."""
    if not _is_large(state):
        return _read_hash(folder)
    found = _kept_hash(folder, state)
    if found is None:
        found = _read_hash(folder)
        _keep_hash(folder, state, found)
    return found


def _read_hash(folder: Path) -> str:
    """The hash of a folder, from its weights."""
    raw = read_json_object(folder / CONFIG)
    for key in ("transformers_version", "_name_or_path"):
        raw.pop(key, None)
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    per_tensor: dict[str, str] = {}
    for name, tensor in read_tensors(folder):
        data = tensor.contiguous().flatten().view(torch.uint8).numpy()
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        per_tensor[name] = hashlib.sha256(head + data.tobytes()).hexdigest()
    digest.update(json.dumps(per_tensor, sort_keys=True).encode())
    return digest.hexdigest()
