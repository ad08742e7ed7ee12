"""Our own generated Markdown as HTML, by markdown-it.

HTML in the text is escaped, so that nothing of a result file becomes markup; `<br>` in a table's cell is kept.
"""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.token import Token

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def to_html(text: str) -> str:
    """A document; its headings start below those of the page and its sections, and wide tables scroll."""
    tokens = _MARKDOWN.parse(text)
    for token in tokens:
        if token.type.startswith("heading_"):
            token.tag = f"h{min(int(token.tag[1:]) + 2, 6)}"
        elif token.type == "table_open":
            token.attrSet("class", "text")
        elif token.type == "th_open":
            token.attrSet("scope", "col")
    rendered = _MARKDOWN.renderer.render(_scrolling(tokens), _MARKDOWN.options, {})
    return rendered.replace("&lt;br&gt;", "<br>")


def _scrolling(tokens: list[Token]) -> list[Token]:
    """The tokens with a box around every table that the keyboard can scroll."""
    found: list[Token] = []
    for token in tokens:
        if token.type == "table_open":
            found.append(Token("html_block", "", 0, content='<div class="scroll" tabindex="0">'))
        found.append(token)
        if token.type == "table_close":
            found.append(Token("html_block", "", 0, content="</div>\n"))
    return found
