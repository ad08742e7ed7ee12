"""Text bases: packed documents, the step on them, the schedule, when it stops, and what is stored."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

from harness.config.load import load
from harness.config.schema import Launch
from harness.foundation.state_files import load_state
from harness.models.checkpoint import load_decoder
from harness.models.decoder import Decoder, DecoderConfig
from harness.start.base_model import base_key, base_name, read_record, train_base
from harness.start.base_training import TrainingHost, Unfinished
from harness.start.prepare import base_folder, check_data, task_of
from harness.start.text_documents import MIX, Bucket, Documents, Packed, batches, bucket_at, buckets_of, pack
from harness.start.text_step import PackedDecoder, PackedStep, document_positions
from harness.start.text_training import (
    LastLook,
    TextRecipe,
    can_be_near,
    fit_text,
    learning_rate,
    new_decoder,
    number_certainty,
    numbers_of,
    sampled_accuracy,
)
from harness.tasks import build_task
from harness.tasks.wordmath import Wordmath

TASK = Wordmath(n=2, layout="ordered", num_names=4, vocab_size=160, reward="path")
CONFIG = DecoderConfig(
    vocab_size=160, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
    bos_id=2, eos_id=1, pad_id=0,
)  # fmt: skip
RECIPE = TextRecipe(target_accuracy=0.15, eval_every=40, num_eval=128, max_steps=400, batch_tokens=1024, lr=1e-2,
                    warmup_steps=10, decay_from=1.0)  # fmt: skip


def test_packed_documents_by_hand():
    bucket = Bucket(low=1, high=2, longest=6, most=6)
    shown = [((7, 8), (9,)), ((1,) * 5, (2,) * 5), ((5,), (6, 4)), ((3, 3), (3, 3))]
    batch, count = pack(shown, bucket, 2, 9)
    assert count == 3  # the second is longer than the bucket's longest, the fourth is one token too many
    assert batch.ids.tolist() == [7, 8, 9, 5, 6, 4, 0, 0, 0]
    assert batch.wanted.tolist() == [0, 1, 0, 1, 1, 0, 0, 0, 0]
    assert batch.ends.tolist() == [0, 3, 6, 9, 9, 9, 9]
    assert (batch.bucket, batch.num_wanted, batch.num_used) == (2, 3, 6)
    assert document_positions(batch.ends, 9).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_sizes_are_cut_at_the_tasks_own():
    task = Wordmath(n=10)
    cut = [(bucket.low, bucket.high) for bucket in buckets_of(task, (6, 14, 36), 32768, 4096)]
    assert cut == [(2, 6), (7, 10)]
    assert [(b.low, b.high) for b in buckets_of(task, (), 32768, 4096)] == [(10, 10)]
    assert [(b.low, b.high) for b in buckets_of(Wordmath(n=4), (6, 14), 32768, 4096)] == [(2, 4)]
    with pytest.raises(ValueError, match=r"base.batch_tokens=512: a document of n=10 has up to \d+ tokens"):
        buckets_of(task, (6,), 512, 4096)


def test_short_documents_come_first():
    assert MIX[0][1][:3] == (0.7, 0.3, 0.0)
    assert [bucket_at(0.1, chance, 4) for chance in (0.0, 0.69, 0.71, 0.999)] == [0, 0, 1, 1]
    assert [bucket_at(1.0, chance, 4) for chance in (0.29, 0.31, 0.61, 0.81, 0.83)] == [0, 1, 2, 2, 3]
    assert [bucket_at(1.0, chance, 2) for chance in (0.49, 0.51)] == [0, 1]  # 0.3 and 0.3, of 0.6
    assert bucket_at(0.05, 0.99, 1) == 0


def test_batches_are_right_answers_of_their_bucket():
    task = Wordmath(n=5)
    buckets = tuple(buckets_of(task, (3,), 4096, 4096))
    documents = Documents(task=task, buckets=buckets, tokens=4096, base_seed=0, max_steps=10)
    drawn = [documents[step] for step in range(1, 11)]
    assert {batch.bucket for batch in drawn} == {0, 1}
    for batch in drawn:
        starts = batch.ends[batch.ends < batch.num_used].tolist()
        assert len(batch.ids) == 4096 and batch.num_used > 3700 and len(starts) == len({*starts}) >= 15
        assert batch.ends.diff().max() <= buckets[batch.bucket].longest and batch.ends[-1] == 4096
        assert (batch.ids[starts] == 2).all()  # <bos>
        last = [end - 1 for end in [*starts[1:], batch.num_used]]
        assert (batch.ids[last] == 1).all() and batch.wanted.sum() == batch.num_wanted
        # the last prompt token, `?`, is the first position that is learnt of each document
        first = [start + int(batch.wanted[start:].argmax()) for start in starts]
        assert {task.words[int(batch.ids[at])] for at in first} == {"?"}
    again, other = documents[3], dataclasses.replace(documents, base_seed=1)[3]
    assert torch.equal(again.ids, drawn[2].ids) and not torch.equal(other.ids, again.ids)


class Breaking(Documents):
    """Documents whose process is killed."""

    def __getitem__(self, step):
        os.kill(os.getpid(), signal.SIGKILL)


def test_processes_make_the_same_batches():
    documents = Documents(
        task=TASK, buckets=tuple(buckets_of(TASK, (), 512, 4096)), tokens=512, base_seed=3, max_steps=9
    )
    feed = batches(documents, 4, workers=2, is_pinned=False)
    for step in (4, 5, 6, 7):
        for ours, theirs in zip(next(feed), documents[step], strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert len(list(feed)) == 2 and not multiprocessing.active_children()


def test_a_process_that_dies_ends_the_training():
    feed = batches(Breaking(task=TASK, buckets=(), tokens=512, base_seed=3, max_steps=9), 1, workers=1, is_pinned=False)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        next(feed)


def losses_by_hand(model, batch: Packed):
    """Document by document through the model's own forward pass: the mean over response tokens."""
    total = torch.zeros(())
    for first, end in itertools.pairwise(batch.ends.tolist()):
        if end <= batch.num_used and end > first:
            ids = batch.ids[None, first:end]
            losses = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")
            total = total + (losses * batch.wanted[first : end - 1]).sum()
    return total / batch.num_wanted


