"""Records on disk and the numbers made from them: run results, arms, packed sweeps, statistics."""
