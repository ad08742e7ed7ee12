"""`python -m tests.gpu.sleep_case FORMAT`: puts one engine to sleep and wakes it, in a process of its own.

The last line: GiB that came back | tensors that moved | nats between before and after | what a second such engine said
| KV scales that changed.
"""

from __future__ import annotations

import sys

import torch

from tests.engines.engine_cases import weights
from tests.gpu import vllm_cases
from tests.gpu.vllm_cases import FAMILIES, FORMATS, KV8, gap, greedy, started


def main(name: str) -> None:
    """Print the line."""
    from harness.engines.vllm import engine as engines
    from harness.engines.vllm import kv

    engines.small_cache = lambda *_: {"kv_cache_memory_bytes": 4 * 2**30}  # these prompts need but a few MiB
    case = next(case for case in (*FORMATS, *KV8) if case.name == name)
    with started(FAMILIES[case.family], case.plan, can_sleep=True) as engine:
        engine.load_weights(weights(vllm_cases.model_of(case, 1)))
        engine.calibrate_kv(vllm_cases.LONG)
        scales = kv.all_scales(engine.model)
        said, places = greedy(engine), vllm_cases.pointers(engine)
        free = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - free
        try:
            greedy(engine)
        except RuntimeError as error:
            assert "asleep" in str(error), error
        engine.wake()
        after, kept = vllm_cases.pointers(engine), kv.all_scales(engine.model)
        engine.load_weights(weights(vllm_cases.model_of(case, 1)))
        nats = gap(greedy(engine), said)
        engine.realized_plan()
        try:
            with started(FAMILIES[case.family], case.plan, can_sleep=True):
                refused = "nothing"
        except ValueError as error:
            refused = str(error)
    moved, changed = sum(after[key] != places[key] for key in places), sum(kept[key] != scales[key] for key in scales)
    print(f"{freed / 2**30:.2f}|{moved}|{nats:.3g}|{refused}|{changed}")


if __name__ == "__main__":
    main(sys.argv[1])