def test_the_packed_loss_and_its_gradient_are_the_models_own():
    buckets = buckets_of(TASK, (), 512, 4096)
    batch = Documents(task=TASK, buckets=tuple(buckets), tokens=512, base_seed=0, max_steps=9)[1]
    model = new_decoder(CONFIG, 0)
    expected = losses_by_hand(model, batch)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    for dtype, size, tolerance in ((torch.float32, batch.num_used, 1e-5), (torch.bfloat16, 512, 0.05)):
        decoder = PackedDecoder(model, dtype, buckets[0].longest)
        losses = decoder.losses(batch.ids[:size], batch.ends.clamp(max=size), buckets[0].longest)
        loss = (losses * batch.wanted[:size]).sum() / batch.num_wanted
        assert loss.dtype == torch.float32 and abs(float((loss - expected).detach())) < tolerance
        for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < tolerance


def test_a_mixture_trains_with_the_losses_and_gradients_of_its_decoder():
    buckets = buckets_of(TASK, (), 512, 4096)
    documents = Documents(task=TASK, buckets=tuple(buckets), tokens=512, base_seed=0, max_steps=9)
    config = dataclasses.replace(CONFIG, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    model, batch = new_decoder(config, 0), documents[1]
    expected = losses_by_hand(model, batch)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    decoder = PackedDecoder(model, torch.float32, buckets[0].longest)
    losses = decoder.losses(batch.ids[: batch.num_used], batch.ends.clamp(max=batch.num_used), buckets[0].longest)
    loss = (losses * batch.wanted[: batch.num_used]).sum() / batch.num_wanted
    assert abs(float((loss - expected).detach())) < 1e-5
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        assert float(theirs.norm()) > 0 and float((ours - theirs).norm() / theirs.norm()) < 1e-4
    step = PackedStep(model, buckets, 512, (0.9, 0.95), 0.1, 0.5)
    step(batch, 1e-2)
    step(batch, 1e-2)
    assert float(step.loss) < float(expected.detach()) - 0.1
    half = PackedDecoder(model, torch.bfloat16, buckets[0].longest)  # as on a GPU: products of 16 bits
    found = half.losses(batch.ids, batch.ends, buckets[0].longest)
    assert found.dtype == torch.float32 and bool(found.isfinite().all())


@pytest.mark.parametrize("has_muon", [False, True])
def test_a_step_is_clipped_adamw_or_muon_with_decay_on_matrices(has_muon):
    """torch's own optimizers, with gradients computed by hand, are the oracle."""
    buckets = buckets_of(TASK, (), 512, 4096)
    documents = Documents(task=TASK, buckets=tuple(buckets), tokens=512, base_seed=0, max_steps=9)
    model, twin = new_decoder(CONFIG, 0), new_decoder(CONFIG, 0)
    step = PackedStep(model, buckets, 512, (0.9, 0.95), 0.1, 0.5, has_muon)
    matrices = {name: p for name, p in twin.named_parameters() if p.dim() == 2}
    inside = [p for name, p in matrices.items() if has_muon and "embed" not in name]
    assert len(inside) == (14 if has_muon else 0)  # seven in each of two layers
    groups = [
        {"params": [p for name, p in matrices.items() if not has_muon or "embed" in name], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, 1.0, (0.9, 0.95))]
    if has_muon:
        optimizers.append(torch.optim.Muon(inside, 1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for number, lr in ((1, 1e-3), (2, 2e-3), (3, 5e-4)):
        step(documents[number], lr)
        loss = losses_by_hand(twin, documents[number])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        assert abs(float(step.loss - loss.detach())) < 1e-4
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4 if has_muon else 2e-5, rtol=1e-3)  # Muon rounds to bfloat16


def test_other_families_are_refused():
    model = Decoder(dataclasses.replace(CONFIG, qk_norm=False, attention_bias=True))
    with pytest.raises(ValueError, match=r"model.family: a base for text is trained for qwen3 alone"):
        PackedDecoder(model, torch.float32, 8)


def test_the_rate_warms_up_stays_and_falls():
    recipe = TextRecipe(lr=1.0, warmup_steps=10, max_steps=100, decay_from=0.6, final_lr=0.2)
    rates = {1: 0.1, 5: 0.5, 10: 1.0, 60: 1.0, 80: 0.6, 100: 0.2}
    assert {step: learning_rate(recipe, step) for step in rates} == pytest.approx(rates)
    assert learning_rate(dataclasses.replace(recipe, decay_from=1.0), 100) == 1.0
    with pytest.raises(ValueError, match=r"base.batch_tokens=0: a task in words needs it; choose base=text"):
        TextRecipe(batch_tokens=0)
    for sizes in ((5, 3), (3, 3), (1, 6)):
        with pytest.raises(ValueError) as caught:
            TextRecipe(batch_tokens=1024, sizes=sizes)
        assert str(caught.value) == (
            f"base.curriculum={[*sizes]}: ends of ranges of problem sizes, for a task in words; valid: numbers that "
            "rise, from 2 on, such as [6,14]"
        )


def test_weights_start_with_the_variance_of_their_inputs():
    config = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=256)
    for name, tensor in new_decoder(config, 0).named_parameters():
        if tensor.dim() == 2:
            wanted = 0.02 if "embed" in name else tensor.shape[1] ** -0.5
            wanted *= 0.5 if "o_proj" in name or "down_proj" in name else 1.0  # 1 / sqrt(2 * 2 layers)
            assert float(tensor.detach().std()) == pytest.approx(wanted, rel=0.1), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "tiny"
    return folder, train_base(CONFIG, TASK, RECIPE, 0, folder)


def test_training_stops_at_the_sampled_accuracy(trained):
    folder, record = trained
    steps, sampled, sure = zip(*record["curve"], strict=True)
    assert record["is_target_reached"] and record["steps"] == steps[-1] < 400 and steps[0] == 40
    assert sampled[-1] >= 0.15 and all(value is None or value < 0.15 for value in sampled[:-1])
    assert all((value is None) == (bound < 0.03) for value, bound in zip(sampled, sure, strict=True))
    every = [10 if (value or 0) >= 0.075 else 40 for value in sampled]
    assert [b for _, b in itertools.pairwise(steps)] == [
        (a // gap + 1) * gap for a, gap in zip(steps[:-1], every[:-1], strict=True)
    ]
    assert {*every[:-1]} == {10, 40}
    assert record["accuracy"] >= 0.075 and record["rule"] == "text 1" and "seconds" not in record
    assert read_record(folder) == record


def test_training_again_and_after_a_stop_gives_the_same_files(trained, tmp_path):
    folder, record = trained
    host = TrainingHost(state=tmp_path / "state.pt", should_stop=iter([False] * 44 + [True]).__next__)
    with pytest.raises(Unfinished, match="stopped after 45 steps"):
        train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "again", None, host)
    again = train_base(CONFIG, TASK, RECIPE, 0, tmp_path / "again", None, TrainingHost(state=tmp_path / "state.pt"))
    assert again == record and not (tmp_path / "state.pt").exists()
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_damaged_state_is_set_aside_and_training_starts_again(tmp_path):
    recipe, state = dataclasses.replace(RECIPE, max_steps=5, eval_every=5, num_eval=8), tmp_path / "state.pt"
    whole = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(), None).model.state_dict()
    state.write_bytes(b"half a state")
    again = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(state=state), None).model.state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert (tmp_path / "state.pt.corrupt").read_bytes() == b"half a state"


