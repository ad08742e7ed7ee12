"""One set of low-rank adapters beside the live weights, through vLLM's own LoRA support.

vLLM reads adapters from a folder, so each push writes PEFT's two files and adds them under a new number: adapters of
an old push can then never be served. Left out: adapters of the head and the embedding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from harness.api import TensorRecord
from harness.engines.adapter_shapes import adapter_shapes
from harness.engines.plain_record import plain_record
from harness.engines.vllm.push_by_reload import live_linears
from harness.engines.vllm.shards import Shard
from harness.numerics.formats import Adapters


class AdapterSlot:
    """Owns the adapter of an engine; before the first `load` there is none."""

    def __init__(self, llm: Any, adapters: Adapters, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        """`shapes`: checkpoint name -> shape. Raises ValueError for a target that is no linear layer."""
        self.llm, self.adapters, self.folder = llm, adapters, folder
        self.wanted = adapter_shapes(adapters, shapes)
        self.number = 0
        self.request: Any = None

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over checked tensors in place of the last ones."""
        from vllm.lora.request import LoRARequest

        if self.request is not None:
            self.llm.llm_engine.remove_lora(self.number)
            shutil.rmtree(self.request.lora_path)
            self.request = None  # where the push fails, the next one has nothing to remove
        self.number = self.next_number()
        place = self.folder / f"adapter-{self.number}"
        place.mkdir(exist_ok=True)
        config = {"peft_type": "LORA", "r": self.adapters.rank, "lora_alpha": self.adapters.alpha, "bias": "none",
                  "target_modules": list(self.adapters.targets), "task_type": "CAUSAL_LM"}  # fmt: skip
        (place / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        held = {f"base_model.model.{name}": t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(held, place / "adapter_model.safetensors")
        self.request = LoRARequest(f"push-{self.number}", self.number, str(place))
        self.llm.llm_engine.add_lora(self.request)

    def next_number(self) -> int:
        """vLLM's number of the adapter to come."""
        return self.number + 1

    def records(self, shard: Shard) -> Iterator[TensorRecord]:
        """Passport lines, read from the slot of which the kernels read (B with alpha / rank in it), of whole adapters.

        Raises RuntimeError where the last push is not the one that is active.
        """
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        known = runner.lora_manager.list_adapters()
        if known != {self.number}:
            raise RuntimeError(f"adapters of pushes {sorted(known)} are held, not {self.number} alone")
        wrapped = dict(runner.get_model().named_modules())
        for name, _, parts in live_linears(runner.get_model()):
            slots = getattr(wrapped[name], "lora_a_stacked", ()), getattr(wrapped[name], "lora_b_stacked", ())
            for part, a, b in zip(parts, *slots, strict=False):
                if f"{part}.lora_A.weight" in self.wanted:
                    held = {f"{part}.lora_A.weight": a[0, 0, : self.adapters.rank],
                            f"{part}.lora_B.weight": b[0, 0, :, : self.adapters.rank]}  # fmt: skip
                    yield from (plain_record(own, shard.gather(own, tensor)) for own, tensor in held.items())
