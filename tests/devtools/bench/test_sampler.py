"""The bench of the embedded sampler: every contestant is timed, and ratios are to those they name."""

from __future__ import annotations

import pytest

from harness.devtools.bench import sampler


def test_ratios_are_to_transformers_and_to_the_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SIZES", ("xs",)), ("ROWS", 16), ("NEW", 4), ("REPEATS", 1)):
        monkeypatch.setattr(sampler, name, value)
    rows = {row["what"]: row for row in sampler.run()}
    assert list(rows) == ["linears only", "transformers generate", "own fp32", "own fp32, 8 samples per prompt",
                          "own bf16 (emulated)"]  # fmt: skip
    for row in rows.values():
        rate = row["tokens_per_s"]
        assert row["times_transformers"] == pytest.approx(rate / rows["transformers generate"]["tokens_per_s"])
        assert row["share_of_linears_only"] == pytest.approx(rate / rows["linears only"]["tokens_per_s"])


def test_the_products_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 layers, a prefill and 3 further steps: 4 products a layer and the head, of as many weights as the model's
    linear layers have."""
    monkeypatch.setattr(sampler, "ROWS", 2)
    monkeypatch.setattr(sampler, "NEW", 4)
    model = sampler.decoder("xs")
    seen: list[tuple[int, int]] = []
    call = sampler.linears_only(model.config)
    monkeypatch.setattr(sampler.F, "linear", lambda x, w: seen.append((len(x), w.numel())))
    call()
    linear = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2)
    assert sum(size for rows, size in seen if rows == 2 * sampler.PROMPT) + seen[-1][1] == linear
    assert len(seen) == 4 * (4 * 2 + 1) and seen[-1] == (2, 32 * 64)