@pytest.mark.parametrize("kind", ["killed", "of another recipe"])
def test_what_a_training_kept_as_it_went_on_is_gone_on_from_where_it_fits(kind, tmp_path, capsys):
    recipe, state = dataclasses.replace(RECIPE, max_steps=5, eval_every=5, num_eval=8), tmp_path / "state.pt"
    whole = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(), None).model.state_dict()
    first = recipe if kind == "killed" else dataclasses.replace(recipe, optimizer="muon")
    polls = itertools.count(1)

    def should_stop():
        if next(polls) == 4:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        fit_text(CONFIG, TASK, first, 0, TrainingHost(state=state, should_stop=should_stop, due=[0.0]), None)
    assert load_state(state)["step"] == 1
    again = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(state=state), None).model.state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    said = capsys.readouterr().out
    assert said == "" if kind == "killed" else "not a state of this training: " in said and said.count("\n") == 1


def test_averaged_weights_are_kept_as_another_library_averages_them(monkeypatch):
    """The base is the exponential average; torch's own `AveragedModel` over the same weights is the oracle."""
    recipe = dataclasses.replace(RECIPE, target_accuracy=1.0, max_steps=30, eval_every=30, num_eval=8, average=0.25)
    trained = fit_text(CONFIG, TASK, dataclasses.replace(recipe, average=0.0), 0, TrainingHost(), None)
    averaged, call = list[AveragedModel](), PackedStep.__call__

    def mean(so_far: torch.Tensor, new: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
        return so_far + (new - so_far) * min(1.0, 4 / (int(count) + 1))

    def watched(self: PackedStep, batch: Packed, lr: float) -> None:
        call(self, batch, lr)
        if not averaged:  # the first four steps replace it: their weight is 1
            averaged.append(AveragedModel(self.decoder.model, avg_fn=mean))
        averaged[0].update_parameters(self.decoder.model)

    monkeypatch.setattr(PackedStep, "__call__", watched)
    found = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(), None)
    for own, other in zip(found.model.parameters(), averaged[0].module.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found.model.model.embed_tokens.weight, trained.model.model.embed_tokens.weight)


