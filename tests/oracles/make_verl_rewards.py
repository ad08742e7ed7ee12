"""Rewards of verl for random and tricky answers, rule by rule -> verl_rewards.json."""

from __future__ import annotations

import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl.utils.reward_score import gsm8k, math_dapo, math_verify

TRICKY = [
    ("72", "#### 72"), ("72", "####72"), ("72", "#### 72."), ("72", "#### $72"), ("72", "#### 72\n#### 73"),
    ("1000", "so #### 1,000"), ("1000", "1,000"), ("-5", "#### -5"), ("72", "72 ."), ("72", "72 apples, . "),
    ("72", "#### 72" + " x" * 200), ("72", "x" * 400 + "#### 72"), ("72", "#### " + "9" * 290 + "72"), ("", ""),
    ("34", "Answer: 34"), ("34", "answer : $34$"), ("34", "Answer: \\boxed{34}"), ("34", "\\boxed{34}"),
    ("34", "Answer: 35\n\\boxed{34}"), ("34", "Answer:\n34"), ("34", "The Answer: x = 34"), ("34", "ANSWER:34 "),
    ("34", "Answer: 34 degrees"), ("1234", "Answer: 1,234"), ("34", "\\boxed{34" + " " * 80), ("34", "Answer: 34."),
    ("34", "\\boxed{34}" + "y" * 95), ("34", "\\boxed{3{4}"), ("{34}", "\\boxed{{34}}"), ("34", "Answer: [INVALID]"),
    ("\\frac{1}{2}", "Answer: \\frac12"), ("\\frac{1}{2}", "Answer: $\\frac{1}{2}$."), ("\\sqrt{2}", "Answer: \\sqrt2"),
    ("5", "Answer: 5 \\text{ cm}"), ("5", "Answer: \\text{5}"), ("a b", "Answer: a b"), ("34", "Answer: 34\nAnswer:"),
    ("34", "Answer:34Answer: 35"), ("34", "Answer: 3 4"), ("[INVALID]", "nothing"), ("0.5", "Answer: .5"),
    ("\\frac{1}{2}", "so it is \\boxed{0.5}"), ("\\frac{1}{2}", "1/2"), ("(1,2)", "\\boxed{(1, 2)}"),
    ("(1,2)", "\\boxed{(2, 1)}"), ("x^2+1", "$1+x^2$"), ("10\\%", "\\boxed{10}"), ("{1,2}", "\\boxed{\\{2,1\\}}"),
    ("3", "first \\boxed{3}, then \\boxed{4}"), ("4", "first \\boxed{3}, then \\boxed{4}"), ("7", "7 or 8"),
    ("A", "\\boxed{A}"), ("\\text{Evelyn}", "\\boxed{Evelyn}"), ("5", "\\boxed{}"), ("5", "\\boxed{"),
    ("9", "The final answer is $9$. I hope it is correct."), ("2", "\\boxed{\\sqrt{4}}"), ("100", "1e2"),
]  # fmt: skip
WORDS = (
    "#### ", "####", "Answer: ", "answer :", "Answer:", "\\boxed{", "}", "{", "$", "=", ",", ".", " ", "\n", "-", "%",
    "a ", "an ", "\\text{", "\\frac", "\\sqrt", "units", "degrees", "\\%", "\\ ", "1", "2", "12", "1,234", "0.5", "1/2",
    "x",
)  # fmt: skip
"""Pieces of random answers."""


def cases(count: int = 400) -> list[tuple[str, str]]:
    """(reference, response): the tricky ones, then random ones of which a good part ends in its reference."""
    draw, found = random.Random(0), list(TRICKY)
    for _ in range(count):
        reference = draw.choice(("1", "2", "12", "1234", "0.5", "-1", "\\frac{1}{2}", "x", "12 units", "x=2"))
        text = "".join(draw.choice(WORDS) for _ in range(draw.randint(0, 12)))
        end = draw.choice(("", f"#### {reference}", f"Answer: {reference}", f"\\boxed{{{reference}}}", reference))
        tail = draw.choice(("", ".", " ", "\n", "z" * draw.choice((90, 110, 290, 310))))
        found.append((reference, text + end + tail))
    return found


def scored(reference: str, text: str) -> dict[str, Any]:
    """Score of one response by every rule: 0 or 1, and for DAPO -1 or 1 with what it read."""
    taken = math_dapo.compute_score(text, reference)
    return {
        "verl_gsm8k": float(gsm8k.compute_score(text, reference, method="strict")),
        "verl_gsm8k_flexible": float(gsm8k.compute_score(text, reference, method="flexible")),
        "dapo": [taken["score"], bool(taken["acc"])],
        "math_verify": float(math_verify.compute_score(text, reference)),
    }


def main() -> None:
    """Write the file."""
    rows = [{"reference": r, "text": t, **scored(r, t)} for r, t in cases()]
    versions = {name: version(name) for name in ("verl", "math-verify")}
    path = Path(__file__).with_name("verl_rewards.json")
    assert rows[0]["math_verify"] == 1.0, "math-verify's processes do not work here: every error counts as wrong"
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"versions": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{path.name}: {len(rows)} answers")


if __name__ == "__main__":
    main()
