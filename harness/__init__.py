"""The harness: one GRPO/DAPO experiment under every rollout precision and every method.

`docs/architecture.md` maps its rooms and the order in which they import each other.
"""

# Bumped with every CHANGELOG line that moves numbers; part of every run id.
NUMERICS_VERSION = 1