def test_a_stop_keeps_the_average_and_momenta(tmp_path):
    recipe = dataclasses.replace(
        RECIPE, target_accuracy=1.0, max_steps=24, eval_every=24, num_eval=8, average=0.25, optimizer="muon"
    )
    whole = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(), None).model.state_dict()
    asked = itertools.count()
    host = TrainingHost(state=tmp_path / "state.pt", should_stop=lambda: next(asked) == 12)
    with pytest.raises(Unfinished):
        fit_text(CONFIG, TASK, recipe, 0, host, None)
    again = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(state=tmp_path / "state.pt"), None).model.state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_base_that_passed_its_target_lies_between_the_last_two_looks():
    """Accuracy here is the square of one weight, which goes from 0 to 1 in 200 steps: a half of the way is too little,
    three quarters are too much, five eighths are 0.39."""
    model = torch.nn.Linear(1, 1, bias=False)

    def weight(value: float) -> None:
        model.weight.data.fill_(value)

    def look(step: int) -> tuple[int, float, float]:
        return step, float(model.weight.detach()) ** 2, 1.0

    weight(0.0)
    last = LastLook(model, is_kept=True)
    last.keep(1000)
    weight(1.0)
    seen = last.go_back(1200, look, 0.40, 0.03)
    assert seen == [(1100, 0.25, 1.0), (1150, 0.5625, 1.0), (1125, 0.390625, 1.0)]
    assert float(model.weight.detach()) == 0.625
    weight(1.0)
    assert len(last.go_back(1200, look, 0.40, 0.0)) == 6, "it ends after six halvings where nothing is near enough"
    assert abs(float(model.weight.detach()) ** 2 - 0.40) < 0.02


