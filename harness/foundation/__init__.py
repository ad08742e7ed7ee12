"""Basics of any process: seeds, clocks, provenance, suggestions for misspelt names, state files, logs."""
