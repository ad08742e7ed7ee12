"""The house style as tests on the syntax trees. An exception is a line in EXCEPTIONS, with its reason."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import PurePosixPath

import pytest

from harness.numerics.formats import FORMATS
from methods import METHODS
from tests.source_tree import ROOT, Function, Scope, Source, dotted, imported, scopes, sources

Finding = tuple[str, str]
"""(key, message); the key is the path, or path::name of the function or class."""
Rule = Callable[[Source], Iterator[Finding]]

EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "broad_except",
        "harness/run/cell.py::run_cell",
    ): "process edge: the record must say what happened and the sweep goes on",
    (
        "broad_except",
        "harness/run/cell.py::_close",
    ): "process edge: an engine may raise anything as it goes, and the record is still to be written",
    (
        "broad_except",
        "methods/__init__.py::own",
    ): "edge to files of users: importing one may raise anything, which `lowbit doctor` tells",
    (
        "broad_except",
        "methods/__init__.py::joined",
    ): "edge to other packages: importing one may raise anything, which `lowbit doctor` tells",
    (
        "broad_except",
        "harness/trainers/verl/driver.py::attempt",
    ): "process edge: the cell must hear what ended verl's driver, and Ray's start raises bare Exception",
    (
        "broad_except",
        "harness/tasks/text_tokens.py::load_text_tokenizer",
    ): "edge to a library: tokenizers raises bare Exception for a file that is no tokenizer",
    (
        "forbidden_call",
        "harness/engines/vllm/engine.py::seeded",
    ): "vLLM draws from the default generator; its state is forked around the call",
    (
        "mutable_dataclass",
        "harness/run/run.py::Run",
    ): "owns what is alive during a run; its progress moves with the steps",
    ("method_branch", "harness/records/sweep_file.py"): "the defaults of a sweep's file, which may name other methods",
}
"""(rule, key) -> why this one place may break it."""

NAMES_METHODS = ("studies", "published", "viewers", "devtools", "cli")
"""Rooms that ask questions about chosen methods."""
ONE_HOME_ROOMS = (
    "harness/records/", "harness/sweep/", "harness/report/", "harness/published/", "harness/viewers/",
    *(f"harness/studies/{name}/" for name in ("replay", "parity", "throughput", "early_warning", "capacity")),
)  # fmt: skip
RESULT_FOLDERS = ("runs", "packed", "tables", "figures", "bases", "bench")
HOMES = {
    "folder": "harness/records/paths.py",
    "colour": "harness/report/plots/colours.py",
    "savefig": "harness/report/plots/save.py",
}
VAGUE = {"util", "utils", "helper", "helpers", "common", "misc"}
FORBIDDEN_CALLS = {
    "eval": "nothing read or generated is executed",
    "exec": "nothing read or generated is executed",
    "hash": "differs between processes; use harness.foundation.seeds or hashlib",
    "np.random.seed": "global generator; pass one from harness.foundation.seeds.generator",
    "numpy.random.seed": "global generator; pass one from harness.foundation.seeds.generator",
    "pickle.load": "nothing is unpickled from disk",
    "pickle.loads": "nothing is unpickled from disk",
    "random.seed": "global generator; pass one from harness.foundation.seeds.generator",
    "torch.amp.autocast": "precision is explicit at every boundary",
    "torch.autocast": "precision is explicit at every boundary",
    "torch.manual_seed": "global generator; pass one from harness.foundation.seeds.generator",
    "torch.set_default_dtype": "precision is explicit at every boundary",
    "yaml.load": "YAML is loaded safely",
}
FRAMEWORK_METHODS = {"forward", "backward", "setup_context"}
"""Documented by torch, for every module and every autograd function."""
FIRST_WORDS = {"How", "Of", "What", "When", "Where", "Whether", "Which", "Who", "Why"}
"""Words that no docstring begins with: "What is pushed" is "Tensors of a push"."""
# Written in two halves, so that this file is no finding of its own.
MACHINE_WORDS = re.compile(
    r"(?<![\w.])/(wo{}rk|fa{}rm|roo{}t|tm{}p|ho{}me/\w+|Us{}ers/\w+)/|\.py{}env|pypi\.o{}rg|files\.python{}hosted"
    r"|registry\.np{}mjs|deb\.deb{}ian".replace("{}", "()")
)


@cache
def documented_hooks() -> set[str]:
    """Method names that `Part` or a protocol of ours documents, so that an override need not say it again."""
    bases = ("Part", "Protocol")
    return {
        scope.node.name
        for source in sources("harness")
        for scope in scopes(source.tree)
        if isinstance(scope.parent, ast.ClassDef) and ast.get_docstring(scope.node)
        if scope.parent.name in bases or any(dotted(base) in bases for base in scope.parent.bases)
    }


def functions(source: Source) -> Iterator[tuple[Scope, Function]]:
    """Every function and method of the file."""
    for scope in scopes(source.tree):
        if not isinstance(scope.node, ast.ClassDef):
            yield scope, scope.node


def enclosing(source: Source, line: int) -> str:
    """Key of the innermost function or class around `line`, or of the file."""
    around = [s.name for s in scopes(source.tree) if s.node.lineno <= line <= (s.node.end_lineno or 0)]
    return f"{source.path}::{around[-1]}" if around else source.path


def vague_name(source: Source) -> Iterator[Finding]:
    """A module is named for the one thing in it."""
    words = {word for part in PurePosixPath(source.path).with_suffix("").parts for word in part.split("_")}
    if words & VAGUE:
        yield source.path, f"named {', '.join(sorted(words & VAGUE))}; name it for the one thing in it"


def broad_except(source: Source) -> Iterator[Finding]:
    """Errors travel: what is caught is named."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in caught):
                yield enclosing(source, node.lineno), f"line {node.lineno} catches everything"


