"""Speed measurements: ratios inside one interleaved run, never single timings."""
