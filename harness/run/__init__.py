"""One run in one process: the GRPO step, rollout batches, evaluations and the record."""
