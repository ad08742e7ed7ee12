"""The sync benchmark on a CUDA device: our kernels write the reference's codes, also as a graph, in flat memory."""

from __future__ import annotations

import pytest

from harness.devtools.bench import sync

pytestmark = pytest.mark.gpu


def test_own_kernels_write_the_references_codes_in_flat_memory() -> None:
    pytest.importorskip("triton", reason="Triton is not installed; it comes with CUDA builds of torch")
    rows = {(row["format"], row["what"]): row for row in sync.run("toy", "cuda", repeats=2)["rows"]}
    for fmt in sync.TIMED:
        for what in (sync.OWN, sync.GRAPH):
            assert (rows[fmt, what]["wrong_codes"], rows[fmt, what]["grown_bytes"]) == (0.0, 0), (fmt, what)
    assert rows[sync.TIMED[0], sync.TORCH]["wrong_codes"] == 0.0
