"""Run configurations: composed by Hydra, stored as JSON, hashed into the run id.

Hydra needs mutable structured configs, so its schema is derived from the frozen dataclasses of `harness.config.schema`,
and the composed tree is validated into them once. Nothing else sees OmegaConf types.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from harness.config.schema import DERIVED, FOLDER_SHAPE, TUNABLE, Launch, RunConfig
from harness.config.validation import element, in_words, nearest_key
from harness.config.validation import leaves as leaves
from harness.config.validation import parse as parse
from harness.foundation.did_you_mean import nearest
from methods import check_name

if typing.TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

CONF = Path(__file__).parent / "conf"
_BARE = re.compile(r"(?!(?:null|true|false|inf|nan)$)[a-z_/][\w./:+*-]*", re.ASCII | re.IGNORECASE)
"""Text that Hydra's grammar reads as text without quotes."""
PUBLISHED_INT4 = "int4_g128"
"""Format of `precision=int4` for a Hugging Face model, as published checkpoints have it."""


@cache
def _kinds(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> annotation, bounds included, of every field that holds a plain value."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            found |= _kinds(typing.cast(type, kind), f"{prefix}{name}.")
        elif not name.startswith("__"):
            found[prefix + name] = kind
    return found


@cache
def _check_value(override: str) -> None:
    """Raises ValueError, one line, where the value of `key=value` is not of the field's type or out of its bounds."""
    parsed = _parsed(override)
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        raise ValueError(f"{override}: one value is expected; a sweep's YAML file lists several, under axes or arms")
    value = parsed.value()
    if key == "method" and not (isinstance(value, str) and "${" in value):
        check_name(str(value))
    if key not in _kinds(RunConfig) or (isinstance(value, str) and "${" in value):
        return
    config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)
    try:
        kind = TypeAdapter(_kinds(RunConfig)[key], config=config)
        found = kind.validate_python(value, strict=isinstance(value, bool))
    except ValidationError as error:
        raise ValueError(in_words(error, RunConfig, prefix=key)) from None
    if isinstance(value, float) and isinstance(found, int):  # which OmegaConf refuses in words of its own
        raise ValueError(f"{override}: a whole number is expected, such as {found}")


def to_json(config: Any) -> dict[str, Any]:
    """A config dataclass as plain JSON values; `parse` turns it back into an equal one. Sparse fields at their default
    are left out."""
    return json.loads(json.dumps(_written(config)))


def _written(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if not (f.metadata.get("sparse") and value == f.default):
            values[f.name] = _plain_value(value)
    return values


def _plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _written(value)
    return [_plain_value(item) for item in value] if isinstance(value, tuple) else value


def run_id(config: RunConfig) -> str:
    """12 hexadecimal digits of the SHA-256 of every hashed field of a resolved config."""
    return hashlib.sha256(json.dumps(identity(to_json(config)), sort_keys=True).encode()).hexdigest()[:12]


def identity(values: Mapping[str, Any]) -> dict[str, Any]:
    """The hashed fields of a config as JSON: what makes a run the run it is. Paths and shares of memory do not."""
    left_out = _not_hashed()

    def kept(section: str, inner: Any) -> Any:
        if isinstance(inner, list):
            return [kept(section, item) for item in inner]
        return {k: v for k, v in inner.items() if (section, k) not in left_out} if isinstance(inner, dict) else inner

    return {section: kept(section, inner) for section, inner in values.items()}


@cache
def _not_hashed() -> tuple[tuple[str, str], ...]:
    kinds = typing.get_type_hints(RunConfig)
    sections = [(f.name, element(kinds[f.name])) for f in dataclasses.fields(RunConfig)]
    inner = [(name, f) for name, kind in sections if dataclasses.is_dataclass(kind) for f in dataclasses.fields(kind)]
    return tuple((name, f.name) for name, f in inner if not f.metadata.get("hashed", True))


def run_name(config: RunConfig) -> str:
    """A readable name, computed from the config and never typed by hand."""
    length = "" if config.task.n is None else str(config.task.n)
    mode = "" if config.algo.mode == "decoupled" else f"-{config.algo.mode}"
    engine = "" if config.engine.name == "embedded" else f"-{config.engine.name}"
    trainer = "" if config.trainer.name == "local" else f"-{config.trainer.name}"
    seeds = f"b{config.base_seed}-s{config.seed}"
    what = f"{config.method}-{config.precision.name}-{config.model.name}-{config.task.name}{length}"
    return f"{what}{mode}{engine}{trainer}-{seeds}"


@cache
def groups() -> dict[str, list[str]]:
    """Config group -> its choices, from the YAML files."""
    return {d.name: sorted(p.stem for p in d.glob("*.yaml")) for d in sorted(CONF.iterdir()) if d.is_dir()}


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain values, loaded safely. Raises ValueError naming the file and the line."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        if error.errno is not None:
            raise
        values = None  # OmegaConf's word for a file that holds a lone number
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path}: a value contains itself (an alias inside its own anchor)") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a mapping of keys to values is expected")
    return typing.cast(dict[str, Any], values)


