"""Our classes in the real package: registries, settings against verl's own tree, the mask of a padded vocabulary."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from harness.config.compose import compose
from harness.foundation.provenance import ROOT
from harness.start.prepare import start_of
from harness.trainers.verl.data import lay_out, prompt_length
from harness.trainers.verl.job import VerlJob
from harness.trainers.verl.settings import build_of, environment, merged, verl_settings
from tests.toy import small_config, small_launch

pytestmark = pytest.mark.verl


def made(folder: Path, *words: str) -> VerlJob:
    config = small_config("trainer=verl", *words)
    launch = small_launch(folder)
    return lay_out(config, launch, compose(config), start_of(config, launch), folder / "verl")


def said(job: VerlJob, code: str) -> str:
    """Output of a process of the job."""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment(job) | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_verl_is_told_of_the_plugin() -> None:
    found = [e.value for e in entry_points(group="verl.plugins") if e.name == "lowbit"]
    assert found == ["harness.trainers.verl.plugin"]


def test_a_process_of_a_job_has_our_classes_and_verl_takes_every_setting(tmp_path: Path) -> None:
    job = made(tmp_path, "method=flashrl", "precision=fp8_channel", "algo.kl_coef=0.01", "algo.num_minibatches=2")
    code = """
import json
from harness.trainers.verl import plugin
from harness.trainers.verl.job import current_job
from harness.trainers.verl.driver import compose_config
import verl
plugin.check_registered()
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
config = compose_config(current_job())
actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
print(json.dumps([get_platform().device_name, actor.ppo_mini_batch_size, actor.use_kl_loss,
                  config.actor_rollout_ref.rollout.prompt_length, config.actor_rollout_ref.rollout.n,
                  actor.engine.mixed_precision["param_dtype"], str(config.data.train_files[0])]))
"""
    found = json.loads(said(job, code))
    assert found == ["cpu", 4, True, prompt_length(job), 4, "float32", str(job.train_file)]


def test_an_unknown_setting_is_refused_by_name(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    job = made(tmp_path, "method=bf16")
    values = verl_settings(job, compose(job.config), build_of("cpu"), 7)
    tree = OmegaConf.create({"actor_rollout_ref": {"actor": {"ppo_epochs": 1}}})
    with pytest.raises(ValueError, match=r"verl has no setting data\.train_files; "):
        merged(tree, values)


def test_a_process_of_no_job_is_left_alone() -> None:
    code = "import verl; from verl.workers.rollout.base import _ROLLOUT_REGISTRY as r; print(('lowbit', 'async') in r)"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LOWBIT_", "VERL_"))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "False"


FOREIGN = """
from harness.trainers.verl import settings
from harness.trainers.verl.job import current_job
from tests.verl_jobs.worker import make_worker, meet
settings.PRECISION["param_dtype"] = "DTYPE"
job = current_job()
meet(str(job.folder / "store"))
try:
    made = make_worker(job).engine
except RuntimeError as error:
    made = str(error)
print(made if isinstance(made, str) else f"{made._autocast_dtype} {made.scaler}")
"""


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", "torch.float32 None"),
        ("bfloat16", "verl computes in ['torch.bfloat16', 'torch.float32']; our modules cast by themselves"),
    ],
)
def test_mixed_precision_of_verl_itself_is_refused(tmp_path: Path, dtype: str, expected: str) -> None:
    """It would cast parameters and put autocast around our modules, on a GPU alone."""
    assert said(made(tmp_path, "method=flashrl", "precision=fp8_channel"), FOREIGN.replace("DTYPE", dtype)) == expected


START = """
import json, os
from pathlib import Path
import verl.trainer.main_ppo as ppo
from harness.trainers.verl import driver
calls = []
def run_ppo(config, task_runner_class):
    calls.append(config.trainer.n_gpus_per_node)
    if len(calls) <= FAILURES:
        raise Exception("The current node timed out during startup.")
