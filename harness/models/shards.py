"""A checkpoint written as a Hugging Face folder: safetensors in shards with their index, config, tokenizer.

transformers, vLLM and verl read it unchanged. Left out: what the tensors are (`harness.run.policies`), and reading
(`harness.models.checkpoint`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from harness.foundation.whole_folder import replacing
from harness.models.checkpoint import CONFIG, INDEX, WEIGHTS

SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in one file, unless a single tensor has more; as transformers does."""
GENERATION = "generation_config.json"
MODEL_FILES = (
    GENERATION, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template*", "*.tiktoken", "LICENSE*",
)  # fmt: skip
"""Names of the files that go with the weights."""


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], source: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write `tensors` (checkpoint name, tensor as it is stored; read once) with `config` as config.json. Tokenizer,
    chat template and generation_config.json are those of the model folder `source`; where that has no
    generation_config.json, one with the config's special tokens is written.
    """
    with replacing(folder) as scratch:
        _copy_files(source, scratch)
        (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if not (scratch / GENERATION).exists():
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            known = {name: config[name] for name in names if config.get(name) is not None}
            (scratch / GENERATION).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        write_shards(scratch, tensors, shard_bytes)


def _copy_files(source: Path, folder: Path) -> None:
    """Copy what of a model folder belongs to any weights of its shape."""
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatchcase(file.name, pattern) for pattern in MODEL_FILES):
            shutil.copyfile(file, folder / file.name)


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors (read once) as one file where everything fits, else as numbered ones with an index; a shard is in
    memory at a time. Raises OSError where the disk does not take them."""
    shards: list[list[str]] = []
    held, size, total = dict[str, Tensor](), 0, 0

    def flush() -> None:
        try:
            save_file(held, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder}: {error}") from error
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        num = tensor.numel() * tensor.element_size()
        if held and size + num > shard_bytes:
            flush()
            size = 0
        held[name] = tensor.detach().to("cpu").contiguous()
        size, total = size + num, total + num
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / WEIGHTS)
        return
    places: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
