"""Math question sets: the published columns, splits, prompts, scores through the tokenizer, and bad files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.models.tokenizer import decode, encode, save_tokenizer
from harness.tasks import Score, build_task
from harness.tasks.math_data import EVAL_SHARE, TEMPLATE, MathTask

DATA = Path(__file__).parent / "data"
NO_TEXT = "a.jsonl row 1: the question is neither text nor a list of chat messages$"
NO_NUMBER = "a.jsonl row 1: the answer is neither text nor a number$"
PATHS = {"gsm8k": "gsm8k", "math500": "math500", "dapo_math_17k": "dapo", "aime": "aime24", "amc": "amc23"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder with the 128-character tokenizer and no chat template."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder, 128)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(folder, 128)
    return folder


def build(name, model, path=None, **options) -> MathTask:
    task = build_task(name, {"path": str(path or DATA / PATHS[name]), "num_workers": 1, **options}, model)
    assert isinstance(task, MathTask)
    return task


def test_gsm8k_reads_its_own_splits_and_the_marked_answer(model):
    task = build("gsm8k", model)
    assert (task.num_train, task.num_eval) == (6, 3)  # the socratic folder is another set
    items = task.sample("eval", [0, 2])
    assert [item.reference for item in items] == ["8020", "8822"]  # "#### 8,020"
    question = "Mia has 20 shells and finds 8000 more. How many shells does she have?"
    assert decode(items[0].prompt, 128) == TEMPLATE.replace("{question}", question)
    assert task.sample("train", [5])[0].reference == "2807"


@pytest.mark.parametrize(
    ("name", "path", "options", "count", "references"),
    [
        ("math500", "math500", {}, 3, ["\\frac{1}{2}", "x^2 + 2x + 1", "(1,2)"]),
        ("aime", "aime24", {}, 2, ["25", "9"]),
        ("aime", "aime24/aime_2024_problems.parquet", {"year": 2024}, 2, ["25", "9"]),
        ("aime", "aime25", {"year": 2025}, 1, ["21"]),
        ("amc", "amc23", {}, 1, ["32.0"]),
    ],
)
def test_evaluation_sets_have_no_train_split(model, name, path, options, count, references):
    task = build(name, model, DATA / path, **options)
    assert (task.num_train, task.num_eval) == (0, count)
    assert [item.reference for item in task.sample("eval", range(count))] == references
    with pytest.raises(ValueError, match=f"task '{name}' has 0 train questions: index 0 is none"):
        task.sample("train", [0])
    with pytest.raises(ValueError, match=f"task '{name}' has {count} eval questions: index -1 is none"):
        task.sample("eval", [0, -1])


def test_dapo_keeps_one_of_each_index_and_its_own_messages(model):
    task = build("dapo_math_17k", model)
    assert task.num_train + task.num_eval == 40 and task.num_eval > 0
    items = [*task.sample("train", range(task.num_train)), *task.sample("eval", range(task.num_eval))]
    assert sorted(int(item.reference) for item in items) == [k * (k + 1) // 2 for k in range(1, 41)]
    assert len({item.key for item in items}) == 40
    evaluated = {item.key for item in task.sample("eval", range(task.num_eval))}
    assert {item.key for item in items if int(item.key, 16) % EVAL_SHARE == 0} == evaluated
    text = decode(task.sample("train", [0])[0].prompt, 128)
    assert text.startswith("Solve the problem step by step.") and "boxed" not in text


def test_one_file_for_both_splits_is_divided_by_content(model, tmp_path):
    rows = [{"question": f"What is {k}+{k}?", "answer": f"#### {2 * k}"} for k in range(200)]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build("gsm8k", model, path)
    keys = {split: {q.key for q in task.questions[split]} for split in ("train", "eval")}
    assert len(keys["train"]) + len(keys["eval"]) == 200 and not keys["train"] & keys["eval"]
    assert 3 <= len(keys["eval"]) <= 25
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    again = build("gsm8k", model, path)
    assert {q.key for q in again.questions["eval"]} == keys["eval"]
    assert again.content_hash() != task.content_hash()  # index 0 is another question


def test_a_train_question_that_is_also_in_eval_is_dropped(model, tmp_path):
    for split, numbers in (("train", (1, 2, 3)), ("test", (3, 4))):
        rows = [
            {"question": f"What is  {k}?" if split == "test" else f"What is {k}?", "answer": f"#### {k}"}
            for k in numbers
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build("gsm8k", model, tmp_path)
    assert [q.reference for q in task.questions["train"]] == ["1", "2"]
    assert [q.reference for q in task.questions["eval"]] == ["3", "4"]


def test_the_publishers_second_wording_of_gsm8k_is_left_out(model, tmp_path):
    """The folder of openai/grade-school-math has every question once more, with other solutions; a byte order mark is
    no text."""
    for split, number in (("train", 1), ("test", 2)):
        row = json.dumps({"question": f"What is {number}?", "answer": f"#### {number}"})
        (tmp_path / f"{split}.jsonl").write_text(row, encoding="utf-8-sig")
        (tmp_path / f"{split}_socratic.jsonl").write_text(row.replace("####", "** so? **\\n####"))
    (tmp_path / "example_model_solutions.jsonl").write_text('{"question": "x"}')
    task = build("gsm8k", model, tmp_path)
    assert {split: [q.reference for q in found] for split, found in task.questions.items()} == {
        "train": ["1"], "eval": ["2"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('no system role') }}", "no system role"), ("{% if %}", "Expected an expression")],
)
def test_a_chat_template_that_fails_is_one_line(tmp_path, template, reason):
    save_tokenizer(tmp_path, 128)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(ValueError, match=f"^the chat template of {tmp_path} makes no prompt: {reason}"):
        build("gsm8k", tmp_path).sample("eval", [0])


def test_chat_template_of_the_model_is_used(model, chat_model):
    plain = build("gsm8k", chat_model, chat=False).sample("eval", [0])[0]
    chat = build("gsm8k", chat_model).sample("eval", [0])[0]
    assert chat.prompt == (2, *plain.prompt)  # this template adds only the begin token
    system = build("gsm8k", chat_model, system="Be brief.").sample("eval", [0])[0]
    assert decode(system.prompt, 128).startswith("<bos>Be brief.Mia has 20")
    with pytest.raises(ValueError, match=r"chat=true, but .* has no chat template"):
        build("gsm8k", model, chat=True)
    with pytest.raises(ValueError, match=r"^task 'gsm8k': chat_options={'x': 1}, but chat=false$"):
        build("gsm8k", chat_model, chat=False, chat_options={"x": 1})
    with pytest.raises(ValueError, match=r"makes no prompt: .* multiple values for keyword argument 'tokenize'"):
        build("gsm8k", chat_model, chat_options={"tokenize": True}).sample("eval", [0])


def test_long_prompts_are_left_out(model):
    lengths = [len(item.prompt) for item in build("gsm8k", model).sample("train", range(6))]
    task = build("gsm8k", model, max_prompt_tokens=min(lengths))
    assert task.num_train == lengths.count(min(lengths))
    assert all(len(item.prompt) <= min(lengths) for item in task.sample("train", range(task.num_train)))
    with pytest.raises(ValueError, match="no question has at most max_prompt_tokens=3"):
        build("gsm8k", model, max_prompt_tokens=3)


def test_scores_go_through_the_tokenizer(model):
    task = build("math500", model)
    items = task.sample("eval", [0, 0, 0, 1])
    texts = [r"\boxed{0.5}", r"\boxed{0.6}", "half", r"\boxed{(1+x)^2}"]
    responses = [[*encode(text, 128), task.eos_id] for text in texts]
    assert task.score(items, responses) == [Score(1.0, True), Score(0.0, True), Score(0.0, False), Score(1.0, True)]
    amc = build("amc", model)
    assert amc.score(amc.sample("eval", [0]), [encode(r"so \boxed{32}", 128)]) == [Score(1.0, True)]
    task.grader.close()
    amc.grader.close()


def test_ids_and_sizes_come_from_the_folder(model, tmp_path):
    assert (build("aime", model).eos_id, build("aime", model).pad_id, build("aime", model).vocab_size) == (1, 0, 128)
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text(json.dumps({"vocab_size": 256, "eos_token_id": [5, 6]}))
    settings = {"pad_token": None, "eos_token": {"content": "<eos>"}}
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps(settings))
    task = build("aime", tmp_path / "copy", max_new_tokens=7)
    assert (task.eos_id, task.pad_id, task.vocab_size, task.max_new_tokens) == (1, 1, 256, 7)
    (tmp_path / "copy" / "tokenizer_config.json").write_text("{}")
    assert build("aime", tmp_path / "copy").eos_id == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8k", {"templat": "x"}, "task 'gsm8k' has no option 'templat': nearest: template"),
        ("gsm8k", {"year": 2024}, "task 'gsm8k' has no option 'year'"),
        ("gsm8k", {"template": "x"}, "template='x' has no {question}"),
        ("aime", {"year": 2023}, "year=2023 is not one of 2024, 2025"),
        ("gsm8k", {"path": "nowhere"}, "data path nowhere does not exist: task 'gsm8k' expects .* openai/gsm8k"),
        ("gsm8k", {"eval_split": "dev"}, "has no split 'dev': it has test, train"),
        ("amc", {"path": str(DATA / "make_files.py")}, "make_files.py: expected one of .parquet, .jsonl, .json"),
        (
            "math500",
            {"path": str(DATA / "amc23")},
            r"test-00000-of-00001.parquet has no column 'problem': it has answer",
        ),
        (
            "gsm8k",
            {"path": str(DATA / "math500")},
            "has no split 'train': it has test; the options train_split and eval_split take another name, or none",
        ),
        (
            "gsm8k",
            {"path": str(DATA / "math500" / "test.jsonl")},
            "data file .*test.jsonl row 1 has no 'question': it has answer, level",
        ),
        ("gsm8k", {"max_prompt_tokens": "x"}, "task 'gsm8k': max_prompt_tokens='x': input should be a valid integer"),
        ("gsm8k", {"num_workers": -1}, "task 'gsm8k': num_workers=-1: input should be greater than 0"),
        ("gsm8k", {"timeout_s": 0}, "task 'gsm8k': timeout_s=0: input should be greater than 0"),
        ("gsm8k", {"max_new_tokens": 0}, "task 'gsm8k': max_new_tokens=0: input should be greater than 0"),
        ("gsm8k", {"stop": [""]}, "task 'gsm8k': stop.0='': string should have at least 1 character"),
        ("gsm8k", {"subset": "nope"}, "task 'gsm8k': subset='nope': there is no folder .*/data/gsm8k/nope$"),
        ("gsm8k", {"revision": "v1"}, "revision='v1' is of the hub's copy, but path names a local one"),
        (
            "gsm8k",
            {"train_split": "none", "eval_split": "none"},
            "^task 'gsm8k': train_split and eval_split leave it no question$",
        ),
        ("math500", {"eval_split": "none"}, "^task 'math500': train_split and eval_split leave it no question$"),
        (
            "gsm8k",
            {"chat_options": {"enable_thinking": False}},
            "task 'gsm8k': chat_options={'enable_thinking': False}, but .* has no chat template",
        ),
    ],
)
def test_bad_options_and_data_are_named_in_one_line(model, name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        build(name, model, **{"path": str(DATA / PATHS[name]), **options})
    assert "\n" not in str(error.value)


def test_an_empty_path_is_not_the_working_folder(model):
    with pytest.raises(ValueError, match=r"^task 'gsm8k': path='': string should have at least 1 character$"):
        build_task("gsm8k", {"path": ""}, model)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"question": "1?", "answer": "#### 1"}\n\n{"question": "2?", "answer": ',
            r"a.jsonl line 3 is not valid JSON: Expecting value, column 30$",
        ),
        ("a.jsonl", b"", "^task 'gsm8k': no question is in /"),
        ("a.jsonl", b"[1]\n", "a.jsonl line 1 is no JSON object$"),
        ("a.jsonl", b'{"question": "1?", "answer": "#### 1"}\nnull\n', "a.jsonl line 2 is no JSON object$"),
        pytest.param("a.jsonl", b"[" * 10_000, "a.jsonl is not valid JSON lines: ", id="deep.jsonl"),
        pytest.param("a.json", b"[" * 10_000, "a.json is not valid JSON: ", id="deep.json"),
        ("a.jsonl", b"\xff\xfe", "a.jsonl is not valid JSON lines: "),
        ("a.jsonl", b'{"question": "1?", "answer": "1"}\n', "a.jsonl row 1: no answer after '####'"),
        ("a.jsonl", b'{"question": "", "answer": "#### 1"}\n', "a.jsonl row 1: no question"),
        ("a.jsonl", b'{"question": " ", "answer": "#### 1"}\n', "a.jsonl row 1: no question"),
        ("a.jsonl", b'{"question": [], "answer": "#### 1"}\n', "a.jsonl row 1: no question"),
        ("a.jsonl", b'{"question": 5, "answer": "#### 1"}\n', NO_TEXT),
        ("a.jsonl", b'{"question": {"a": "b"}, "answer": "#### 1"}\n', NO_TEXT),
        ("a.jsonl", b'{"question": [{"role": "user"}], "answer": "#### 1"}\n', NO_TEXT),
        ("a.jsonl", b'{"question": [{"role": "user", "content": null}], "answer": "#### 1"}\n', NO_TEXT),
        ("a.jsonl", b'{"question": "1?", "answer": ["#### 1"]}\n', NO_NUMBER),
        ("a.jsonl", b'{"question": "1?", "answer": true}\n', NO_NUMBER),
        ("a.jsonl", b'{"question": "1?", "answer": NaN}\n', NO_NUMBER),
        ("a.parquet", b"PAR1 nonsense", "a.parquet is not readable parquet: "),
        ("a.parquet", b"", "a.parquet is not readable parquet: "),
        ("a.txt", b"", "has no .parquet, .jsonl or .json file: task 'gsm8k' expects those of openai/gsm8k"),
    ],
)
def test_damaged_files_are_named(model, tmp_path, file, content, message):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        build("gsm8k", model, tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_column_is_named_where_repeated_questions_are_left_out(model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1?"}\n')
    with pytest.raises(ValueError, match=r"^data file \S*a.jsonl row 1 has no 'prompt': it has question; 'task\.o"):
        build("dapo_math_17k", model, tmp_path)


def test_a_missing_tokenizer_is_named(model, tmp_path):
    with pytest.raises(ValueError, match="task 'gsm8k' needs a model folder with a tokenizer"):
        build("gsm8k", None)
    with pytest.raises(ValueError, match=r"tokenizer.json is missing: task 'gsm8k'"):
        build("gsm8k", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is not valid JSON"):
        build("gsm8k", tmp_path)
    for text in ("{}", '{"model": {}}', '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file: "):
            build("gsm8k", tmp_path)
    shutil.copy(model / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        build("gsm8k", tmp_path)


def test_the_hub_is_named_when_it_cannot_be_reached(model, tmp_path):
    code = (
        "import sys; from pathlib import Path; from harness.tasks import build_task\n"
        "try: build_task('aime', {}, Path(sys.argv[1]))\nexcept ValueError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code, str(model)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=DATA.parents[2])
    assert told.stdout.startswith("task 'aime': cannot fetch data set Maxwell-Jia/AIME_2024 from the hub (")
    assert told.stdout.strip().endswith("set the path of a local copy") and told.stdout.count("\n") == 1


def test_a_snapshot_of_the_hub_is_read_like_a_folder(model, monkeypatch):
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(repo=repo, **options)
        return str(DATA / "gsm8k")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    task = build_task("gsm8k", {"revision": "abc"}, model)
    assert (task.num_train, task.num_eval) == (6, 3)
    assert asked["repo"] == "openai/gsm8k" and asked["repo_type"] == "dataset" and asked["revision"] == "abc"
    assert asked["allow_patterns"] == ["main/*.parquet", "main/*.jsonl", "main/*.json"]


def test_a_large_repetitive_file_is_read_quickly(model, tmp_path):
    """DAPO-Math-17k is a hundred copies of its questions; only the first copy is converted."""
    table = pq.read_table(DATA / "dapo" / "dapo-math-17k.parquet")
    pq.write_table(pa.concat_tables([table] * 500), tmp_path / "dapo-math-17k.parquet")
    task = build("dapo_math_17k", model, tmp_path)
    assert task.num_train + task.num_eval == 40


def test_equal_questions_count_once_across_files_whatever_their_index(model, tmp_path):
    """Two sets whose indices both start at 0: none of the second is lost, and only real repetitions go."""
    first = [{"prompt": f"A{k}?", "extra_info": {"index": k}, "reward_model": {"ground_truth": "1"}} for k in range(3)]
    second = [{"prompt": f"B{k}?", "extra_info": {"index": k}, "reward_model": {"ground_truth": "2"}} for k in range(3)]
    again = [{**first[0], "extra_info": {"index": 99}, "prompt": " A0? "}]
    pq.write_table(pa.Table.from_pylist(first), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([*second, *again]), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*first, *again]))
    task = build("dapo_math_17k", model, tmp_path)
    assert sorted(q.reference for split in task.questions.values() for q in split) == ["1"] * 3 + ["2"] * 3


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_training_questions_count_once_and_evaluation_sets_are_asked_as_published(model, tmp_path, suffix):
    """A question of both splits is an evaluation question alone, as often as it is published."""
    for split, numbers in (("train", (1, 2, 1, 3, 2)), ("test", (3, 4, 3))):
        rows = [{"problem": f"What is {k}?", "solution": f"\\boxed{{{k}}}", "answer": str(k)} for k in numbers]
        path = tmp_path / f"{split}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    published = {"train": ["1", "2"], "eval": ["3", "4", "3"]}
    for name, train in (("math", published["train"]), ("math500", []), ("amc", [])):
        columns = {"question": "problem", "answer": "answer"}
        task = build(name, model, tmp_path, columns=columns)
        found = {split: [q.reference for q in questions] for split, questions in task.questions.items()}
        assert found == {"train": train, "eval": published["eval"]}, name
    columns = {"question": "problem", "answer": "answer"}
    repeated = build("aime", model, tmp_path, columns=columns, eval_split="test")
    assert [q.reference for q in repeated.questions["eval"]] == ["3", "4"]
    one_file = build("math", model, tmp_path / f"train.{suffix}", eval_split="train")
    assert sorted(q.reference for split in one_file.questions.values() for q in split) == ["1", "2", "3"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_equal_questions_inside_a_struct_count_once(model, tmp_path, suffix):
    rows = [{"x": {"q": f"{k // 2}?", "index": k}, "reward_model": {"ground_truth": k // 2}} for k in range(6)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build("dapo_math_17k", model, path, columns={"question": "x.q"})
    assert sorted(q.reference for split in task.questions.values() for q in split) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("name", "row", "reference"),
    [
        ("deepmath", {"question": "Q1?", "final_answer": "1/2", "difficulty": 5.0, "r1_solution_1": "x"}, "1/2"),
        ("bigmath", {"prompt": "Q1?", "solution": "so \\boxed{7}", "source": "x"}, "7"),
        ("bigmath", {"problem": "Q1?", "answer": "8", "domain": []}, "8"),
        ("deepscaler", {"problem": "Q1?", "answer": "9", "solution": "long"}, "9"),
        ("math", {"problem": "Q1?", "solution": "\\boxed{1}, so \\boxed{\\frac{1}{2}}", "level": "5"}, "\\frac{1}{2}"),
        ("math", {"problem": "Q1?", "solution": "as \\boxed{1}", "answer": "3", "unique_id": "x"}, "3"),
    ],
)  # fmt: skip
def test_further_sets_are_read_in_their_publishers_columns(model, tmp_path, name, row, reference):
    path = tmp_path / "train-00000.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    task = build(name, model, path, template="{question}")
    questions = [*task.questions["train"], *task.questions["eval"]]
    assert [(q.messages[0]["content"], q.reference) for q in questions] == [("Q1?", reference)]
    if name == "deepscaler":  # its publisher has one JSON list; others have JSON lines under this name
        listed = tmp_path / "deepscaler.json"
        for text in (json.dumps([row, row]), "\n" + json.dumps(row) + "\n" + json.dumps(row)):
            listed.write_text(text)
            again = build(name, model, listed, template="{question}")
            assert [q.reference for split in again.questions.values() for q in split] == ["9"]


def test_columns_in_verls_form_and_wrong_ones(model, tmp_path):
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2+2?"}],
           "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0}}  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "test.parquet")
    columns = {"question": "prompt", "answer": "reward_model.ground_truth"}
    options = {"columns": columns, "train_split": "none"}
    task = build("gsm8k", model, tmp_path, **options)
    (question,) = task.questions["eval"]
    assert question.messages == ({"role": "user", "content": "2+2?"},) and question.reference == "4"
    with pytest.raises(ValueError, match="has no column 'text': it has data_source"):
        build("gsm8k", model, tmp_path, **options | {"columns": {"question": "text"}})
    with pytest.raises(ValueError, match=r"columns\.gold='x': unexpected keyword argument"):
        build("gsm8k", model, tmp_path, columns={"gold": "x"})


def test_a_stop_ends_a_response_and_its_score(model):
    task = build("aime", model, stop=("=5", "</"), template="{question}")
    response = [*encode("1+1=2 5=5 6=5", 128), task.eos_id]
    assert task.num_kept(response) == len("1+1=2 5=5")
    assert task.num_kept(encode("1+1=2", 128)) == 5
    stopped = build("gsm8k", model, stop=(")",), rule="verl_gsm8k_flexible")
    items = stopped.sample("eval", [0])
    assert stopped.score(items, [encode("(8020) 1", 128)]) == [Score(1.0, True)]
    free = build("gsm8k", model, rule="verl_gsm8k_flexible")
    assert free.score(items, [encode("(8020) 1", 128)]) == [Score(0.0, True)]
    assert free.content_hash() != stopped.content_hash() != build("gsm8k", model).content_hash()
