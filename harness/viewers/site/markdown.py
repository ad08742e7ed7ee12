"""Our own generated Markdown as HTML: headings, paragraphs, lists, pipe tables, code, bold, emphasis, links.

Text is escaped first, so that nothing of a result file becomes markup; `<br>` in a table's cell is kept. Left out: what
our generators do not write (nested lists, images, quotes, fenced code).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import groupby

LINK = re.compile(r"\[([^\]]+)\]\(((?:https?://|#|\.\.?/)[^)\s]*)\)")
INLINE = (
    (re.compile(r"\*\*(.+?)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"<em>\1</em>"),
)


def to_html(text: str) -> str:
    """A document; its headings start one level lower, since the page has a title of its own."""
    lines = text.splitlines()
    return "\n".join(block for kind, group in groupby(lines, _kind) for block in _block(kind, list(group)))


def _kind(line: str) -> str:
    if not line.strip():
        return "blank"
    for kind, pattern in (("heading", r"#{1,5} "), ("table", r"\s*\|"), ("list", r"\s*[-*] ")):
        if re.match(pattern, line):
            return kind
    return "text"


def _block(kind: str, lines: list[str]) -> Iterator[str]:
    if kind == "heading":
        for line in lines:
            level = min(line.index(" ") + 2, 6)
            yield f"<h{level}>{inline(line.lstrip('#').strip())}</h{level}>"
    elif kind == "list":
        yield "<ul>" + "".join(f"<li>{inline(line.strip()[2:])}</li>" for line in lines) + "</ul>"
    elif kind == "table":
        yield _table(lines)
    elif kind == "text":
        yield f"<p>{inline(' '.join(lines))}</p>"


def _table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", _bare(line))] for line in lines]
    is_headed = len(rows) > 1 and all(re.fullmatch(r":?-+:?", cell) for cell in rows[1])
    head = rows[0] if is_headed else []
    body = rows[2:] if is_headed else rows
    top = "<thead><tr>" + "".join(f"<th scope=col>{inline(c)}</th>" for c in head) + "</tr></thead>" if head else ""
    filled = "".join("<tr>" + "".join(f"<td>{inline(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<div class=scroll tabindex=0><table class=text>{top}<tbody>{filled}</tbody></table></div>"


def _bare(line: str) -> str:
    return line.strip().removeprefix("|").removesuffix("|")


def inline(text: str) -> str:
    """Escaped text with code, bold, emphasis and links."""
    parts = re.split(r"`([^`]+)`", text.replace("\\|", "|"))
    return "".join(
        f"<code>{html.escape(part)}</code>" if index % 2 else _words(part) for index, part in enumerate(parts)
    )


def _words(text: str) -> str:
    escaped = html.escape(text, quote=False).replace("&lt;br&gt;", "<br>")
    for pattern, form in INLINE:
        escaped = pattern.sub(form, escaped)
    return LINK.sub(lambda found: f'<a href="{html.escape(found[2])}">{found[1]}</a>', escaped)
