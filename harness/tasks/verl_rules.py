r"""Reward rules of verl for mathematical answers, answer for answer as verl 0.9.1 scores them.

| rule | source | an answer is |
| --- | --- | --- |
| verl_gsm8k | verl/utils/reward_score/gsm8k.py, strict | the number after the last `#### ` of the last 300 characters |
| verl_gsm8k_flexible | the same file, flexible | the last run of digits, dots and commas there |
| dapo | verl/utils/reward_score/math_dapo.py | the last `Answer:` line of the last 300 characters, else the last box |
| answer_tag | QeRL's utils/rewards.py (github.com/NVlabs/QeRL) | what stands in the last `<answer>` tag |

Each returns (is it right, the answer as it was read; None where there is none). Equality is of text, so `72.` differs
from `72`. DAPO's +1 and -1 are `algo.reward_scale=plus_minus`. verl's math-verify rule needs a process:
`harness.tasks.math_worker`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

WINDOW = 300
"""Characters at the end of a response that verl's rules read."""
BOX_WINDOW = 100
"""Characters at the end in which DAPO's rule looks for a box."""
_NUMBER = r"(\-?[0-9\.\,]+)"
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3",
    "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
"""Words and marks that the Minerva normalization takes out, in this order (arXiv 2206.14858, appendix D)."""
_UNWRAPPED = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", "$\\3$"), (r"(\\text\{)(.*?)(\})", "\\2"), (r"(\\textbf\{)(.*?)(\})", "\\2"),
    (r"(\\overline\{)(.*?)(\})", "\\2"), (r"(\\boxed\{)(.*)(\})", "\\2"), (r"(frac)([^{])(.)", "frac{\\2}{\\3}"),
    (r"(sqrt)([^{])", "sqrt{\\2}"),
)  # fmt: skip
_NO_ANSWER = "[INVALID]"


def gsm8k(text: str, reference: str) -> tuple[bool, str | None]:
    """The strict rule: the last `#### ` with a number, its commas dropped, equals the reference as text."""
    found = re.findall("#### " + _NUMBER, text[-WINDOW:])
    answer = found[-1].replace(",", "") if found else None
    return answer == reference, answer


def gsm8k_flexible(text: str, reference: str) -> tuple[bool, str | None]:
    """The last run of digits, dots and commas that is not a lone dot equals the reference as text, commas kept."""
    found = re.findall(_NUMBER, text[-WINDOW:])
    if not found:
        return False, None
    answer = next((value for value in reversed(found) if value != "."), found[0])
    return answer == reference, answer


def dapo(text: str, reference: str) -> tuple[bool, str | None]:
    """The last `Answer:` line, normalized as the reference is; without one the last box, letter for letter."""
    tail = text[-WINDOW:]
    lines = _ANSWER_LINE.findall(tail)
    stated = normalized(lines[-1]) if lines else _NO_ANSWER
    if stated == _NO_ANSWER and (box := _last_box(tail[-BOX_WINDOW:])) is not None:
        return box == reference, box
    return stated == normalized(reference), None if stated == _NO_ANSWER else stated


def answer_tag(text: str, reference: str) -> tuple[bool, str | None]:
    """The content of the last `<answer>` tag equals the reference as text, blanks around it aside."""
    found = _TAG.findall(text)
    answer = found[-1].strip() if found else None
    return answer == reference.strip(), answer


def normalized(answer: str) -> str:
    """An answer without articles, units and wrappers, as Minerva's evaluation compares them."""
    found = answer.split("=")[-1]
    for before, after in _REPLACED:
        found = found.replace(before, after)
    for words in _REMOVED:
        found = found.replace(words, "")
    for pattern, after in _UNWRAPPED:
        found = re.sub(pattern, after, found)
    found = found.replace("$", "")
    return (found.replace(",", "") if found.replace(",", "").isdigit() else found).strip()


def _last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{`, where its braces close; escaped braces count, as in verl."""
    start, depth = text.rfind("\\boxed{"), 0
    for end in range(max(start, 0), len(text) if start >= 0 else 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if text[end] == "}" and depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


RULES: Mapping[str, Callable[[str, str], tuple[bool, str | None]]] = {
    "verl_gsm8k": gsm8k,
    "verl_gsm8k_flexible": gsm8k_flexible,
    "dapo": dapo,
    "answer_tag": answer_tag,
}
"""Rules of plain text by the name that `task.options.rule` takes."""