def _plain(kind: Any) -> Any:
    """The nearest type that OmegaConf knows."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _schema(typing.cast(type, kind))
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        (inner,) = (a for a in typing.get_args(kind) if a is not type(None))
        return typing.Optional[_plain(inner)]  # noqa: UP045 - OmegaConf reads this form only
    if origin in (tuple, list):
        (inner, *_) = typing.get_args(kind)
        return list[Any] if dataclasses.is_dataclass(inner) else list[inner]
    return dict[str, Any] if origin is dict else kind


@cache
def _schema(cls: type) -> type:
    """The mutable twin of a frozen config dataclass, for Hydra."""
    hints = {k: v for k, v in typing.get_type_hints(cls).items() if not k.startswith("__")}
    fields: list[tuple[str, Any, Any]] = []
    for f in dataclasses.fields(cls):
        kind = _plain(hints[f.name])
        if dataclasses.is_dataclass(kind):
            default: Any = field(default_factory=typing.cast(type, kind))
        elif f.default_factory is not dataclasses.MISSING:
            default = field(default_factory=typing.cast(typing.Callable[[], Any], f.default_factory))
        elif isinstance(f.default, tuple):
            default = field(default_factory=lambda values=f.default: list(values))
        else:
            default = field(default="???" if f.default is dataclasses.MISSING else f.default)
        fields.append((f.name, kind, default))
    return dataclasses.make_dataclass(f"{cls.__name__}Schema", fields, kw_only=True)


def load(overrides: Sequence[str]) -> RunConfig:
    """Compose `conf/run.yaml` with Hydra overrides (`method=flashrl precision=int8+kv8 knobs.TIS.cap=4`).

    Raises ValueError, one line, for an unknown key, group choice or value, for a folder without model=hf, and for
    training of a base beside a folder's model.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides={overrides!r}: a list of words is expected, such as {overrides.split()}")
    prepared, suffix = _prepare(overrides)  # what it refuses needs no Hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        composed = _compose_cached(prepared) or _compose(prepared)
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        key = getattr(cause, "full_key", None)
        raise ValueError(f"{key}: " * bool(key) + " ".join(str(cause).split("\n")[0].split())) from None
    assert isinstance(tree, dict)
    values = typing.cast(dict[str, Any], tree)
    if values["model"]["path"] is not None:
        _adapt_to_folder(values, dict(override.split("=", 1) for override in prepared))
    if suffix:
        values["precision"].update(name=values["precision"]["name"] + "+kv8", kv="e4m3_kv")
    return parse(RunConfig, values)


def _adapt_to_folder(values: dict[str, Any], given: Mapping[str, str]) -> None:
    """Give a run with a folder's model the published INT4. Raises ValueError for another model, a shape or a setting of
    a base's training among the overrides, key -> value."""
    if given.get("model") != "hf":
        raise ValueError(f"model.path={values['model']['path']}: a folder needs model=hf beside it; add it")
    if key := next((key for key in given if key in ("base", "model.sft_lr") or key.startswith("base.")), None):
        raise ValueError(f"{key}={given[key]}: no base is trained here, the model is the folder; leave it out")
    shape = {f"model.{name}" for name in FOLDER_SHAPE}
    if key := next((key for key in given if key in shape), None):
        raise ValueError(f"{key}={given[key]}: the folder's config.json says the shape; leave it out")
    if given.get("precision") == "int4" and "precision.weights" not in given:
        values["precision"]["weights"] = PUBLISHED_INT4


