"""The command line, an area per module: each declares its commands and calls `harness.commands` when one runs."""
