"""Sequences end to end in verl's worker against padded rows in the local trainer: every method's loss and gradients.

Products in float32 agree to 1e-5 whatever the order of the rows. Where a method rounds the operands of its products
(16 bits, FP8 in runs of tokens), a last bit of a sum decides on which side a value falls, and a run of tokens has other
tokens in it: padded rows are then as far away as a rounding, and 1e-5 holds against the local trainer with the rows
end to end in the very passes that the worker took.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from harness.cli.methods import engines_of, refusal
from harness.run.build import build
from methods import METHODS
from tests.methods.test_battery_runs import QUICK
from tests.toy import small_config, small_launch
from tests.verl_jobs.test_parity import CLIP, LIMIT, columns_of, corrected, learned, made_batch, saved_job, under_verl
from tests.verl_jobs.worker import nested

pytestmark = pytest.mark.verl
EQUAL = 1e-5
"""Nats of a log-prob; a loss, absolute or relative; gradients of all weights together, relative as a norm."""
ROUNDED = {"bf16": (0.02, 5e-3), "fp16": (0.01, 2e-3), "e4m3": (0.02, 0.05)}
"""Rounding of operands -> how far padded rows may be off: log-probs, nats, and gradients, as above."""


class Answer(NamedTuple):
    """One method's batch, three times."""

    sampled: Tensor
    padded: tuple[Tensor, float, dict[str, Tensor]]
    """(log-probs, loss, gradients) of padded rows here."""
    packed: tuple[Tensor, float, dict[str, Tensor]]
    """The same of rows end to end here, in the worker's passes."""
    found: dict[str, Any]
    """verl's worker."""


def cases() -> Iterator[tuple[str, list[str]]]:
    """Every method that says `verl` and the words that choose it, at the first precision that verl takes; preparations
    that train take a moment."""
    for name, method in sorted(METHODS.items()):
        if "verl" not in engines_of(method):
            continue
        precision = next(each for each in method.precisions if refusal("verl", method, each) is None)
        parts = {type(part).__name__ for part in method.parts}
        quick = [f"knobs.{part}.{k}={v}" for part, values in QUICK.items() if part in parts for k, v in values.items()]
        yield name, [f"method={name}", f"precision={precision}", *quick]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Method -> what padded rows, the same passes and verl's worker say; on one thread, which sums in the worker's
    order."""
    root, asked, threads = tmp_path_factory.mktemp("packed"), {}, torch.get_num_threads()
    torch.set_num_threads(1)
    for name, words in cases():
        config = small_config(*words, f"trainer.grad_clip={CLIP}", f"engine.max_new_tokens={LIMIT}", "trainer.lr=1e-3")
        launch = small_launch(root)
        run = build(config, launch)[0]
        seqs, batch = made_batch(run)
        logp = run.trainer.score(seqs).logp
        correction = corrected(run, batch, logp)
        several = replace(launch, micro_batch_tokens=70)  # passes
        saved_job(config, several, root / name, seqs, batch, columns_of(batch, correction))
        asked[name] = (run, seqs, batch, correction, (logp, *learned(run, seqs, batch, correction)))
    under_verl([root / name for name in asked], 1)
    said = dict[str, Answer]()
    for name, (run, seqs, batch, correction, padded) in asked.items():
        found = torch.load(root / name / "out1.pt", weights_only=True)
        trainer, passes = run.trainer, [torch.tensor(rows) for rows in found["passes"]]
        assert len(passes) > 1
        assert sorted(torch.cat(passes).tolist()) == list(range(len(seqs.ids)))
        trainer.thrift = replace(trainer.thrift, packing=True)
        trainer.passes = lambda *_, passes=passes, **__: passes
        logp, back = trainer.score(seqs).logp, torch.cat(passes).argsort()
        said[name] = Answer(seqs.sampled, padded, (logp[back], *learned(run, seqs, batch, correction)), found)
    torch.set_num_threads(threads)
    return said


def apart(answer: Answer, here: tuple[Tensor, float, dict[str, Tensor]]) -> tuple[float, float, float]:
    """(log-probs, loss, gradients): how far the worker is from `here`, in the units of `EQUAL`."""
    (logp, loss, gradients), found = here, answer.found
    assert found["gradients"].keys() == gradients.keys()
    theirs = found["logp"][answer.sampled[:, : found["logp"].shape[1]]]
    there, own = (
        torch.cat([g[n].flatten() for n in sorted(gradients)]).double() for g in (found["gradients"], gradients)
    )
    return (
        float((theirs - logp[answer.sampled]).abs().max()),
        abs(found["metrics"]["lowbit_loss"] - loss) / max(abs(loss), 1.0),
        float((there - own).norm() / own.norm()),
    )


def rounding(answer: Answer) -> str | None:
    """Rounding of the operands of a method's products (a key of `ROUNDED`); None where none is."""
    kinds = " ".join(answer.found["products"])
    return next((kind for kind in ("e4m3", "fp16", "bf16") if kind in kinds), None)


