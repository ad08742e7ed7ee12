"""A headless browser for the tests of the site: the page after its script ran, at a desktop's width or a phone's."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PHONE = 390
"""Width of a phone in CSS pixels; a browser's window cannot be that narrow, a frame can."""


def dom(results: Path, address: str, page: str = "index.html") -> str:
    """The page after its script ran, as a browser has it."""
    if BROWSER is None:
        pytest.skip("neither Chromium nor Chrome is installed")
    url = (results / "site" / page).as_uri() + address
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    options += ["--window-size=1280,900", "--hide-scrollbars", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={results / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    done = subprocess.run([BROWSER, *options, url], capture_output=True, text=True, timeout=240)
    assert 'data-ready="yes"' in done.stdout, done.stderr[-2000:]
    return done.stdout


def answer(results: Path, script: str, *, is_phone: bool = False) -> Any:
    """Result of a function's body that runs behind the page's own script: `page` is its window."""
    ask = f"window.asked = (page) => {{ const $ = (id) => page.document.getElementById(id); {script} }};"
    write = """
      const give = (page) => document.body.append(Object.assign(document.createElement("pre"),
        { id: "found", textContent: JSON.stringify(window.asked(page)) }));"""
    if is_phone:
        body = f'<iframe id="phone" src="index.html" style="width:{PHONE}px;height:800px;border:0"></iframe>'
        text = f"""<!doctype html><body>{body}<script>{ask}{write}
          document.getElementById("phone").addEventListener("load", (event) => {{
            give(event.target.contentWindow); document.documentElement.dataset.ready = "yes"; }});</script></body>"""
    else:
        text = (results / "site" / "index.html").read_text(encoding="utf-8")
        text = text.replace("</body>", f"<script>{ask}{write} give(window);</script></body>")
    (results / "site" / "asked.html").write_text(text, encoding="utf-8")
    found = re.search(r'<pre id="found">(.*?)</pre>', dom(results, "", "asked.html"), re.S)
    assert found is not None
    return json.loads(html.unescape(found[1]))
