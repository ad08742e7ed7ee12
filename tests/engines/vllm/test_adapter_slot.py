"""Adapters of a push that fails: the next push takes its place; without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.engines.vllm import adapters
from harness.engines.vllm.adapters import AdapterSlot
from harness.numerics.formats import Adapters

SHAPES = {"model.layers.0.self_attn.q_proj.weight": (16, 8)}
AT = "model.layers.0.self_attn.q_proj"
HELD = {f"{AT}.lora_A.weight": torch.ones(2, 8), f"{AT}.lora_B.weight": torch.ones(16, 2)}


class SameNumber(AdapterSlot):
    """As under verl, where every push has one number."""

    def next_number(self) -> int:
        return 7


@pytest.mark.parametrize(("kind", "numbers"), [(AdapterSlot, (1, 3)), (SameNumber, (7, 7))])
def test_a_push_whose_file_cannot_be_written_is_followed_by_another(
    kind: Callable[..., AdapterSlot], numbers: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SimpleNamespace(LoRARequest=lambda name, number, path: SimpleNamespace(number=number, lora_path=path))
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    added, removed = list[int](), list[int]()
    engine = SimpleNamespace(add_lora=lambda request: added.append(request.number), remove_lora=removed.append)
    slot = kind(SimpleNamespace(llm_engine=engine), Adapters(rank=2, alpha=4.0, targets=("q_proj",)), SHAPES, tmp_path)
    slot.load(HELD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(adapters, "save_file", full)
        slot.load(HELD)
    assert slot.request is None
    slot.load(HELD)
    assert (added, removed) == ([*numbers], [numbers[0]])
    assert slot.request.lora_path == str(tmp_path / f"adapter-{numbers[1]}")
    assert sorted(path.name for path in Path(slot.request.lora_path).iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"]  # fmt: skip
