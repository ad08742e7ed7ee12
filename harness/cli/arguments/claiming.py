"""`lowbit claims`: published claims beside our results."""

from __future__ import annotations

import argparse

from harness.cli.arguments.kinds import Commands, command, places


def add(commands: Commands) -> None:
    """Published claims beside our results."""
    claims = command(commands, "claims", "test published claims on the results and write the table of badges", _claims)
    claims.add_argument("ids", nargs="*", metavar="ID", help="show these in full and write nothing (default: all)")
    claims.add_argument("--check", action="store_true", help="write nothing; exit 1 where the table is out of date")
    places(claims)


def _claims(a: argparse.Namespace) -> int:
    from harness.cli.commands.claiming import claims

    return claims(a.ids, a.results, is_check=a.check)