def test_training_goes_back_where_the_target_was_passed_by_too_much(trained, tmp_path):
    """At step 200 it is far below the target, at 400 far above; the base has the accuracy that was asked for, also
    where a stop came in between."""
    recipe = dataclasses.replace(RECIPE, eval_every=200, num_eval=512, average=0.1)
    far = fit_text(CONFIG, TASK, recipe, 0, TrainingHost(), None)
    (_, low, _), (_, high, _) = far.curve
    assert low < 0.05 and high > 0.25
    recipe, asked = dataclasses.replace(recipe, tolerance=0.02), itertools.count(1)
    host = TrainingHost(state=tmp_path / "state.pt", should_stop=lambda: next(asked) == 250)
    with pytest.raises(Unfinished, match="stopped after 250 steps"):
        train_base(CONFIG, TASK, recipe, 0, tmp_path / "near", None, host)
    near = train_base(CONFIG, TASK, recipe, 0, tmp_path / "near", None, TrainingHost(state=tmp_path / "state.pt"))
    seen = [tuple(point) for point in near["curve"]]
    assert seen[:2] == [(step, round(a, 6), round(b, 6)) for step, a, b in far.curve] and near["steps"] == 400
    assert 3 <= len(seen) <= 8 and all(200 < step < 400 for step, _, _ in seen[2:])
    assert near["is_target_reached"] and abs(seen[-1][1] - 0.15) <= 0.02
    assert abs(near["accuracy"] - 0.15) < 0.06, "on other questions, 512 of them"


def test_the_tokenizer_of_a_base_reads_words(trained):
    stored = json.loads((trained[0] / "tokenizer.json").read_text())
    assert [*stored["model"]["vocab"]] == list(TASK.words)
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(trained[0] / "tokenizer.json"))
    for item in TASK.sample("eval", range(3)):
        text = " ".join(TASK.words[token] for token in item.prompt)
        assert tokenizer.encode(text, add_special_tokens=False).ids == list(item.prompt)


def test_the_certainty_of_numbers_is_a_product_over_them(trained):
    model, items = load_decoder(trained[0]), TASK.sample("eval", range(6))
    by_hand = []
    for item, answer in zip(items, TASK.answers(items), strict=True):
        ids = torch.tensor([[*item.prompt, *answer]])
        logp = model(ids)[0, :-1].detach().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        own = range(len(item.prompt), ids.shape[1])
        by_hand.append(float(sum(logp[at - 1] for at in own if int(ids[0, at]) in TASK.firm_ids).exp()))
    assert len({round(value, 6) for value in by_hand}) == 6
    for tokens in (128, 4096):
        assert number_certainty(model, TASK, items, tokens) == pytest.approx(sum(by_hand) / 6, rel=1e-4)


def test_longer_answers_are_sampled_at_a_lower_certainty():
    """Certainty and sampled accuracy of bases of 10M parameters on a GPU, at n = 10 and n = 30."""
    counted = {n: numbers_of(task, task.sample("eval", range(100))) for n in (4, 10, 30)
               for task in [build_task("wordmath", {"n": n})]}  # fmt: skip
    assert counted[4] < counted[10] < 70 < counted[30] == pytest.approx(228, rel=0.05)
    assert can_be_near(0.108, counted[10], 0.4) and not can_be_near(0.059, counted[10], 0.4)
    assert can_be_near(0.0678, counted[30], 0.4) and not can_be_near(1.9e-5, counted[30], 0.4)
    assert not can_be_near(0.0678, 70, 0.4) and not can_be_near(0.0, 0, 0.4)


def test_sampled_accuracy_is_that_of_the_runs_own_engine(trained):
    model, items = load_decoder(trained[0]), TASK.sample("eval", range(128))
    drawn = [sampled_accuracy(model, TASK, items, seed=seed) for seed in range(12)]
    # 1536 answers at an accuracy near .15: s.d. .009; the record's 128 have one of .03
    assert len({*drawn}) > 3 and abs(sum(drawn) / 12 - trained[1]["accuracy"]) < 0.1
    greedy = sampled_accuracy(model, TASK, items, seed=0, temperature=0.0)
    assert round(greedy, 6) == trained[1]["greedy_accuracy"]