def docstrings(source: Source) -> Iterator[Finding]:
    """Modules, public functions and public classes say what they are; a property is a field and need not."""
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield source.path, "the module has no docstring"
    inherited = documented_hooks() | FRAMEWORK_METHODS
    for scope in scopes(source.tree):
        is_public = not any(part.startswith("_") for part in scope.name.split("."))
        is_inner = any(not isinstance(outer, ast.ClassDef) for outer in scope.outer)
        is_known = isinstance(scope.parent, ast.ClassDef) and scope.node.name in inherited
        is_field = any(dotted(mark) in ("property", "cached_property") for mark in scope.node.decorator_list)
        if is_public and not (is_inner or is_known or is_field) and not ast.get_docstring(scope.node):
            yield f"{source.path}::{scope.name}", "no docstring"


def first_words(source: Source) -> Iterator[Finding]:
    """A docstring begins with a noun phrase or a verb, as one would search for it, never as half a question."""
    for node in ast.walk(source.tree):
        said = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(said, str) and (word := said.split(maxsplit=1)[0]) in FIRST_WORDS:
            yield enclosing(source, node.lineno), f"line {node.lineno}: a docstring begins with {word!r}"


def seed_arithmetic(source: Source) -> Iterator[Finding]:
    """Seeds are hashed from their parts; neighbouring seeds share random streams."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr | ast.BitAnd):
            names = [dotted(side).rpartition(".")[2] for side in (node.left, node.right)]
            if any(name == "seed" or name.endswith("_seed") for name in names):
                yield enclosing(source, node.lineno), f"line {node.lineno} computes with a seed; use stable_seed"


def forbidden_call(source: Source) -> Iterator[Finding]:
    """Calls that break reproducibility, explicit precision or safety."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            reason = FORBIDDEN_CALLS.get(name)
            safe = any(word.arg == "weights_only" and dotted_true(word.value) for word in node.keywords)
            if name == "torch.load" and not safe:
                reason = "only with weights_only=True"
            if reason:
                yield enclosing(source, node.lineno), f"line {node.lineno} calls {name}: {reason}"


def dotted_true(node: ast.AST) -> bool:
    """Is the expression the constant True?"""
    return isinstance(node, ast.Constant) and node.value is True


def mutable_dataclass(source: Source) -> Iterator[Finding]:
    """Data is frozen. The owner of a live resource is an exception with its reason."""
    for scope in scopes(source.tree):
        for mark in scope.node.decorator_list if isinstance(scope.node, ast.ClassDef) else []:
            call = mark.func if isinstance(mark, ast.Call) else mark
            words = mark.keywords if isinstance(mark, ast.Call) else []
            is_frozen = any(word.arg == "frozen" and dotted_true(word.value) for word in words)
            if dotted(call).endswith("dataclass") and not is_frozen:
                yield f"{source.path}::{scope.name}", "a dataclass that is not frozen"


def method_branch(source: Source) -> Iterator[Finding]:
    """Methods are known in `methods/` alone: nothing up to the reports names one, or takes a class out of its file."""
    if not source.path.startswith("harness/") or source.path.split("/")[1] in NAMES_METHODS:
        return
    docs = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(text := node.value, str) and id(node) not in docs:
            named = {text, text.partition(" ")[0]} & method_names()
            yield from ((enclosing(source, node.lineno), f"line {node.lineno} names the method {n!r}") for n in named)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(re.search(r"(^|\.)method(_name|\.name)?$", dotted(side)) for side in sides) and any(
                isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides
            ):
                yield enclosing(source, node.lineno), f"line {node.lineno} branches on the name of a method"
    for line, module in imported(source):
        if module.startswith("methods."):
            yield source.path, f"line {line} imports {module}; the registry gives methods by name"


@cache
def method_names() -> frozenset[str]:
    """The registered methods, less those that are called as the format they run in."""
    return frozenset(METHODS) - set(FORMATS)


