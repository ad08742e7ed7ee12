"""The test tree mirrors `harness/` and `methods/`; shared pieces are imported from `tests`, not copied."""
