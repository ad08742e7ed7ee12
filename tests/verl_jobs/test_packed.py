"""Sequences end to end in verl's worker against padded rows in the local trainer: every method's loss and gradients."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.compose import compose
from harness.run.build import build
from harness.start.prepare import start_of
from harness.trainers.verl import checks
from harness.trainers.verl.data import lay_out
from harness.trainers.verl.job import write_job
from methods import METHODS
from tests.methods.test_battery_runs import QUICK
from tests.toy import small_config, small_launch
from tests.verl_jobs.test_parity import CLIP, LIMIT, local, made_batch, save, under_verl
from tests.verl_jobs.worker import nested

pytestmark = pytest.mark.verl
ROUNDED = 0.05
"""Largest relative error, as a norm, of a gradient whose products are rounded in runs of tokens or to 16 bits: packed
rows put other tokens into a run, and sum in another order."""


def words(name: str) -> list[str]:
    """A method at its default precision; preparations that train take a moment."""
    parts = {type(part).__name__ for part in METHODS[name].parts}
    quick = [f"knobs.{part}.{k}={v}" for part, values in QUICK.items() if part in parts for k, v in values.items()]
    return [f"method={name}", *quick]


def taken() -> list[str]:
    """Methods that run under verl in the plain correction mode."""
    found: list[str] = []
    for name in sorted(METHODS):
        config = small_config(*words(name))
        there = replace(
            config, trainer=replace(config.trainer, name="verl"), engine=replace(config.engine, name="vllm")
        )
        try:
            checks.check(there, compose(there))
        except ValueError:
            continue
        if (METHODS[name].mode or "decoupled") == "decoupled":
            found.append(name)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """Method -> (sampled, log-probs, loss and gradients of padded rows here, what verl's worker says)."""
    root, said = tmp_path_factory.mktemp("packed"), dict[str, tuple[Any, ...]]()
    for name in taken():
        config = small_config(
            *words(name), f"trainer.grad_clip={CLIP}", f"engine.max_new_tokens={LIMIT}", "trainer.lr=1e-3"
        )
        launch = small_launch(root)
        run = build(config, launch)[0]
        seqs, batch = made_batch(run)
        logp, loss, gradients, columns = local(run, seqs, batch)
        there = replace(
            config, trainer=replace(config.trainer, name="verl"), engine=replace(config.engine, name="vllm")
        )
        job = replace(lay_out(config, launch, compose(config), start_of(config, launch), root / name), config=there)
        write_job(replace(job, launch=replace(launch, micro_batch_tokens=70)))  # several passes
        save(job, seqs, batch, columns)
        said[name] = (seqs.sampled, logp, loss, gradients)
    under_verl([root / name for name in said], 1)
    return {name: (*own, torch.load(root / name / "out1.pt", weights_only=True)) for name, own in said.items()}


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance as a norm."""
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


def test_every_method_has_the_loss_and_gradients_of_padded_rows(answers: dict[str, tuple[Any, ...]]) -> None:
    wrong: dict[str, tuple[float, ...]] = {}
    for name, (sampled, logp, loss, gradients, found) in answers.items():
        exact = set(found["products"]) == {"float32"}
        theirs = found["logp"][sampled[:, : found["logp"].shape[1]]]
        apart = float((theirs - logp[sampled]).abs().max())
        of_loss = abs(found["metrics"]["lowbit_loss"] - loss) / max(abs(loss), 1e-3)
        whole = [torch.cat([g[n].flatten() for n in sorted(gradients)]) for g in (found["gradients"], gradients)]
        of_gradient = far(*whole)
        bounds = (1e-5, 1e-4, 1e-4) if exact else (0.1, 0.05, ROUNDED)
        if not (apart <= bounds[0] and of_loss <= bounds[1] and of_gradient <= bounds[2]):
            wrong[name] = (apart, of_loss, of_gradient)
    assert wrong == {}
    assert len(answers) > 40
    losses = {round(loss, 6) for _, _, loss, *_ in answers.values()}
    assert len(losses) > 10  # methods differ


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
