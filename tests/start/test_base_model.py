"""Base models: accuracy measured without sampling, early stop, keys, caching, locking and crashes."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness.foundation.lock_file import held
from harness.foundation.seeds import generator
from harness.foundation.state_files import load_state, save_state
from harness.models.checkpoint import load_decoder, read_tensors
from harness.models.decoder import Decoder, DecoderConfig
from harness.models.tokenizer import EOS_ID
from harness.start import base_model, base_training
from harness.start.base_model import base_key, base_name, ensure_base, read_record, recipe_values, train_base
from harness.start.base_training import (
    KEEP_S,
    BaseRecipe,
    TrainingHost,
    Unfinished,
    expected_accuracy,
    in_words,
    learning_rate,
    stages,
    stop_accuracy,
)
from harness.tasks.chain import Chain
from harness.tasks.sort import Sort

CONFIG = DecoderConfig(
    vocab_size=32, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
TASK = Sort(n=3)
ROOT = Path(__file__).parents[2]
RECIPE = BaseRecipe(target_accuracy=0.2, num_eval=128, batch_size=32, lr=1e-2, warmup_steps=10, max_steps=150)
SCRIPT = """
import sys, torch
from pathlib import Path
from tests.start.test_base_model import CONFIG, RECIPE, TASK
from harness.start.base_model import ensure_base
ensure_base("tiny", CONFIG, TASK, RECIPE, 0, Path(sys.argv[1]), lambda step, *_: print(step, flush=True))
print("done")
"""


def sampled_by_hand(
    model: Decoder, prompts: list[tuple[int, ...]], num_tokens: int, temperature: float
) -> torch.Tensor:
    """Token by token, whole rows recomputed: [B, num_tokens]. Temperature 0 is greedy."""
    ids = torch.tensor(prompts)
    random = generator("cpu", 0, "test sampling")
    for _ in range(num_tokens):
        logits = model(ids)[:, -1].detach()
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        else:
            token = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, token), 1)
    return ids[:, len(prompts[0]) :]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "tiny"
    seen = []
    record = train_base(CONFIG, TASK, RECIPE, 0, folder, lambda *state: seen.append(state))
    return folder, record, seen


def test_stops_at_the_first_evaluation_that_reaches_the_target(trained):
    _, record, seen = trained
    steps, sampled = [row[0] for row in record["curve"]], [row[1] for row in record["curve"]]
    assert record["is_target_reached"] and record["steps"] == steps[-1] < RECIPE.max_steps
    assert sampled[-1] >= 0.2 and max(sampled[:-1]) < 0.2
    assert [(step, RECIPE.max_steps) for step in steps] == [(step, most) for step, most, _ in seen]
    # Every fifth step, then every step once half the target is passed.
    near = next(k for k, value in enumerate(sampled) if value > 0.1)
    assert steps[: near + 1] == list(range(5, 5 * near + 6, 5))
    assert all(b - a == 1 for (a, b), v in zip(itertools.pairwise(steps), sampled, strict=False) if v > 0.1)
    assert 0.1 < record["accuracy"] < 0.4


def test_training_again_gives_the_same_files(trained, tmp_path):
    folder, record, _ = trained
    assert train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "again") == record
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    other = train_base(CONFIG, TASK, RECIPE, 1, tmp_path / "other")
    assert other["content_hash"] != record["content_hash"] and other["key"] != record["key"]


def test_folder_holds_bfloat16_weights_and_their_accuracy(trained):
    folder, record, _ = trained
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "recipe.json"}
    assert names <= {file.name for file in folder.iterdir()}
    assert not list(folder.parent.glob(".*"))
    assert {tensor.dtype for _, tensor in read_tensors(folder)} == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 1, 0)
    model = load_decoder(folder)
    sampled, greedy = expected_accuracy(model, TASK, TASK.sample("eval", range(128)))
    assert (round(sampled, 6), round(greedy, 6)) == (record["accuracy"], record["greedy_accuracy"])
    assert read_record(folder) == record


def test_expected_accuracy_is_what_sampling_gives(trained):
    model = load_decoder(trained[0])
    items = TASK.sample("eval", range(64))
    sampled, greedy = expected_accuracy(model, TASK, items)
    many = [item for item in items for _ in range(32)]
    drawn = sampled_by_hand(model, [item.prompt for item in many], TASK.n + 1, 1.0).tolist()
    hits = sum(score.reward for score in TASK.score(many, drawn)) / len(many)
    # 2048 draws at an accuracy near .25: s.d. below .01
    assert abs(hits - sampled) < 0.04
    top = sampled_by_hand(model, [item.prompt for item in items], TASK.n + 1, 0.0).tolist()
    assert sum(score.reward for score in TASK.score(items, top)) / len(items) == greedy
    assert [row[-1] for row in map(list, TASK.answers(items))] == [EOS_ID] * 64


def test_demonstrations_of_bounded_accuracy_bound_the_target():
    assert stop_accuracy(Sort(), 0.40) == 0.40
    assert stop_accuracy(Chain(accuracy=0.35), 0.40) == pytest.approx(0.2975)
    assert stop_accuracy(Chain(accuracy=0.35), 0.1) == 0.1


def test_key_covers_everything_that_decides_the_weights():
    changed = {"target_accuracy": 0.3, "eval_every": 6, "num_eval": 64, "max_steps": 10, "batch_size": 16, "lr": 1e-3}
    changed |= {"betas": (0.9, 0.95), "warmup_steps": 5, "grad_clip": 2.0, "curriculum": (2,)}
    assert {*changed, "lr_power"} == {f.name for f in dataclasses.fields(BaseRecipe)}
    recipes = [RECIPE, *(dataclasses.replace(RECIPE, **{name: value}) for name, value in changed.items())]
    recipes += [dataclasses.replace(RECIPE, curriculum=(2,), lr_power=0.5)]
    keys = [base_key(CONFIG, TASK, recipe, 0) for recipe in recipes]
    keys += [base_key(CONFIG, TASK, RECIPE, 1), base_key(CONFIG, Sort(n=4), RECIPE, 0)]
    keys += [base_key(CONFIG, Chain(n=3), RECIPE, 0), base_key(CONFIG, Chain(n=3, accuracy=0.5), RECIPE, 0)]
    keys += [base_key(dataclasses.replace(CONFIG, num_layers=2), TASK, RECIPE, 0)]
    assert len(set(keys)) == len(keys)
    assert base_key(dataclasses.replace(CONFIG, eos_id=1), TASK, dataclasses.replace(RECIPE), 0) == keys[0]
    moe = dataclasses.replace(CONFIG, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    assert len({keys[0], *(base_key(replaced, TASK, RECIPE, 0) for replaced in
                           (moe, dataclasses.replace(moe, norm_topk_prob=False)))}) == 3  # fmt: skip
    assert base_name("s", Sort(n=16), 3, "0123456789ab") == "s-sort16-b3-0123456789ab"


def test_the_key_of_a_dense_base_is_pinned():
    """A change of it trains every base anew and parts runs from their committed bases."""
    shape = DecoderConfig(
        vocab_size=32, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=192
    )
    assert base_key(shape, Sort(n=4), BaseRecipe(), 3) == "0360a30ab595"


def test_a_recipe_without_a_curriculum_is_written_as_before_there_was_one():
    assert not {"curriculum", "lr_power"} & recipe_values(RECIPE).keys()
    assert recipe_values(dataclasses.replace(RECIPE, curriculum=(2, 4)))["curriculum"] == [2, 4]
    known = json.loads(next((ROOT / "results" / "bases").glob("s-sort8-b0-*/recipe.json")).read_text())
    assert known["recipe"] == recipe_values(BaseRecipe())


def test_a_curriculum_learns_the_smaller_sizes_first(tmp_path):
    task, recipe = Sort(n=4), dataclasses.replace(RECIPE, curriculum=(2, 3, 4, 9), max_steps=300)
    assert [stage.max_new_tokens for stage in stages(task, recipe)] == [3, 4, 5]
    seen = []
    record = train_base(CONFIG, task, recipe, 0, tmp_path / "base", lambda *state: seen.append(state))
    reached = [step for step, _, sampled in seen if sampled >= 0.2]
    assert len(reached) == 3 and reached[-1] == record["steps"]
    # The record's curve is that of the task itself, and every stage began anew below the target.
    assert [point[0] for point in record["curve"]] == [step for step, _, _ in seen if step > reached[1]]
    plain = train_base(CONFIG, task, dataclasses.replace(recipe, curriculum=()), 0, tmp_path / "plain")
    assert plain["content_hash"] != record["content_hash"]
    alone = dataclasses.replace(recipe, max_steps=reached[0] + 1)
    with pytest.raises(ValueError, match="less than half of its target"):
        train_base(CONFIG, task, alone, 0, tmp_path / "short")


def test_the_rate_falls_with_the_size_of_a_curriculum():
    recipe = BaseRecipe(lr=0.4, warmup_steps=10, curriculum=(4, 16), lr_power=0.5)
    assert [learning_rate(recipe, Sort(n=n), 10) for n in (2, 4, 16, 64)] == [0.4, 0.4, 0.2, 0.1]
    assert learning_rate(recipe, Sort(n=16), 5) == 0.1
    assert learning_rate(dataclasses.replace(recipe, lr_power=0.0), Sort(n=64), 99) == 0.4
    for wrong in ({"curriculum": ()}, {"lr_power": -0.5}):
        with pytest.raises(ValueError, match=r"base.lr_power=-?0.5: must be at least 0, and above it needs"):
            dataclasses.replace(recipe, **wrong)


def test_a_stopped_training_goes_on_to_the_same_base(tmp_path):
    recipe = dataclasses.replace(RECIPE, curriculum=(2,))
    straight = train_base(CONFIG, TASK, recipe, 0, tmp_path / "straight")
    for stop in (7, straight["steps"] - 3):
        polls, state = itertools.count(1), tmp_path / "state.pt"
        host = TrainingHost(state=state, should_stop=lambda polls=polls, stop=stop: next(polls) >= stop)
        with pytest.raises(Unfinished, match=r"stopped after \d+ steps"):
            train_base(CONFIG, TASK, recipe, 0, tmp_path / f"stopped{stop}", None, host)
        assert state.exists() and not (tmp_path / f"stopped{stop}").exists()
        resumed = train_base(CONFIG, TASK, recipe, 0, tmp_path / f"stopped{stop}", None, TrainingHost(state=state))
        assert resumed == straight and not state.exists()


class Killed(BaseException):
    """SIGKILL: the process is gone, whatever it was at."""


def test_a_killed_training_goes_on_from_what_it_kept_now_and_then(trained, tmp_path):
    state, polls, kept = tmp_path / "state.pt", itertools.count(1), list[int]()

    def should_stop():
        if (poll := next(polls)) in (3, 6):
            host.due[0] = 0.0
        if state.exists():
            kept.append(load_state(state)["step"])
        if poll == 9:
            raise Killed
        return False

    host, began = TrainingHost(state=state, should_stop=should_stop), time.monotonic()
    with pytest.raises(Killed):
        train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "base", None, host)
    assert kept == [3, 3, 3, 6, 6, 6]
    assert host.due[0] >= began + KEEP_S
    assert train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "base", None, TrainingHost(state=state)) == trained[1]
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_full_disk_costs_a_state_and_not_the_training(trained, tmp_path, monkeypatch, capsys):
    def full(path, state):
        raise ValueError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(base_training, "save_state", full)
    state = tmp_path / "state.pt"
    host = TrainingHost(state=state, due=[0.0])
    assert train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "base", None, host) == trained[1]
    assert capsys.readouterr().out == f"{state}: cannot be written: No space left on device\n"
    with pytest.raises(ValueError, match="No space left"):
        train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "b", None, TrainingHost(state=state, should_stop=lambda: True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: saved.pop("optimizer"), "KeyError: 'optimizer'"),
        (
            lambda saved: saved["model"].update({"model.norm.weight": torch.ones(3)}),
            "RuntimeError: Error(s) in loading state_dict for Decoder: size mismatch for model.norm.weight: copying a",
        ),
        (lambda saved: saved.update(curve=3), "TypeError: 'int' object is not iterable"),
    ],
)
def test_a_state_that_does_not_fit_is_set_aside_and_training_starts_again(change, said, trained, tmp_path, capsys):
    """That of another version of this project or of another size, in one line."""
    state = tmp_path / "tiny.pt"
    with pytest.raises(Unfinished):
        train_base(
            CONFIG, TASK, RECIPE, 0, tmp_path / "base", None, TrainingHost(state=state, should_stop=lambda: True)
        )
    saved = load_state(state)
    change(saved)
    save_state(state, saved)
    kept = state.read_bytes()
    assert train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "base", None, TrainingHost(state=state)) == trained[1]
    (line,) = capsys.readouterr().out.splitlines()
    again = "tiny.pt was set aside as tiny.pt.corrupt and its training started again from step 0: "
    assert line.startswith(f"{again}not a state of this training: {said}")
    assert (tmp_path / "tiny.pt.corrupt").read_bytes() == kept


def test_memory_that_ran_out_does_not_set_a_state_aside(tmp_path):
    state = tmp_path / "tiny.pt"
    save_state(state, {"step": 3})

    def restore(saved):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        TrainingHost(state=state).resumed(restore)
    assert load_state(state) == {"step": 3}


def test_a_damaged_state_is_set_aside_and_training_starts_again(trained, tmp_path, capsys):
    state = tmp_path / "tiny.pt"
    with pytest.raises(Unfinished):
        train_base(
            CONFIG, TASK, RECIPE, 0, tmp_path / "base", None, TrainingHost(state=state, should_stop=lambda: True)
        )
    state.write_bytes(state.read_bytes()[:1000])
    assert train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "base", None, TrainingHost(state=state)) == trained[1]
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("tiny.pt was set aside as tiny.pt.corrupt and its training started again from step 0: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tiny.pt.corrupt"]


def test_who_waits_for_the_base_of_another_process_can_be_stopped(tmp_path):
    name = base_name("tiny", TASK, 0, base_key(CONFIG, TASK, RECIPE, 0))
    holder = multiprocessing.Process(target=hold, args=(tmp_path / f".{name}.lock", 3.0))
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    polls, started = itertools.count(), time.monotonic()
    host = TrainingHost(should_stop=lambda: next(polls) >= 3)
    with pytest.raises(Unfinished, match="stopped while another process was at work"):
        ensure_base("tiny", CONFIG, TASK, RECIPE, 0, tmp_path, host=host)
    assert time.monotonic() - started < 2.0
    holder.join()


def test_two_processes_train_a_base_once(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "bases")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    told = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [words[-1] for words in told] == ["done", "done"]
    assert sorted(len(words) > 1 for words in told) == [False, True]
    folder = ensure_base("tiny", CONFIG, TASK, RECIPE, 0, tmp_path / "bases", fail_if_called)
    assert [path.name for path in (tmp_path / "bases").iterdir()] == [folder.name]
    assert folder.name == f"tiny-sort3-b0-{base_key(CONFIG, TASK, RECIPE, 0)}"


def fail_if_called(*state):
    raise AssertionError("trained a base that was there")


def test_a_killed_training_leaves_nothing_that_counts(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline().strip() == "5"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    name = base_name("tiny", TASK, 0, base_key(CONFIG, TASK, RECIPE, 0))
    (tmp_path / f".{name}.part").mkdir()
    (tmp_path / f".{name}.part" / "model.safetensors").write_bytes(b"half")
    start = time.monotonic()
    folder = ensure_base("tiny", CONFIG, TASK, RECIPE, 0, tmp_path)
    assert time.monotonic() - start < 60
    assert [path.name for path in tmp_path.iterdir()] == [folder.name] and read_record(folder)


def test_progress_is_told_in_words_now_and_then():
    said = []
    often, seldom = in_words("often", said.append, 0.0), in_words("seldom", said.append, 60.0)
    for step in (5, 10):
        often(step, 400, 0.25)
        seldom(step, 400, 0.25)
    assert said == [f"often: step {step} of at most 400, accuracy 0.250" for step in (5, 10)]


def test_a_damaged_folder_is_named(trained, tmp_path):
    folder = tmp_path / base_name("tiny", TASK, 0, base_key(CONFIG, TASK, RECIPE, 0))
    folder.mkdir()
    with pytest.raises(ValueError, match=f"{folder.name} is damaged .*delete it"):
        ensure_base("tiny", CONFIG, TASK, RECIPE, 0, tmp_path)
    for file in trained[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert ensure_base("tiny", CONFIG, TASK, RECIPE, 0, tmp_path, fail_if_called) == folder
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="its weights were changed"):
        ensure_base("tiny", CONFIG, TASK, RECIPE, 0, tmp_path)


def test_a_base_that_learns_nothing_is_an_error(tmp_path):
    recipe = dataclasses.replace(RECIPE, max_steps=3)
    with pytest.raises(ValueError, match=r"accuracy 0\.0\d+ after max_steps=3, less than half of its target 0\.200"):
        ensure_base("tiny", CONFIG, TASK, recipe, 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_must_be_the_tasks():
    with pytest.raises(ValueError, match="vocab_size=32 of the model is not the task's 128"):
        base_key(CONFIG, Sort(n=3, vocab_size=128), RECIPE, 0)


def test_training_keeps_the_thread_count_and_the_global_generator(tmp_path):
    before = torch.get_num_threads(), torch.get_rng_state()
    train_base(CONFIG, TASK, dataclasses.replace(RECIPE, target_accuracy=1e-4), 0, Path(tmp_path / "x"))
    assert torch.get_num_threads() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_whoever_waits_for_a_lock_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(base_model, "TELL_S", 0.2)
    holder = multiprocessing.Process(target=hold, args=(tmp_path / ".s-sort4-b0-ab.lock", 1.5))
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with held(
        tmp_path / ".s-sort4-b0-ab.lock", base_model.waiting("s-sort4-b0-ab: another process trains it", lambda: False)
    ):
        pass
    holder.join()
    said = capsys.readouterr().out.splitlines()
    assert 3 <= len(said) <= 8
    assert said[0] == "s-sort4-b0-ab: another process trains it; waited for 0 s so far"


def hold(path: Path, seconds: float) -> None:
    with held(path, lambda: time.sleep(0.01)):
        (path.parent / "held").touch()
        time.sleep(seconds)
