"""From knobs to cells: what a trial suggests, which overrides that means, and the configuration that results."""

from __future__ import annotations

import itertools
import string
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.config.load import groups, leaves, load, quoted
from harness.config.resolve import resolve
from harness.config.schema import RunConfig
from harness.foundation.did_you_mean import nearest
from harness.foundation.digits import significant
from harness.models.checkpoint import content_hash
from harness.run.checks import check
from harness.studies.search.spec import Knob, Search, is_active
from harness.sweep import seed_words, with_default_precision

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

_HYDRA = threading.Lock()
"""Hydra keeps the configuration that it composes in one global place."""
DIGITS = 4
"""Significant digits of a real knob: more say nothing and make names unreadable."""
MAX_COMBINATIONS = 512
"""Combinations of choices that are composed before a search starts; of more, the first ones."""


def suggest(trial: BaseTrial, space: Mapping[str, Knob], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a trial, those of `fixed` as they are; real numbers with four significant digits."""
    values = dict[str, Any]()
    for name, knob in space.items():
        if name in fixed:
            values[name] = fixed[name]
        elif is_active(knob, values):
            values[name] = _one(trial, name, knob)
    return values


def _one(trial: BaseTrial, name: str, knob: Knob) -> Any:
    if knob.choices is not None:
        return trial.suggest_categorical(name, list(knob.choices))
    assert knob.low is not None and knob.high is not None
    if knob.is_whole:
        return trial.suggest_int(name, int(knob.low), int(knob.high), step=int(knob.step or 1), log=knob.log)
    return significant(
        trial.suggest_float(name, float(knob.low), float(knob.high), step=knob.step, log=knob.log), DIGITS
    )


def overrides_of(search: Search, values: Mapping[str, Any]) -> list[str]:
    """The overrides of a trial. Raises ValueError where one uses a knob that the trial does not have."""
    words = list(search.overrides)
    for name, value in values.items():
        choices = search.space[name].choices
        if isinstance(choices, dict):
            words += choices[str(value)]
        elif is_key(name):
            words.append(f"{name}={text(value)}")
    try:
        return [word.format_map({name: text(value) for name, value in values.items()}) for word in words]
    except KeyError as error:
        shown = ", ".join(f"{name}={text(value)}" for name, value in values.items())
        raise ValueError(f"an override uses {{{error.args[0]}}}, which does not exist beside {shown}") from None


def is_key(name: str) -> bool:
    """Is a knob's name an override key?"""
    return name.startswith(("knobs.", "task.options.")) or name in leaves(RunConfig) or name in groups()


def text(value: Any) -> str:
    """A value as Hydra's grammar wants it."""
    return quoted(significant(value, DIGITS))


def cell_of(overrides: list[str], seed: int) -> RunConfig:
    """The cell of some overrides at a seed, which seeds base and run. Raises ValueError where it cannot work, and for
    an override that sets a seed."""
    for word in seed_words(overrides):
        raise ValueError(f"{word}: a search seeds base and run together; valid: seeds of its file")
    with _HYDRA:
        config = load(with_default_precision(overrides))
    check(config)
    return replace(resolve(config, lambda path: content_hash(Path(path))), seed=seed, base_seed=seed)


def check_space(search: Search) -> None:
    """Raises ValueError, one line, for a knob that reaches no cell, for choices that cannot work together, and for the
    ends of ranges that cannot."""
    used = {field for word in _templates(search) for _, field, _, _ in string.Formatter().parse(word) if field}
    for name, knob in search.space.items():
        if not is_key(name) and name not in used and not isinstance(knob.choices, dict):
            known = nearest(name, [*leaves(RunConfig), *groups()])
            raise ValueError(f"space.{name}: not an override key, and no override uses {{{name}}}; {known}")
    has_ranges = any(knob.choices is None for knob in search.space.values())
    for end in ("low", "high") if has_ranges else ("low",):
        for values in itertools.islice(combinations(search.space, end), MAX_COMBINATIONS):
            _composed(search, overrides_of(search, values), _shown(search.space, values))
    for name, values in search.baselines.items():
        _composed(search, overrides_of(search, values), f"baseline {name}")
    for name, words in search.references.items():
        _composed(search, [*search.overrides, *words], f"reference {name}")


def _composed(search: Search, overrides: list[str], what: str) -> None:
    try:
        cell_of(overrides, search.seeds[0])
    except ValueError as error:
        raise ValueError(f"{what} cannot work: {error}") from None


def _shown(space: Mapping[str, Knob], values: Mapping[str, Any]) -> str:
    return " ".join(f"{n}={text(v)}" for n, v in values.items() if space[n].choices is not None) or "the space"


def _templates(search: Search) -> Iterator[str]:
    yield from search.overrides
    for knob in search.space.values():
        if isinstance(knob.choices, dict):
            yield from itertools.chain.from_iterable(knob.choices.values())


def combinations(space: Mapping[str, Knob], end: Literal["low", "high"] = "low") -> Iterator[dict[str, Any]]:
    """Every combination of choices that can exist; all ranges are at this end."""

    def grown(names: list[str], values: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not names:
            yield values
            return
        knob = space[names[0]]
        if not is_active(knob, values):
            yield from grown(names[1:], values)
            return
        for value in knob.choices if knob.choices is not None else (getattr(knob, end),):
            yield from grown(names[1:], {**values, names[0]: value})

    yield from grown(list(space), {})