def one_home(source: Source) -> Iterator[Finding]:
    """The layout of a results folder, colours and saving a figure stand in one file each: HOMES."""
    for node in ast.walk(source.tree):
        what = ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            what = "folder" if node.right.value in RESULT_FOLDERS else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            what = "colour" if re.fullmatch(r"#[0-9A-Fa-f]{6}", node.value) else ""
        elif isinstance(node, ast.Call):
            what = "savefig" if dotted(node.func).endswith(".savefig") else ""
        if what and source.path != HOMES[what] and (what == "folder" or source.path.startswith(ONE_HOME_ROOMS)):
            yield enclosing(source, node.lineno), f"line {node.lineno} spells a {what}; its home is {HOMES[what]}"


def silent_skip(source: Source) -> Iterator[Finding]:
    """A test that is skipped says why, and none is skipped always."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "pytest.mark.skip":
            yield enclosing(source, node.lineno), f"line {node.lineno} skips always"
        if isinstance(node, ast.Call) and dotted(node.func) in ("pytest.skip", "pytest.mark.skipif"):
            has_reason = bool(node.args if dotted(node.func) == "pytest.skip" else node.keywords)
            if not has_reason:
                yield enclosing(source, node.lineno), f"line {node.lineno} skips without a reason"


EVERYWHERE = (vague_name, broad_except, first_words)
PACKAGES = (docstrings, seed_arithmetic, forbidden_call, mutable_dataclass, method_branch, one_home)
RULES: dict[Rule, tuple[str, ...]] = {
    **dict.fromkeys(EVERYWHERE, ("harness", "methods", "tests")),
    **dict.fromkeys(PACKAGES, ("harness", "methods")),
    silent_skip: ("tests",),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    found = {(rule.__name__, key): said for source in sources(*RULES[rule]) for key, said in rule(source)}
    broken = [f"{key}: {said}" for (name, key), said in found.items() if (name, key) not in EXCEPTIONS]
    assert not broken, f"\n{rule.__doc__}\n" + "\n".join(broken)
    stale = [key for name, key in EXCEPTIONS if name == rule.__name__ and (name, key) not in found]
    assert not stale, f"these need no exception from {rule.__name__} any more: {stale}"


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (vague_name, "harness/tensor_utils.py", ""),
        (vague_name, "harness/common/x.py", ""),
        (broad_except, "harness/x.py", "try:\n    f()\nexcept (KeyError, Exception):\n    g()"),
        (broad_except, "harness/x.py", "try:\n    f()\nexcept:\n    g()"),
        (docstrings, "harness/x.py", '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): ...'),
        (docstrings, "harness/x.py", "X = 1"),
        (first_words, "harness/x.py", '"""What a file holds."""'),
        (first_words, "methods/x.py", 'X = 1\n"""Of the batch."""'),
        (seed_arithmetic, "harness/x.py", "f(config.seed + i)"),
        (seed_arithmetic, "methods/x.py", "g(1000 * base_seed)"),
        (forbidden_call, "harness/x.py", "torch.load(path, weights_only=False)"),
        (forbidden_call, "harness/x.py", "torch.manual_seed(0)"),
        (mutable_dataclass, "harness/x.py", "@dataclass(kw_only=True)\nclass A:\n    x: int"),
        (method_branch, "harness/run/x.py", 'if config.method.name == "bf16":\n    pass'),
        (method_branch, "harness/run/x.py", 'if "none" == method:\n    pass'),
        (method_branch, "harness/report/x.py", 'LOOKS = {"qurl": "blue"}'),
        (method_branch, "harness/report/x.py", 'LINE = "naive bypass_ppo"'),
        (method_branch, "harness/trainers/x.py", "def f(part):\n    from methods.flashrl import Profile"),
        (one_home, "harness/cli/x.py", 'folder = results / "runs"'),
        (one_home, "harness/published/x.py", 'ax.plot(x, color="#D55E00")'),
        (one_home, "harness/viewers/x.py", "figure.savefig(path)"),
        (silent_skip, "tests/x.py", "@pytest.mark.skip(reason='no')\ndef test_a(): ..."),
        (silent_skip, "tests/x.py", "pytest.skip()"),
    ],
)
def test_a_broken_rule_is_found(rule, path, text):
    assert list(rule(Source(path, text)))


def test_clean_code_passes():
    text = '"""Doc."""\n\n\ndef f(seed: int) -> int:\n    """Doc."""\n    return stable_seed(seed, "rollout", 1)\n'
    assert not [finding for rule in RULES for finding in rule(Source("harness/x.py", text))]


def test_no_machine_or_registry_is_named():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of the project's own files")
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content:
            lines = enumerate(content.decode(errors="replace").splitlines(), start=1)
            found += [f"{name}:{number}: {line.strip()}" for number, line in lines if MACHINE_WORDS.search(line)]
    assert not found, "\n" + "\n".join(found)
    assert MACHINE_WORDS.search("see /{}/x".format("root")) and not MACHINE_WORDS.search("tests/tmp_path and roots/")
