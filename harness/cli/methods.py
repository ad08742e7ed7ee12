"""`lowbit methods`: every method with its parts, precisions, paper and domain, and what can run it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.api import Method

SMALL, LARGE = "s128", "7b"
"""Models whose effective bits are shown: 3 million parameters, and the shape of Qwen2.5-7B."""
COLUMNS = 100
"""Width of the list where the output is no terminal."""
STATUSES = {
    "control": "a rule to compare with",
    "exact": "the rule as its source gives it",
    "reconstructed": "part of the rule is ours, because no source gives it",
    "own": "a rule of no paper",
}
ENGINES = ("embedded", "vllm", "verl")
"""Engines that can run a method; vllm: the GPU's build, with the local trainer; verl: that under trainer=verl."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone, with knobs (default: a list of all)")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(a: argparse.Namespace) -> int:
    """Print the methods."""
    return methods(a.names, is_json=a.json)


def methods(names: Sequence[str], *, is_json: bool) -> int:
    """Every method in a list; the named ones with their parts, knobs and what of them is reconstructed."""
    from methods import METHODS, method_named, registry

    chosen = [method_named(name) for name in names] or list(METHODS.values())
    if is_json:
        print(json.dumps({m.name: _as_json(m) for m in chosen}, indent=2))
    elif names:
        print("\n".join(line for m in chosen for line in _lines(m)))
    else:
        print("\n".join(_list(chosen)))
        for reason in registry().broken.values():
            print(f"left out: {reason}", file=sys.stderr)
    return 0


def _as_json(m: Method) -> dict[str, Any]:
    from harness.api import knobs

    return {
        "paper": m.paper, "summary": m.summary, "claim": m.claim, "status": status_of(m), "domain": domain_lines(m),
        "is_control": m.is_control, "parts": {type(p).__name__: knobs(p) for p in m.parts}, "fixed": fixed_by(m),
        "precisions": list(m.precisions), "engines": engines_of(m), "reconstructed": m.reconstructed,
    }  # fmt: skip


def _list(chosen: Sequence[Method]) -> Iterator[str]:
    """A paragraph per method, by status, as wide as the terminal (100 columns in a pipe), and where to read on."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else COLUMNS
    for status, meaning in STATUSES.items():
        found = [m for m in chosen if status_of(m) == status]
        yield from [f"{status}: {meaning}"] if found else []
        for m in found:
            yield from wrap(f"  {m.name:<20}  {m.claim or m.summary}", width, subsequent_indent=" " * 24)
    yield ""
    yield from wrap("Behind a method of a paper stands the claim of its authors. lowbit methods NAME shows its source, "
                    "domain, parts, knobs, formats and engines.", width)  # fmt: skip


def _lines(m: Method) -> Iterator[str]:
    """Everything of one method."""
    from harness.api import knobs

    engines = engines_of(m)
    yield f"{m.name}: {m.summary}" + "".join(f", {key}={value}" for key, value in fixed_by(m).items())
    facts = [
        ("status", status_of(m)), ("paper", m.paper), ("claim", m.claim),
        *(("domain", line) for line in domain_lines(m) or [""]),
        ("formats", " ".join(m.precisions)), ("engines", " ".join(engines)), ("bits", bits_line(m)),
    ]  # fmt: skip
    for part in m.parts:
        settings = ", ".join(f"{name}={value}" for name, value in knobs(part).items())
        facts.append(("part", f"{type(part).__name__}({settings})"))
    facts += [("reconstructed", m.reconstructed)] if m.reconstructed else []
    facts += [(f"not {name}", refusal(name, m, m.precisions[0])) for name in ENGINES if name not in engines]
    yield from (f"    {title:<14} {words or '-'}" for title, words in facts)


def fixed_by(method: Method) -> dict[str, str]:
    """Settings of the algorithm that the method fixes."""
    return {key: value for key in ("mode", "agg", "denom") if (value := getattr(method, key)) is not None}


def bits_line(method: Method) -> str:
    """Effective bits per weight at the rollout, precision by precision, of a small and a large model."""
    from harness.config.compose import compose
    from harness.config.decoder_config import decoder_config
    from harness.config.load import load
    from harness.records.effective_bits import bits_of_plan
    from harness.studies.throughput.shapes import shape_of

    shapes = [decoder_config(load([f"model={SMALL}"]).model), shape_of(LARGE)]
    found: list[str] = []
    for name in method.precisions:
        plan = compose(replace(load([f"precision={name}"]), method=method.name)).plan
        found.append(f"{name} " + "/".join(f"{bits_of_plan(plan, model):.2f}" for model in shapes))
    return f"{', '.join(found)} (a weight of the linear layers, sizes {SMALL}/{LARGE})"


def domain_lines(method: Method) -> list[str]:
    """Settings that the claims of the method's paper speak of (`claims.yaml`), in words; empty for a control."""
    from harness.published.claims.domains import domain_text, domains_of

    return [] if method.is_control else [domain_text(domain) for domain in domains_of(method.paper)]


def status_of(method: Method) -> str:
    """One of `STATUSES`."""
    if method.is_control or not method.paper:
        return "control" if method.is_control else "own"
    return "reconstructed" if method.reconstructed else "exact"


def engines_of(method: Method) -> list[str]:
    """The engines that can run the method at one of its precisions."""
    return [engine for engine in ENGINES if any(refusal(engine, method, name) is None for name in method.precisions)]


def refusal(engine: str, method: Method, precision: str) -> str | None:
    """Reason why an engine cannot run the method at a precision; None where it can."""
    from harness.config.compose import check_supported, compose
    from harness.config.load import load
    from harness.engines.embedded.engine import EmbeddedEngine
    from harness.engines.vllm import builds
    from harness.trainers.local.trainer import EXTRAS
    from harness.trainers.verl import checks

    config = replace(load([f"precision={precision}"]), method=method.name)
    if engine == "verl":
        trainer, vllm = replace(config.trainer, name="verl"), replace(config.engine, name="vllm")
        config = replace(config, trainer=trainer, engine=vllm)
    supports = EmbeddedEngine.supports if engine == "embedded" else builds.supports(builds.CUDA)
    try:
        composed = compose(config)
        if engine == "verl":
            checks.check(config, composed)
        if engine != "embedded":
            builds.check_plan(builds.CUDA, composed.plan)
        check_supported(composed, supports, engine, EXTRAS)
    except ValueError as error:
        return str(error)
    return None
