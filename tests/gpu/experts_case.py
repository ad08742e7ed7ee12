"""`python -m tests.gpu.experts_case [FORMAT ...]`: mixtures of experts under vLLM, format by format, in one process.

A line for each: the kernel; the gap of experts' answers in every format that inputs may have, as a share of their norm;
nats from the emulation and from other weights; what the passport said. With an engine that dies or a passport that is
refused, its error. A first look before the tests of swaps, which assert (`pytest -m gpu tests/gpu/test_vllm_swap.py -k
experts`).
"""

from __future__ import annotations

import sys
import time

import torch

from tests.engines.engine_cases import weights
from tests.gpu import vllm_cases
from tests.gpu.vllm_cases import FAMILIES, MIXTURES, Case, greedy, mean_gap, started


def main(names: list[str]) -> None:
    """Print the lines."""
    for case in MIXTURES:
        if not names or case.name.partition(",")[0] in names:
            start = time.perf_counter()
            try:
                said = look(case)
            except (RuntimeError, ValueError, AssertionError, TypeError, LookupError, AttributeError) as error:
                said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"{case.name}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)


def look(case: Case) -> str:
    """The findings on one format."""
    from vllm.config import set_current_vllm_config

    from harness.engines.vllm import experts
    from harness.engines.vllm.push_by_reload import live_experts

    a, b = (vllm_cases.model_of(case, seed) for seed in (1, 2))
    with started(FAMILIES[case.family], case.plan) as engine:
        first: list[str] = []
        for model in (a, b, a):
            engine.load_weights(weights(model))
            said = greedy(engine)
            first.append(str(said.token_ids.tolist()))
            if model is b:
                far = said
        gaps: dict[str, float] = {}
        kernel = ""
        for name, layer in live_experts(engine.model):
            told = engine.weights.sent_experts[name]
            with set_current_vllm_config(engine.vllm_config):
                each = experts.gaps_of(layer, told, case.plan, engine.device)
            for fmt, gap in zip(told.formats, each.amax(1).tolist(), strict=True):
                gaps[fmt] = max(gaps.get(fmt, 0.0), gap)
            kernel = experts.kernel_name(layer)
        emulated = vllm_cases.embedded(a, case.plan)
        near, other = mean_gap(said, greedy(emulated)), mean_gap(said, far)
        try:
            ours = {(r.name, r.format, r.hash) for r in emulated.realized_plan().weights}
            passport = engine.realized_plan()
            theirs = {(r.name, r.format, r.hash) for r in passport.weights}
            words = (
                f"{len(ours ^ theirs) // 2} of {len(ours)} lines differ, inputs {sorted(set(passport.acts.values()))}"
            )
        except RuntimeError as error:
            words = f"refused: {error}"
    shown = ", ".join(f"{fmt} {gap:.4f}" for fmt, gap in gaps.items())
    same = "the same" if first[0] == first[2] else "OTHER"
    return f"{kernel}; {shown}; {near:.3f} nats near, {other:.3f} far; {same} tokens after A, B, A; passport: {words}"


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1:])
