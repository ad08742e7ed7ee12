"""Writes the data files beside it: the columns and types of the published sets, with small problems of our own.

Run by hand after a change: `python tests/tasks/data/make_files.py`.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
DAPO = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(MESSAGE)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)
GSM8K = pa.schema([("question", pa.string()), ("answer", pa.string())])
AIME24 = pa.schema([("ID", pa.string()), ("Problem", pa.string()), ("Solution", pa.string()), ("Answer", pa.int64())])
AMC = pa.schema([("id", pa.int64()), ("question", pa.string()), ("answer", pa.string()), ("url", pa.string())])


def gsm8k(start: int, count: int) -> list[dict]:
    return [
        {
            "question": f"Mia has {k} shells and finds {k * 400} more. How many shells does she have?",
            "answer": f"She has {k}+{k * 400}=<<{k}+{k * 400}={k * 401}>>{k * 401} shells.\n#### {k * 401:,}",
        }
        for k in range(start, start + count)
    ]


def dapo(k: int) -> dict:
    text = (
        "Solve the problem step by step. End with a line of the form Answer: $Answer (without quotes).\n\n"
        f"Find the sum of the first {k} positive integers."
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(k * (k + 1) // 2), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"00000000-0000-4000-8000-{k:012d}"},
    }


def write_parquet(rows: list[dict], schema: pa.Schema, name: str) -> None:
    path = HERE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=64)


def write_lines(rows: list[dict], name: str) -> None:
    path = HERE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    write_parquet(gsm8k(2, 6), GSM8K, "gsm8k/main/train-00000-of-00001.parquet")
    write_parquet(gsm8k(20, 3), GSM8K, "gsm8k/main/test-00000-of-00001.parquet")
    write_parquet(gsm8k(50, 2), GSM8K, "gsm8k/socratic/train-00000-of-00001.parquet")
    math500 = [
        ("Write $0.5$ as a fraction.", "\\frac{1}{2}", "Prealgebra", 1),
        ("Expand $(x+1)^2$.", "x^2 + 2x + 1", "Algebra", 2),
        ("Give the point halfway between $(0,0)$ and $(2,4)$.", "(1,2)", "Geometry", 3),
    ]
    write_lines(
        [
            {
                "problem": problem,
                "solution": f"It is $\\boxed{{{answer}}}$.",
                "answer": answer,
                "subject": subject,
                "level": level,
                "unique_id": f"test/{subject.lower()}/{k}.json",
            }
            for k, (problem, answer, subject, level) in enumerate(math500)
        ],
        "math500/test.jsonl",
    )
    write_parquet([dapo(k) for _ in range(3) for k in range(1, 41)], DAPO, "dapo/dapo-math-17k.parquet")
    aime = [("2024-I-1", "Find $12 + 13$.", 25), ("2024-II-7", "Find the remainder of $1009$ by $1000$.", 9)]
    write_parquet(
        [{"ID": name, "Problem": asked, "Solution": "Add.", "Answer": answer} for name, asked, answer in aime],
        AIME24,
        "aime24/aime_2024_problems.parquet",
    )
    write_lines([{"problem": "Find $3 \\cdot 7$.", "answer": "21", "id": "0"}], "aime25/test.jsonl")
    write_parquet(
        [{"id": 0, "question": "Find $2^5$.", "answer": "32.0", "url": "https://example.org/amc"}],
        AMC,
        "amc23/data/test-00000-of-00001.parquet",
    )


if __name__ == "__main__":
    main()
