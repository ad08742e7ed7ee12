"""`lowbit methods | metrics | doctor | passport | results | browse | site`: commands that look."""

from __future__ import annotations

import argparse

from harness.cli.arguments.kinds import Commands, command, places, positive


def add(commands: Commands) -> None:
    """Commands that look at methods, results and this machine."""
    methods = command(commands, "methods", "list the methods: parts, precisions, paper", _methods)
    methods.add_argument("names", nargs="*", metavar="NAME", help="these alone, with knobs (default: a table of all)")
    methods.add_argument("--json", action="store_true", help="machine-readable")

    metrics = command(commands, "metrics", "list the metrics: unit, direction, definition", _metrics)
    metrics.add_argument("--translate", action="store_true", help="our names beside those of other frameworks")

    places(command(commands, "doctor", "check this installation and machine", _doctor))

    passport = command(commands, "passport", "show planned and realized formats of a run, tensor by tensor", _passport)
    passport.add_argument("run_id", help="a run id or the beginning of one")
    places(passport)

    results = command(commands, "results", "verify, import, track or pack result files", _results)
    results.add_argument("action", choices=("verify", "import", "pack", "unpack"),
                         help="verify files, import runs, pack a sweep into one file, unpack it")  # fmt: skip
    results.add_argument("source", nargs="?", help="import: a results folder or its archive (none: rebuild MLflow); "
                                                   "pack, unpack: a sweep")  # fmt: skip
    places(results)

    browse = command(commands, "browse", "serve MLflow's pages over the results on this machine", _browse)
    browse.add_argument("sweep", nargs="?", help="log and open this sweep alone (default: all)")
    browse.add_argument("--compare", nargs="+", default=[], metavar="WORD",
                        help="open the saved comparison of SWEEP with these words: qurl flashrl int8")  # fmt: skip
    browse.add_argument("--port", type=positive, default=5000)
    places(browse)

    site = command(commands, "site", "write the static site of the results: leaderboard, figures, passports", _site)
    site.add_argument("sweeps", nargs="*", help="these sweeps alone (default: every sweep with results)")
    places(site)


def _methods(a: argparse.Namespace) -> int:
    from harness.cli.commands.inspecting import methods

    return methods(a.names, is_json=a.json)


def _metrics(a: argparse.Namespace) -> int:
    from harness.cli.commands.inspecting import metrics

    return metrics(is_translated=a.translate)


def _doctor(a: argparse.Namespace) -> int:
    from harness.cli.commands.doctoring import doctor

    return doctor(a.results)


def _passport(a: argparse.Namespace) -> int:
    from harness.cli.commands.inspecting import passport

    return passport(a.run_id, a.results)


def _results(a: argparse.Namespace) -> int:
    from harness.cli.commands.inspecting import import_all, pack_one, verify_all

    if a.action in ("pack", "unpack"):
        return pack_one(a.source, a.results, is_packing=a.action == "pack")
    return verify_all(a.results) if a.action == "verify" else import_all(a.source, a.results)


def _browse(a: argparse.Namespace) -> int:
    from harness.cli.commands.inspecting import browse_all

    return browse_all(a.results, a.port, a.sweep, a.compare)


def _site(a: argparse.Namespace) -> int:
    from harness.cli.commands.inspecting import site

    return site(a.results, a.sweeps)
