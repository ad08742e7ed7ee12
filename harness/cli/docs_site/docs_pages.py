"""Documentation pages made from the code, and links from `docs/` to files of the repository: a hook of mkdocs.

A line `<!-- generated: NAME -->` in a page of `docs/` becomes the text that `GENERATED[NAME]` makes when the site is
built, so that commands, methods and sweeps are never out of date. A file outside `docs/` that a page links to (a table
of results, the log, a figure) is copied into the site, with what it links to itself; a link to a file that does not
exist is left as it is, and `mkdocs build --strict` ends with an error.

Left out: the site's look and navigation, which are in mkdocs.yml.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING, Any

from harness.api import Method, Part, knobs
from harness.cli.methods import domain_lines, fixed_by, status_of
from harness.foundation.markdown_table import markdown_table
from harness.sweep.planning import SWEEPS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[3]
DOCS = "docs"
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
"""The target of a Markdown link or image that is a path, and what follows it; no scheme, and no anchor alone."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs: add the files outside `docs/` that pages link to."""
    from mkdocs.structure.files import File

    for path in linked_files(ROOT):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """mkdocs: put in what is generated, and turn paths of the repository into paths of the site."""
    source = page.file.abs_src_path
    assert source is not None, page.file.src_uri
    own = relinked(markdown, Path(source).relative_to(ROOT).as_posix())
    return MARKER.sub(lambda found: GENERATED[found[1]](), own)


def linked_files(root: Path) -> list[str]:
    """Files outside `docs/` that its pages link to, and those that these link to in turn; paths from `root`."""
    waiting = [path.relative_to(root).as_posix() for path in sorted((root / DOCS).rglob("*.md"))]
    found: set[str] = set()
    while waiting:
        page = waiting.pop()
        for target, _ in LINK.findall((root / page).read_text(encoding="utf-8")):
            path = normpath(join(dirname(page), target))
            is_outside = not path.startswith((f"{DOCS}/", "..")) and site_path(path) == path
            if is_outside and path not in found and (root / path).is_file():
                found.add(path)
                waiting += [path] if path.endswith(".md") else []
    return sorted(found)


def site_path(path: str) -> str:
    """Path in the site of a file of the repository: `docs/` is its root, and its first page stands for README.md."""
    return "index.md" if path == "README.md" else path.removeprefix(f"{DOCS}/")


def relinked(markdown: str, page: str) -> str:
    """The text of a page, whose path in the repository is `page`, with links as the site needs them."""
    here, there = dirname(page), dirname(site_path(page)) or "."
    return LINK.sub(lambda found: relpath(site_path(normpath(join(here, found[1]))), there) + found[2], markdown)


def commands_text(top: argparse.ArgumentParser) -> str:
    """Every command below a parser with its arguments and options."""
    return "\n".join(line for name, parser in subparsers(top) for line in _command_lines(name, parser))


def subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(full name, parser) of every command, those of commands with commands of their own among them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield sub.prog, sub
                yield from subparsers(sub)