def test_the_key_covers_the_recipe_and_the_reward():
    changed = {"target_accuracy": 0.3, "eval_every": 41, "num_eval": 64, "max_steps": 401, "batch_tokens": 2048,
               "sizes": (2,), "lr": 1e-3, "final_lr": 0.1, "decay_from": 0.5, "betas": (0.9, 0.9), "weight_decay": 0.0,
               "warmup_steps": 11, "grad_clip": 2.0, "average": 0.1, "optimizer": "muon",
               "tolerance": 0.03}  # fmt: skip
    assert {*changed} == {field.name for field in dataclasses.fields(TextRecipe)}
    keys = [base_key(CONFIG, TASK, dataclasses.replace(RECIPE, **{name: value}), 0) for name, value in changed.items()]
    keys += [base_key(CONFIG, TASK, RECIPE, seed) for seed in (0, 1)]
    keys += [base_key(CONFIG, dataclasses.replace(TASK, reward="answer"), RECIPE, 0)]
    assert len({*keys}) == len(keys) == 19
    assert base_name("words_s", TASK, 1, "0123456789ab") == "words_s-wordmath2-b1-0123456789ab"


def test_the_factor_on_the_rate_makes_another_base_as_the_rate_itself_does(tmp_path):
    def folder(*words: str) -> str:
        run = load(["model=words_10m", "task=wordmath", "task.n=10", *words])
        found = base_folder(run, Launch(results=str(tmp_path)))
        assert found is not None
        return found.name

    by_rate = folder("base=text", "base.lr_factor=1", "model.sft_lr=1.5e-3")
    assert folder("base=text") == by_rate != folder("base=text_first")
    assert folder("base=text_first") == "words_10m-wordmath10-b0-493c25b6bdf4"  # as committed
    assert folder("base=text_first", "base.decay_from=0.5", "base.max_steps=5000", "base.eval_every=400",
                  "base.lr_factor=0.5") == by_rate  # fmt: skip


def test_a_base_may_be_trained_for_another_size(tmp_path):
    """`base.n` changes the task of the base alone: its folder is that of a run at this size."""
    words = ["model=words_10m", "base=text_long", "task=wordmath"]
    run, own = load([*words, "task.n=10", "base.n=30"]), load([*words, "task.n=30"])
    launch = Launch(results=str(tmp_path))
    assert base_folder(run, launch) == base_folder(own, launch) != base_folder(load([*words, "task.n=10"]), launch)
    assert task_of(run).content_hash() != task_of(own).content_hash()
    assert base_folder(run, launch).name == "words_10m-wordmath30-b0-11e672f7bb51"  # as committed
    with pytest.raises(ValueError, match=r"model.max_positions=900: with base.n=30 a prompt of \d+ and a response"):
        check_data(load([*words, "task.n=10", "base.n=30", "model.max_positions=900"]))
    with pytest.raises(ValueError, match=r"base.n=0"):
        load([*words, "base.n=0"])


def test_a_run_names_its_text_base(tmp_path):
    words = ["model=words_s", "base=text_small", "task=wordmath_ordered"]
    folder = base_folder(load(words), Launch(results=str(tmp_path)))
    assert folder is not None and folder.name.startswith("words_s-wordmath4-b0-")
    shifted = base_folder(load([*words, "base.decay_from=0.5"]), Launch(results=str(tmp_path)))
    assert shifted is not None and shifted != folder
    with pytest.raises(ValueError, match="choose base=text"):
        base_folder(load([*words, "base=default"]), Launch(results=str(tmp_path)))
    with pytest.raises(ValueError, match="choose base=text"):
        check_data(load([*words, "base=default"]))
    with pytest.raises(ValueError, match=r"base.average=0.1: for tasks in words alone, and task=sort is none;"):
        check_data(load(["task=sort", "base.average=0.1"]))
    with pytest.raises(ValueError, match=r"base.batch_tokens=32768: .* valid: 0, as in base=default"):
        check_data(load(["task=sort", "base=text"]))
    with pytest.raises(ValueError, match=r"^model.family: a base for text is trained for qwen3 alone, with tied emb"):
        check_data(load([*words, "model.family=qwen2"]))
    with pytest.raises(ValueError, match=r"^base.batch_tokens=64: a document of n=4 has up to \d+ tokens$"):
        check_data(load([*words, "base.batch_tokens=64"]))
    with pytest.raises(ValueError, match=r"^base.curriculum=\[1\]: task 'sort': n=1 is not an integer from 2 to 1024$"):
        check_data(load(["task=sort", "base.curriculum=[1]"]))
    with pytest.raises(ValueError, match=r"vocab_size=32: valid: 160 \(model=words_s\), 512 \(model=words_10m\)"):
        base_folder(load(["base=text_small", "task=wordmath_ordered"]), Launch(results=str(tmp_path)))
