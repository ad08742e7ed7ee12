"""The harness: one GRPO/DAPO experiment under every rollout precision and every method."""

# Bumped with every CHANGELOG line that moves numbers; part of every run id.
NUMERICS_VERSION = 1