def _command_lines(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield (parser.description or "") + "\n"
    rows = [
        (_usage(action), parser._get_formatter()._expand_help(action) if action.help else "")
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    if rows:
        yield table(("argument", "meaning"), rows)


def _usage(action: argparse.Action) -> str:
    """Spelling of an argument, as code: `--steps N`, `[NAME ...]`."""
    if isinstance(action.metavar, tuple):
        value = " ".join(action.metavar)
    else:
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest)
    if not action.option_strings:
        many = {"*": f"[{value} ...]", "+": f"{value} ...", "?": f"[{value}]"}
        return f"`{many.get(str(action.nargs), value)}`"
    shown = value if action.metavar or action.choices else value.upper()
    return f"`{', '.join(action.option_strings)}{'' if action.nargs == 0 else ' ' + shown}`"


def methods_text(methods: Mapping[str, Method]) -> str:
    """A table of all methods, every method with its parts, every part with its knobs and what they mean."""
    rows = [(f"[`{m.name}`](#{m.name})", status_of(m), m.summary, m.paper or "-") for m in methods.values()]
    names = part_names(methods)
    texts = ["## All of them\n", table(("method", "status", "what it does", "source"), rows), "## Method by method\n"]
    texts += [line for m in methods.values() for line in _method_lines(m, names)]
    texts += ["## Parts and their knobs\n", "A knob is set by `knobs.<Part>.<knob>=<value>`.\n"]
    parts = sorted(names.items(), key=lambda item: item[1])
    return "\n".join([*texts, *(line for kind, name in parts for line in _part_lines(kind, name))])


def part_names(methods: Mapping[str, Method]) -> dict[type[Part], str]:
    """Part -> its name as `parts=[...]` takes it, such as `flashrl.TIS`: by a method that has it with its defaults
    where there is one, and that its file is called after."""

    def farness(owner: tuple[Method, Part]) -> tuple[bool, bool]:
        method, part = owner
        return bool(_own_settings(part)), method.name != type(part).__module__.rpartition(".")[2]

    owners = [(method, part) for method in methods.values() for part in method.parts]
    found: dict[type[Part], str] = {}
    for method, part in sorted(owners, key=farness):
        found.setdefault(type(part), f"{method.name}.{type(part).__name__}")
    return found


def _method_lines(method: Method, names: Mapping[type[Part], str]) -> Iterator[str]:
    yield f"### `{method.name}` {{ #{method.name} }}\n"
    yield f"{plain(method.summary[:1].upper() + method.summary[1:])}.\n"
    facts = {
        "Status": status_of(method),
        "Source": plain(method.paper),
        "Its authors say": plain(method.claim),
        "Domain of its claims": plain("; ".join(domain_lines(method))),
        "Formats": ", ".join(f"`{name}`" for name in method.precisions),
        "Sets": ", ".join(f"`algo.{key}={value}`" for key, value in fixed_by(method).items()),
        "Parts": "; ".join(_part_with_settings(part, names[type(part)]) for part in method.parts),
        "Reconstructed": plain(method.reconstructed),
    }
    yield from (f"- {name}: {words}" for name, words in facts.items() if words)
    yield ""


def _part_with_settings(part: Part, name: str) -> str:
    """A link to the part, and the knobs that this method sets to something other than the part's default."""
    own = _own_settings(part)
    return f"[`{name}`](#{name})" + (f" with {', '.join(own)}" if own else "")


def _own_settings(part: Part) -> list[str]:
    """Knobs whose values are not the part's defaults, as code."""
    defaults = {name: default for name, default, _ in knob_rows(type(part))}
    return [f"`{name}={value}`" for name, value in knobs(part).items() if defaults[name] != repr(value)]


def _part_lines(kind: type[Part], name: str) -> Iterator[str]:
    yield f"### `{name}` {{ #{name} }}\n"
    yield plain(inspect.cleandoc(kind.__doc__ or "")) + "\n"
    rows = [(f"`{knob}`", f"`{default}`", words) for knob, default, words in knob_rows(kind)]
    if rows:
        yield table(("knob", "default", "meaning"), rows)


def knob_rows(kind: type[Part]) -> list[tuple[str, str, str]]:
    """(name, default, what the docstring below the field says) of every knob of a part.

    The default is written as JSON-like Python, a tuple as a list; "-" for a knob without one.
    """
    words = field_docs(kind)
    rows: list[tuple[str, str, str]] = []
    for one in fields(kind):
        value: Any = one.default if one.default_factory is MISSING else one.default_factory()
        shown = "-" if value is MISSING else repr([*value] if isinstance(value, tuple) else value)
        rows.append((one.name, shown, words.get(one.name, "")))
    return rows


@cache
def field_docs(kind: type) -> dict[str, str]:
    """Field -> the string below it in the source of a class or of the classes that it extends."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef), owner
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = inspect.cleandoc(words)
                case _:
                    pass
    return found


def sweeps_text(folder: Path) -> str:
    """Every sweep of a folder: the comment at the head of its file, indented lines of it as commands."""
    texts: list[str] = []
    for path in sorted(folder.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        head = [line[1:].removeprefix(" ") for line in lines[: _first(lines)]]
        texts += [f"## `{path.stem}`\n", "\n".join(_with_code(head)), ""]
    return "\n".join(texts)


def _first(lines: list[str]) -> int:
    """The first line that is no comment."""
    return next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))


def _with_code(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a comment as Markdown, a run of indented ones as a block of code."""
    is_code = False
    for line in lines:
        if line.startswith("  ") != is_code:
            is_code = not is_code
            yield "```" if not is_code else "\n```"
        yield line.removeprefix("  ") if is_code else plain(line)
    if is_code:
        yield "```"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    return markdown_table([*header], ([cell(word) for word in row] for row in rows), is_escaped=True) + "\n"


def cell(words: str) -> str:
    """Words for a cell of a table, on one line. Code keeps its signs: mkdocs splits no cell inside of it."""
    one = " ".join(words.split())
    return one if one.startswith(("`", "[`")) else plain(one)


def plain(words: str) -> str:
    """Words of a docstring with the signs that Markdown and HTML would take for their own escaped, code left alone."""
    return "`".join(
        part if number % 2 else re.sub(r"([<*_\[\]~|])", r"\\\1", part) for number, part in enumerate(words.split("`"))
    )


def section(markdown: str, title: str) -> str:
    """Text below a heading of the second level, up to the next one. Raises ValueError where there is none."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", markdown, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no heading '## {title}'")
    return found[1].strip()


def _commands() -> str:
    from harness.cli.main import parser

    return commands_text(parser())


def _methods() -> str:
    from methods import METHODS

    return methods_text(METHODS)


def _cases() -> str:
    """README's table of cases, with links as the site's first page needs them."""
    return relinked(section((ROOT / "README.md").read_text(encoding="utf-8"), "What to use"), "README.md")


GENERATED: dict[str, Callable[[], str]] = {
    "cases": _cases,
    "commands": _commands,
    "methods": _methods,
    "sweeps": lambda: sweeps_text(ROOT / SWEEPS),
}
"""Name in a page's marker -> the text that replaces it, its links as the site needs them."""
