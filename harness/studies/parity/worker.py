"""One format in a process of its own: `python -m harness.studies.parity.worker CASE.json`.

Writes, atomically, what it found to the path that the case names: log-probs of every sampled token by vLLM, by the
embedded engine and by the float32 decoder, with the passport; or why vLLM refuses the format.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.api import Plan
from harness.engines.embedded.engine import EmbeddedEngine
from harness.foundation.whole_file import write_atomic
from harness.models.checkpoint import load_decoder
from harness.models.decoder import Decoder
from harness.numerics.formats import format_named, format_or_none
from harness.studies.parity.scoring import decoder_logp, engine_logp


@dataclass(frozen=True, kw_only=True)
class FormatCase:
    """One format to compare: the policy, the prompts and the sampling settings that its worker gets."""

    checkpoint: str
    """Folder of the policy."""
    weights: str
    acts: str | None
    kv: str | None
    device: str
    prompts: list[list[int]]
    num_samples: int
    """Responses to each prompt."""
    max_new_tokens: int
    temperature: float
    seed: int
    eos_id: int
    pad_id: int
    out: str
    """File of the answer, JSON."""

    @property
    def plan(self) -> Plan:
        """Formats of the case, as a plan."""
        return Plan(
            rollout_weights=format_named(self.weights),
            rollout_acts=format_or_none(self.acts),
            rollout_kv=format_or_none(self.kv),
        )


def stream(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Weight stream as a trainer sends it."""
    return ((name, tensor.detach()) for name, tensor in model.named_parameters())


def emulation(case: FormatCase, model: Decoder) -> EmbeddedEngine:
    """The embedded engine on the CPU with the case's formats, its cache calibrated as vLLM's is."""
    engine = EmbeddedEngine(model.config, case.plan, eos_id=case.eos_id, pad_id=case.pad_id)
    engine.load_weights(stream(model))
    engine.calibrate_kv(case.prompts)
    return engine


def measure(case: FormatCase) -> dict[str, Any]:
    """Sample with vLLM and score everywhere; or why vLLM refuses the format."""
    from harness.engines.vllm.engine import VLLMEngine

    model = load_decoder(Path(case.checkpoint))
    longest = max(map(len, case.prompts)) + case.max_new_tokens
    try:
        engine = VLLMEngine(
            model.config, case.plan, eos_id=case.eos_id, pad_id=case.pad_id, device=case.device, max_batch=64,
            max_length=longest, gpu_memory=0.06,
        )  # fmt: skip
    except ValueError as error:
        return {"status": "refused", "reason": str(error)}
    engine.load_weights(stream(model))
    engine.calibrate_kv(case.prompts)
    passport = engine.realized_plan()
    out = engine.generate(
        case.prompts, num_samples=case.num_samples, max_new_tokens=case.max_new_tokens, temperature=case.temperature,
        seed=case.seed,
    )  # fmt: skip
    engine.close()
    tokens, lengths = out.token_ids.cpu(), out.lengths.cpu()
    ours = engine_logp(emulation(case, model), case.prompts, tokens, case.temperature)
    exact = decoder_logp(model, case.prompts, tokens, case.temperature)
    is_token = torch.arange(tokens.shape[1]) < lengths[:, None]
    scores = {"vllm": out.logp.cpu(), "embedded": ours, "fp32": exact}
    return {
        "status": "ok",
        "num_responses": len(tokens),
        "scores": {name: logp[is_token].tolist() for name, logp in scores.items()},
        "passport": dataclasses.asdict(passport),
    }


def main(words: Sequence[str]) -> int:
    """Compare the format of a case file. Exit code 0 also where the format is refused, which the answer says."""
    case = FormatCase(**json.loads(Path(words[0]).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    answer = measure(case)
    write_atomic(Path(case.out), json.dumps(answer).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
