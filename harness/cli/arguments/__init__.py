"""The command line, an area per module: each declares its commands and calls `harness.cli.commands` when one runs."""
