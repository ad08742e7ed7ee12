"""`make bench`: every speed bar as a ratio in one run, medians over interleaved repetitions."""

from __future__ import annotations

import sys

import torch

from harness.devtools.bench import fp8_flow, grpo_step, overhead, preparations, rilq, sampler, start
from harness.foundation.provenance import cpu_name

BENCHES = {
    "sampler": sampler.run,
    "grpo_step": grpo_step.run,
    "overhead": overhead.run,
    "fp8_flow": fp8_flow.run,
    "preparations": preparations.run,
    "rilq": rilq.run,
    "start": start.run,
}


def main(names: list[str]) -> int:
    """Run the named benches (default: all) and print one table each."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"bench: {unknown[0]!r} is unknown; valid: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    print(f"{cpu_name()}, torch {torch.__version__}, 1 thread")
    for name in names or BENCHES:
        rows = BENCHES[name]()
        columns = list(rows[0])
        cells = [[_text(row[c]) for c in columns] for row in rows]
        widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
        print(f"\n{name}")
        for line in (columns, *cells):
            print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