def test_every_method_that_says_verl_is_there_and_has_something_to_learn(answers: dict[str, Answer]) -> None:
    assert list(answers) == [name for name in sorted(METHODS) if "verl" in engines_of(METHODS[name])]
    assert len(answers) > 60
    modes = {METHODS[name].mode or "decoupled" for name in answers}
    assert modes == {"decoupled", "bypass_ppo", "bypass_pg"}
    for name, answer in answers.items():
        norm = float(torch.cat([g.flatten() for g in answer.padded[2].values()]).norm())
        assert norm > 1e-2, name
    losses = {round(answer.padded[1], 6) for answer in answers.values()}
    assert len(losses) > 20  # methods differ


def test_every_method_has_the_loss_and_gradients_of_the_local_trainer(answers: dict[str, Answer]) -> None:
    """To 1e-5, in the same passes."""
    found = {name: apart(answer, answer.packed) for name, answer in answers.items()}
    assert {name: far for name, far in found.items() if max(far) > EQUAL} == {}


def test_float32_products_have_the_loss_and_gradients_of_padded_rows(answers: dict[str, Answer]) -> None:
    """To 1e-5; where products are rounded, to what a rounding is."""
    found = {name: apart(answer, answer.padded) for name, answer in answers.items()}
    exact = {name: far for name, far in found.items() if rounding(answers[name]) is None}
    assert len(exact) > 50
    assert {name: far for name, far in exact.items() if max(far) > EQUAL} == {}
    wrong = {}
    for name in found.keys() - exact.keys():
        of_logp, of_gradient = ROUNDED[rounding(answers[name]) or ""]
        if not (found[name][0] < of_logp and found[name][1] < of_logp and found[name][2] < of_gradient):
            wrong[name] = found[name]
    assert wrong == {}


def test_rows_of_verls_queue_become_padded_sequences_and_back() -> None:
    """Ids of three rows, prompts of 2, 1 and 3 tokens; a value per response token stands at its predecessor's place."""
    from harness.trainers.verl.engine import Engine, sequences

    rows = [[11, 12, 13, 14], [21, 22], [31, 32, 33, 34, 35, 36]]
    prompts = [2, 1, 3]
    micro_batch = {
        "input_ids": nested([torch.tensor(row) for row in rows]),
        "responses": nested([torch.tensor(row[p:]) for row, p in zip(rows, prompts, strict=True)]),
    }
    seqs = sequences(micro_batch)  # type: ignore[arg-type]
    assert seqs.ids.tolist() == [[11, 12, 13, 14, 0, 0], [21, 22, 0, 0, 0, 0], rows[2]]
    assert torch.as_tensor(seqs.prompt_lens).tolist() == prompts
    assert seqs.token_ids.tolist() == [[13, 14, 0], [22, 0, 0], [34, 35, 36]]
    assert seqs.sampled.tolist() == [[True, True, False], [True, False, False], [True, True, True]]

    engine: Any = SimpleNamespace()
    given, kept = Engine.prepare_model_inputs(engine, micro_batch)  # type: ignore[arg-type]
    assert given["seqs"].ids.tolist() == seqs.ids.tolist()
    assert kept["predicts"].long().tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0]
    values = torch.arange(1.0, 7.0)

    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    batch = TensorDict(micro_batch, batch_size=3)
    for wanted in (False, True):
        tu.assign_non_tensor_data(batch, "calculate_entropy", wanted)
        out = Engine.prepare_model_outputs(engine, (values, -values), kept, batch)
        assert set(out) == ({"log_probs", "entropy"} if wanted else {"log_probs"})
        assert [row.tolist() for row in out["log_probs"].unbind()] == [[0, 1, 2, 0], [3, 0], [0, 0, 4, 5, 6, 0]]
