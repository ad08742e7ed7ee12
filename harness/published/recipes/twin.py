"""A recipe's small twin: a random model of its family, a tokenizer made here, questions, and sizes of seconds.

The twin keeps every setting of the recipe but its sizes, so a recipe that cannot run is found out on a laptop. The
tokenizer is byte-level BPE with the published chat template; it has whole answers as tokens, so that a random model is
sometimes right and dynamic sampling finds groups that differ. Numbers of a twin say nothing of the paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.load import quoted
from harness.foundation.seeds import generator
from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.published.recipes.recipe import Recipe, bound
from harness.sweep import Sweep

NUM_QUESTIONS = 48
PLACES = ("launch.nodes", "launch.gpus", "launch.tensor_parallel", "launch.sequence_parallel")
HELD_OUT = 8
"""Questions in the test split, where a data set has one."""
ANSWERS = ("1", "2")
PIECES = tuple(
    f"{before}{form}{after}"
    for answer in ANSWERS
    for form in (f"#### {answer}", f"Answer: {answer}", f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>")
    for before in ("", " ", "\n", "\n\n")
    for after in ("", "\n")
)
"""Whole answers that are tokens."""
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\nRemember to put your answer "
    'on its own line after "Answer:".'
)
_TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES: Mapping[str, tuple[str, tuple[str, str], tuple[str, ...]]] = {
    "qwen2.5": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
        "You are a helpful assistant.<|im_end|>\n' }}{% endif %}" + _TURNS,
        ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>",),
    ),
    "qwen3": (_TURNS, ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>",)),
    "llama3": (
        "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt "
        "%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|eot_id|>", "<|finetune_right_pad_id|>"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "r1": (
        "{{ '<｜begin▁of▁sentence｜>' }}{% for message in messages %}{% if message['role'] == 'user' %}{{ "
        "'<｜User｜>' + message['content'] }}{% elif message['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜>' + message['content'] + "
        "'<｜end▁of▁sentence｜>' }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if "
        "add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        ("<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"), ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    ),
    "none": ("", ("</s>", "<unk>"), ("<s>",)),
}  # fmt: skip
"""Family of chat templates -> (Jinja, (end of sequence, padding), further special tokens), as the models of that name
write a conversation of plain turns."""


def twin(recipe: Recipe, folder: Path) -> dict[str, Sweep]:
    """Arm -> sweep of the twin, its model and data written below `folder`. One model, one seed, two steps."""
    key, model = next(iter(recipe.models.items()))
    place = folder / "model" / f"{model.family}-{model.template}"
    if not (place / "config.json").exists():
        write_model(place, model.family, model.template)
    data = {name: folder / "data" / source.task for name, source in recipe.data.items()}
    for name, path in data.items():
        write_questions(path, recipe.data[name].task)
    small = {"num": 2, "max_new_tokens": 16}
    few = tuple(
        e | small | {"k": min(2, e.get("k", 1)), "options": e.get("options", {}) | {"num_workers": 1}}
        for e in recipe.evaluations
    )
    sweeps = bound(replace(recipe, evaluations=few), {key: place}, data)
    return {
        label: replace(
            sweep, name=f"{recipe.sweep_name}_tiny", seeds=(0,), overrides=(*sweep.overrides, *sizes(recipe)),
            arms=tuple(arm | {key: value for key, value in recipe.tiny.items() if key in arm} for arm in sweep.arms),
        )
        for label, sweep in sweeps.items()
    }  # fmt: skip


def sizes(recipe: Recipe) -> list[str]:
    """Overrides that make a recipe one of seconds on a CPU."""
    own = recipe.values
    small: dict[str, Any] = {
        "engine": "embedded", "trainer": "local", "trainer.device": "cpu", "trainer.steps": 2, "trainer.eval_every": 2,
        "algo.num_prompts": 4, "algo.group_size": 4, "engine.max_new_tokens": 16, "engine.max_batch": 64,
        "task.num_eval": 2, "task.options.num_workers": 1, **dict.fromkeys(PLACES, 1), "launch.offload": "none",
    }  # fmt: skip
    shrunk = {
        "algo.gen_prompts": 8, "algo.overlong_buffer": 4, "engine.max_model_len": None, "engine.max_num_seqs": None,
        "model.max_positions": None,
        "task.options.max_prompt_tokens": 500, "algo.num_minibatches": min(2, int(own.get("algo.num_minibatches", 1))),
    }  # fmt: skip
    small |= {key: value for key, value in shrunk.items() if key in own}
    return [f"{key}={quoted(value)}" for key, value in small.items()]


def write_model(folder: Path, family: str, template: str) -> None:
    """A random decoder of a family with a tokenizer, as its publisher lays a folder out."""
    folder.mkdir(parents=True, exist_ok=True)
    size, ids = _write_tokenizer(folder, template)
    config = DecoderConfig(
        vocab_size=size, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256,
        qk_norm=family == "qwen3", attention_bias=family == "qwen2", max_positions=1024, eos_id=ids["eos_id"],
        pad_id=ids["pad_id"], bos_id=ids["bos_id"],
    )  # fmt: skip
    save_decoder(Decoder(config, generator=generator("cpu", 0, f"twin {family}")), folder)


def _write_tokenizer(folder: Path, template: str) -> tuple[int, dict[str, int | None]]:
    """(vocabulary size, its special ids) of the tokenizer written into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    chat, (eos, pad), others = TEMPLATES[template]
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=384, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
        special_tokens=[eos, pad, *others],
    )  # fmt: skip
    texts = [question(index)[0] for index in range(NUM_QUESTIONS)]
    tokenizer.train_from_iterator([DAPO_PROMPT, chat, *texts], trainer)
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in PIECES])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"chat_template": chat} if chat else {})))
    ids: dict[str, int | None] = {"eos_id": tokenizer.token_to_id(eos), "pad_id": tokenizer.token_to_id(pad)}
    return tokenizer.get_vocab_size(), ids | {"bos_id": tokenizer.token_to_id((*others, eos)[0])}


def question(index: int) -> tuple[str, str]:
    """A question and its answer."""
    answer = ANSWERS[index % len(ANSWERS)]
    return f"What is {index + 10 + int(answer)} - {index + 10}?", answer


def write_questions(folder: Path, task: str) -> None:
    """Questions in the columns of a task's publisher."""
    rows = [_row(task, *question(index), index) for index in range(NUM_QUESTIONS)]
    has_test = task in ("gsm8k", "math")
    parts = {"train": rows[HELD_OUT:], "test": rows[:HELD_OUT]} if has_test else {"all": rows}
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")


def _row(task: str, asked: str, answer: str, index: int) -> dict[str, Any]:
    if task == "dapo_math_17k":
        messages = [{"role": "user", "content": DAPO_PROMPT.replace("{question}", asked)}]
        return {"prompt": messages, "reward_model": {"ground_truth": answer}, "extra_info": {"index": index}}
    columns = {
        "gsm8k": ("question", "answer"), "deepmath": ("question", "final_answer"), "bigmath": ("prompt", "solution"),
        "aime": ("Problem", "Answer"), "amc": ("question", "answer"),
    }.get(task, ("problem", "answer"))  # fmt: skip
    return dict(zip(columns, (asked, f"so #### {answer}" if task == "gsm8k" else answer), strict=True))