ppo.run_ppo = run_ppo
code, job = driver.main(os.environ["LOWBIT_VERL_JOB"]), Path(os.environ["LOWBIT_VERL_JOB"])
found = json.loads((job.parent / "outcome.json").read_text())
print(json.dumps([code, len(calls), found["kind"], found["reason"]]))
"""


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        (2, [0, 3, "ok", ""]),
        (9, [1, 3, "failed", "Exception: The current node timed out during startup."]),
    ],
)
def test_ray_is_started_again_and_its_last_word_is_kept(tmp_path: Path, failures: int, expected: list) -> None:
    code = START.replace("FAILURES", str(failures))
    assert json.loads(said(made(tmp_path, "method=bf16"), code)) == expected


PADDED = """
import json, torch
from types import SimpleNamespace
from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits
from harness.trainers.local import forward
head = torch.nn.Linear(16, 320, bias=False, dtype=torch.float64)
head.weight.data.zero_()
decoder = SimpleNamespace(lm_head=head, head=head, config=SimpleNamespace(vocab_size=320))
model = SimpleNamespace(compute_logits=head)
monkey_patch_compute_logits(model, 293)
h, ids = torch.randn(8, 16, dtype=torch.float64), torch.full((8,), 7)
rollout = torch.log_softmax(model.compute_logits(h), -1)[:, 7]
naive = torch.log_softmax(head(h), -1)[:, 7]
found = [float((rollout - naive).mean())]
forward.FLOATS_PER_MIB = 3 * 320
for mib in (1024, 1):
    head.zero_grad()
    ours = forward.of_head(decoder, h, ids, forward.Thrift(logits_mib=mib), temperature=1.0, entropy_grad=False,
                           num_tokens=293)[0]
    ours.sum().backward()
    found += [float((rollout - ours).abs().max()), float(head.weight.grad[293:].abs().max()),
              float(head.weight.grad[:293].abs().max())]
print(json.dumps(found))
"""


def test_a_padded_vocabulary_shifts_no_ratio(tmp_path: Path) -> None:
    shift, *found = json.loads(said(made(tmp_path, "method=bf16"), PADDED))
    assert shift == pytest.approx(math.log(320 / 293), abs=1e-12)  # every ratio exp(-0.0881) = 0.916 without our mask
    for left, padding, rest in (found[:3], found[3:]):  # logits as a whole, and three rows at a time
        assert left == pytest.approx(0.0, abs=1e-12)
        assert padding == 0.0
        assert rest > 0.01


PORTS = """
import json, socket
from harness.trainers.verl.driver import PORTS, own_ports
from verl.single_controller.ray import base
look = base.get_master_addr_port._function
ranges = [own_ports(pid) for pid in range(70000, 70064)]
base.ray.util.get_node_ip_address = lambda: "127.0.0.1"
first = int(look(master_port_range=ranges[0])[1])
with socket.socket() as taken:
    taken.bind(("", first))
    second = int(look(master_port_range=ranges[0])[1])
print(json.dumps([[r[0] for r in ranges], [r[1] for r in ranges], first, second, list(PORTS)]))
"""


def test_jobs_that_start_together_look_for_ports_at_different_places(tmp_path: Path) -> None:
    starts, ends, first, second, (low, high) = json.loads(said(made(tmp_path, "method=bf16"), PORTS))
    assert len(set(starts)) == 64 and min(starts) >= low and max(starts) < high - 1000
    assert set(ends) == {high}
    assert starts[0] <= first < second < high


PEER = """
import json
from hydra import compose, initialize_config_module
from pathlib import Path
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from harness.devtools.bench.peers import POLL_S, verl_words
from harness.devtools.bench.trl_step import Settings
found = []
for poll_s in POLL_S.values():
    with initialize_config_module("verl.trainer.config", version_base=None):
        tree = compose("ppo_trainer", verl_words(Path("folder"), Settings(), poll_s)[2:])
    validate_config(config=tree, use_reference_policy=need_reference_policy(tree), use_critic=need_critic(tree))
    actor = tree.actor_rollout_ref.actor
    found.append([actor.fsdp_config.strategy, actor.use_fused_kernels, actor.use_kl_loss, tree.trainer.nnodes])
print(json.dumps(found))
"""


def test_verl_knows_every_word_that_the_comparison_with_it_says(tmp_path: Path) -> None:
    assert json.loads(said(made(tmp_path, "method=bf16"), PEER)) == [["fsdp2", True, False, 1]] * 2