def _compose(overrides: Sequence[str]) -> DictConfig:
    """Compose with Hydra itself."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="run_schema", node=_schema(RunConfig))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("run", overrides=list(overrides))


@cache
def _chosen(choices: tuple[str, ...]) -> DictConfig:
    return _compose(choices)


@cache
def _parsed(override: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        return OverridesParser.create().parse_overrides([override])[0]
    except OverrideParseException:
        key = override.partition("=")[0]
        raise ValueError(
            f"{override}: cannot be read; where the value has brackets, commas, quotes, = or spaces in it, write "
            f"\"{key}='...'\""
        ) from None


def _compose_cached(overrides: Sequence[str]) -> DictConfig | None:
    """The tree of some overrides, from the choices of groups, which Hydra composes once each, and the plain values,
    which it applies last and in order. None where an override is of another kind or wrong: Hydra then does it, or says
    why not."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    is_choice = [override.partition("=")[0] in groups() for override in overrides]
    values = [_parsed(word) for word, chooses in zip(overrides, is_choice, strict=True) if not chooses]
    if any(v.is_delete() or v.is_add() or v.is_sweep_override() or v.package is not None for v in values):
        return None
    tree = copy.deepcopy(_chosen(tuple(itertools.compress(overrides, is_choice))))
    try:
        for value in values:
            OmegaConf.update(tree, value.key_or_group, value.value(), merge=True, force_add=value.is_force_add())
    except OmegaConfBaseException:
        return None
    return tree


def quoted(value: Any) -> str:
    """A value as Hydra's override grammar writes it, quoted where it must be."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{quoted(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(quoted, value)) + "]"
    text = str(value)
    if not isinstance(value, str) or _BARE.fullmatch(text):
        return text
    # backslashes count only before a quote: the one in the text, or the one that ends it
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + "\\'" * len(found[2]), text) + "'"


def of_folder(folder: Path | str) -> list[str]:
    """Words of a run whose model is that of a folder."""
    return ["model=hf", f"model.path={quoted(str(folder))}"]


def split_launch(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(overrides of the run, values of its launch): words such as `launch.packing=true` set how a run happens.

    Raises ValueError, one line, for a field that is not the user's to set.
    """
    rest, values = list[str](), dict[str, Any]()
    for override in overrides:
        bare = override.lstrip("+")
        if not bare.startswith("launch."):
            rest.append(override)
            continue
        name, separator, _ = bare.removeprefix("launch.").partition("=")
        if name not in TUNABLE:
            raise ValueError(f"{override}: launch has no such setting; {nearest(name, TUNABLE)}")
        if not separator:
            raise ValueError(f"{override!r} is not of the form key=value")
        if _parsed(override).is_sweep_override():
            raise ValueError(f"{override}: one value is expected")
        values[name] = _parsed(override).value()
        if isinstance(values[name], bool) and not isinstance(getattr(Launch, name), bool):  # pydantic takes true for 1
            raise ValueError(f"{override}: neither true nor false is expected; default: {getattr(Launch, name)}")
    return rest, values


def launch_of(values: dict[str, Any], **places: str) -> Launch:
    """A launch with a user's settings. Raises ValueError, one line, for a wrong value."""
    try:
        return parse(Launch, {**values, **places})
    except ValueError as error:
        raise ValueError(f"launch.{error}") from None


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ValueError, one line, for a word that is wrong on its own: its key, its choice or its value, of the run
    or of its launch. Composes nothing, so it answers at once."""
    rest, given = split_launch(overrides)
    launch_of(given)
    _prepare(rest)


def _prepare(overrides: Sequence[str]) -> tuple[list[str], bool]:
    """Check keys, group choices and values with our own words, add `++` for open dictionaries, take `+kv8` off."""
    choices = groups()
    known = [*choices, *(name for name in _kinds(RunConfig) if name not in DERIVED)]
    prepared, suffix = [], False
    for override in overrides:
        key, separator, value = override.partition("=")
        bare = key.lstrip("+")
        if not separator or not bare:
            hint = f"such as {bare}=VALUE" if bare in known else nearest_key(bare, known)
            raise ValueError(f"{override!r} is not of the form key=value; {hint}")
        if bare.startswith("~"):
            raise ValueError(f"{override}: a key cannot be removed; set {bare[1:]} to a value or to null")
        if bare in DERIVED:
            raise ValueError(f"{override}: follows from the code and cannot be set; leave it out")
        is_open = bare.startswith(("knobs.", "task.options."))
        if not is_open and bare not in known:
            raise ValueError(f"unknown key {bare}; {nearest_key(bare, known)}")
        if bare == "precision":
            suffix, value = value.endswith("+kv8"), value.removesuffix("+kv8")
        if bare in choices and value not in choices[bare]:
            folder = f"; a folder: model=hf model.path={value}" if bare == "model" and "/" in value else ""
            raise ValueError(f"{bare}={value}: no such choice; {nearest(value, choices[bare])}{folder}")
        if bare not in choices:
            _check_value(f"{bare}={value}")
        prepared.append(f"{'++' * is_open}{bare}={value}")
    return prepared, suffix
