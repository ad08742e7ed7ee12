"""Settings that trainer=verl takes, refuses and hands to verl; without verl."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from harness.api import Step
from harness.cli.methods import engines_of
from harness.config.compose import compose
from harness.config.load import load, run_id, run_name
from harness.config.resolve import resolve
from harness.config.schema import Launch, RunConfig
from harness.models.decoder import DecoderConfig
from harness.run.collect import next_items
from harness.start.prepare import start_of
from harness.sweep import with_default_precision
from harness.trainers.corrected_step import minibatches
from harness.trainers.local.trainer import Diverged
from harness.trainers.verl import checks, rows, settings
from harness.trainers.verl.data import lay_out, prompt_length
from harness.trainers.verl.job import VerlJob, own_socket, read_job
from methods import METHODS
from tests.source_tree import ROOT
from tests.toy import SMALL, small_config, small_launch, small_run


def verl_config(*overrides: str) -> RunConfig:
    return resolve(load([*SMALL, "trainer=verl", *with_default_precision(overrides)]))


def made(folder: Path, *overrides: str) -> VerlJob:
    config = verl_config(*overrides)
    launch = small_launch(folder)
    return lay_out(config, launch, compose(config), start_of(config, launch), folder / "verl")


def told(job: VerlJob, device: str = "cpu") -> dict:
    """The settings of the job on a device; the folder may have been written on another."""
    job = replace(job, config=replace(job.config, trainer=replace(job.config.trainer, device=device)))
    return settings.verl_settings(job, compose(job.config), settings.build_of(device), 7)


@pytest.mark.parametrize(
    "words",
    [
        ("method=bf16",), ("method=flashrl", "precision=int8"), ("method=qurl", "precision=int8"),
        ("method=jet_rl",), ("method=qat_kd", "precision=int4"), ("method=fp16",), ("method=vespo",),
        ("method=fp8_rl", "knobs.RecalibratedKV.protocol=inference"), ("method=dppo_tv",),
        ("method=fp8_rl", "precision=fp8_block"), ("method=bf16", "parts=[qerl.AQN]"), ("method=verl_bypass_pg_is",),
        ("method=qerl", "precision=nvfp4"), ("method=rilq", "precision=int4"),
        # several updates of a batch: the policy between them is read, rows are cut as the local trainer cuts them
        ("method=dppo_tv", "algo.num_minibatches=2"), ("method=verl_bypass_pg_is", "algo.num_epochs=2"),
        ("method=verl_bypass_ppo_clip_geo_rs", "algo.num_epochs=2"), ("method=bf16", "algo.num_minibatches=3"),
        ("method=bf16", "algo.dynamic_sampling=true", "algo.gen_prompts=6"),
        ("method=flashrl", "precision=int8", "algo.staleness=2"),
    ],
)  # fmt: skip
def test_what_verl_takes(words: tuple[str, ...]) -> None:
    config = verl_config(*words)
    checks.check(config, compose(config))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("method=rilq_refresh", "precision=int4"), r"RILQRefresh\.refit cannot run"),
        (("method=zero_mismatch",), "zero_mismatch samples with the embedded engine's own code"),
        (("method=fp8_rl", "precision=fp8_channel+kv8"), r"RecalibratedKV\.refit cannot run: .*protocol=inference"),
        (
            ("method=flashrl", "precision=int8", "knobs.Profile.refit_above=0.1"),
            r"Profile\.refit cannot run: .*; choose knobs\.Profile\.refit_above=null or trainer=local$",
        ),
        (("method=trm",), "TRM needs rollout_kl"),
        (
            ("method=mixed_rollouts", "precision=int4"),
            "mixed_rollouts has several samplers a batch, verl's servers one",
        ),
        (("method=vcpo",), r"\.update_lr_factor cannot run: verl's workers step by their own schedule; choose"),
        (("method=alp",), r"\.during_update cannot run: verl's workers run their own passes; choose "),
        (("method=bf16", "engine=embedded"), "engine=embedded: trainer=verl drives vLLM's servers"),
    ],
)
def test_what_verl_refuses(words: tuple[str, ...], said: str) -> None:
    config = verl_config(*words)
    with pytest.raises(ValueError, match=said) as caught:
        checks.check(config, compose(config))
    assert "\n" not in str(caught.value)


def test_the_page_lists_the_methods_that_verl_refuses() -> None:
    page = (ROOT / "docs" / "verl.md").read_text(encoding="utf-8")
    table = page.partition("| does not work | why |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    refused = [name for name, method in METHODS.items() if "verl" not in engines_of(method)]
    assert sorted(listed) == sorted(refused)
    assert f"**{len(METHODS) - len(refused)} of the {len(METHODS)} methods train under verl" in page


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpus": 3}, r"launch.gpus=3: 16 samples of an update do not divide by 3 GPUs"),
        (
            {"gpus": 8, "tensor_parallel": 8},
            r"^launch\.tensor_parallel=8: 4 heads, 2 key-value heads and 192 MLP channels do not divide by 8 devices$",
        ),
        ({"save": "every:2"}, "launch.save=every:2: trainer=verl keeps the last policy alone; valid: none, hf, quant"),
        ({"offload": "host"}, "launch.offload=host: a trainer on a CPU is in the host's memory; valid: none"),
        ({"fp8_kernels": "deep_gemm"}, "launch.fp8_kernels=deep_gemm: needs a GPU; valid on a CPU: best, emulated"),
    ],
)
def test_launches_that_do_not_fit(values: dict[str, Any], said: str) -> None:
    config = verl_config("method=bf16")
    checks.check_launch(config, Launch(gpus=4, checkpoint_layers=True, logits_mib=64, fp8_kernels="emulated"))
    for packing in (False, True):  # verl's workers pack anyway
        checks.check_launch(config, Launch(packing=packing, dump_rollouts=4))
    with pytest.raises(ValueError, match=said):
        checks.check_launch(config, Launch(**values))


def test_what_rests_on_the_host_is_said_to_verl(tmp_path: Path) -> None:
    job, at = made(tmp_path, "method=bf16"), "actor_rollout_ref.actor.fsdp_config."
    names = ("param_offload", "optimizer_offload", "offload_policy", "use_no_sync_for_gradient_accumulation")
    found = {}
    for value in ("none", "params", "optimizer", "all", "host"):
        settings_of = told(replace(job, launch=replace(job.launch, offload=value)))
        found[value] = [settings_of[f"{at}{name}"] for name in names]
    assert found == {
        "none": [False, False, False, False], "params": [True, False, False, False],
        "optimizer": [False, True, False, False], "all": [True, True, False, False],
        "host": [False, False, True, False],
    }  # fmt: skip


def test_a_pass_has_room_for_the_longest_row(tmp_path: Path) -> None:
    """verl ends a run at a row that is longer than a pass; ranks that share rows have a part of one each."""
    job, at = made(tmp_path, "method=bf16"), "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    longest = 7 + job.max_new_tokens
    found = {}
    for tokens, ranks in ((longest - 1, 1), (longest + 1, 1), (longest // 2, 2), (1, 4)):
        launch = replace(job.launch, micro_batch_tokens=tokens, sequence_parallel=ranks)
        found[tokens, ranks] = told(replace(job, launch=launch))[at]
    assert found == {
        (longest - 1, 1): longest, (longest + 1, 1): longest + 1, (longest // 2, 2): -(-longest // 2),
        (1, 4): -(-longest // 4),
    }  # fmt: skip


def test_an_engine_of_several_gpus(tmp_path: Path) -> None:
    job = made(tmp_path, "method=bf16")
    job = replace(job, launch=replace(job.launch, gpus=4, tensor_parallel=2))
    assert told(job)["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 2
    there = told(job, "cuda")
    assert there["actor_rollout_ref.rollout.enable_sleep_mode"] is True  # each has a share, smaller than it looks
    assert not any("kv_cache_memory_bytes" in name for name in there)
    with pytest.raises(
        ValueError, match=r"launch\.tensor_parallel=2: an engine's GPUs are of one machine, and .*=1 does"
    ):
        checks.check_launch(job.config, Launch(tensor_parallel=2))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("method=flashrl", "precision=fp8_channel"), None),
        (("method=fp8_rl", "precision=fp8_block+kv8"), "launch.tensor_parallel=2: the scales of an FP8 cache are"),
        (
            ("method=flashrl", "precision=fp8_block"),
            "launch.tensor_parallel=2: 32 of 64 channels of model.layers.0.self",
        ),
    ],
)
def test_engines_that_cannot_be_shared(words: tuple[str, ...], said: str | None) -> None:
    plan = compose(verl_config(*words)).plan
    shape = DecoderConfig(
        vocab_size=64, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, intermediate_size=256
    )
    checks.check_shared_engine(1, plan, shape)
    if said is None:
        checks.check_shared_engine(2, plan, shape)
        return
    with pytest.raises(ValueError) as caught:
        checks.check_shared_engine(2, plan, shape)
    assert str(caught.value).startswith(said)


def test_gradients_on_the_host_are_never_loss_scaled() -> None:
    on_gpu = [verl_config(f"method={name}", "trainer.device=cuda") for name in ("fp16", "bf16")]
    with pytest.raises(ValueError, match=r"launch\.offload=host: fp16 scales its loss"):
        checks.check_launch(on_gpu[0], Launch(offload="host"))
    checks.check_launch(on_gpu[0], Launch(offload="all"))
    checks.check_launch(on_gpu[1], Launch(offload="host"))


@pytest.mark.parametrize(("gpus", "said"), [(2, None), (4, None), (8, "launch.gpus=8: 4 samples of an update do not")])
def test_every_update_divides_by_the_gpus(gpus: int, said: str | None) -> None:
    """Three updates of four prompts take 2, 1 and 1 of them, four samples each."""
    config, launch = verl_config("method=bf16", "algo.num_minibatches=3"), Launch(gpus=gpus)
    step = Step(index=0, total=4, seed=0)
    assert [len(rows) for rows in minibatches(config.algo, step)] == [8, 4, 4]
    if said is None:
        checks.check_launch(config, launch)
        return
    with pytest.raises(ValueError, match=said):
        checks.check_launch(config, launch)


def test_ranks_that_share_a_sequence_are_one_for_the_rows_of_an_update(tmp_path: Path) -> None:
    config = verl_config("method=bf16", "algo.num_minibatches=3")  # updates of 8, 4 and 4 samples
    with pytest.raises(ValueError, match="4 samples of an update do not divide by 8 GPUs"):
        checks.check_launch(config, Launch(gpus=8))
    checks.check_launch(config, Launch(gpus=8, sequence_parallel=2))
    with pytest.raises(ValueError, match="4 samples of an update do not divide by 8 groups of 2 GPUs"):
        checks.check_launch(config, Launch(gpus=16, sequence_parallel=2))
    job = made(tmp_path, "method=bf16")
    for split in (1, 2):
        found = told(replace(job, launch=Launch(gpus=4, sequence_parallel=split)))
        for role in ("actor", "ref"):
            assert found[f"actor_rollout_ref.{role}.fsdp_config.ulysses_sequence_parallel_size"] == split
        assert found["actor_rollout_ref.model.use_remove_padding"] is (split > 1)


def test_a_run_under_verl_is_another_run() -> None:
    there, here = verl_config("method=bf16"), small_config("method=bf16", "engine=vllm")
    assert run_id(there) != run_id(here)
    assert run_name(there) == run_name(here).replace("-vllm-", "-vllm-verl-")
    assert replace(there, trainer=replace(there.trainer, name="local")) == here


def test_prompts_are_those_of_the_local_trainer_in_their_order(tmp_path: Path) -> None:
    job = made(tmp_path, "method=bf16", "seed=5")
    run = small_run(tmp_path, ["method=bf16", "seed=5"])
    items = [item for _ in range(run.config.trainer.steps) for item in next_items(run)]
    table = pq.read_table(job.train_file).to_pylist()
    assert [row["extra_info"]["index"] for row in table] == [item.index for item in items]
    assert [row["reward_model"]["ground_truth"] for row in table] == [item.reference for item in items]
    assert prompt_length(job) == max(len(item.prompt) for item in [*items, *run.eval_items])
    assert pq.read_table(job.eval_file).num_rows == run.config.task.num_eval
    assert read_job(tmp_path / "verl" / "job.json") == job
    assert job.num_tokens == 32
    assert job.max_new_tokens == run.max_new_tokens


def test_a_model_that_nothing_prepares_is_read_where_it_stands(tmp_path: Path) -> None:
    plain = made(tmp_path / "a", "method=bf16", "model.spread=0")
    assert plain.model.is_symlink()
    assert plain.shape.hidden_size == 64
    assert not made(tmp_path / "b", "method=bf16", "model.spread=0.4").model.is_symlink()
    assert not made(tmp_path / "c", "method=qurl", "precision=int8", "model.spread=0").model.is_symlink()


def test_the_model_that_verl_reads_is_the_one_that_is_trained_here(tmp_path: Path) -> None:
    from harness.models.checkpoint import read_tensors

    words = ("method=qurl", "precision=int8", "model.spread=0.4")
    job, run = made(tmp_path, *words), small_run(tmp_path, words)
    held = dict(read_tensors(job.model))
    for name, tensor in run.trainer.weights():
        torch.testing.assert_close(held[name], tensor, rtol=0, atol=0)


def test_other_positions_than_the_folder_says_reach_verls_model(tmp_path: Path) -> None:
    """vLLM and the trainer read them from config.json; the weights are not copied."""
    job = made(tmp_path, "method=bf16", "model.spread=0")
    words = ("model=hf", f"model.path={job.model}", "model.spread=0", "trainer.compute=fp32")
    assert made(tmp_path / "same", *words).shape == job.shape
    there = made(tmp_path / "other", *words, "model.max_positions=77")
    assert there.shape == replace(job.shape, max_positions=77)
    assert not there.model.is_symlink() and (there.model / "model.safetensors").is_symlink()
    with pytest.raises(ValueError, match=r"a prompt of 200 and \d+ new tokens need \d+ positions, the model has 77"):
        settings.model_length(there, 200)
    assert told(there)["actor_rollout_ref.rollout.max_model_len"] == 7 + there.max_new_tokens


def test_settings_say_what_only_settings_can_say(tmp_path: Path) -> None:
    job = made(tmp_path, "method=flashrl", "precision=fp8_channel+kv8", "algo.num_minibatches=2", "trainer.lr=3e-5")
    found, actor, rollout = told(job), "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    assert found[f"{actor}ppo_mini_batch_size"] == 4  # of one update: the driver cuts a batch
    assert (found[f"{actor}ppo_epochs"], found["trainer.total_epochs"]) == (1, job.config.trainer.steps)
    assert found[f"{actor}optim.lr"] == 3e-5
    assert found[f"{rollout}n"] == 4
    assert found[f"{rollout}engine_kwargs.vllm.kv_cache_dtype"] == "fp8_e4m3"
    assert found["data.max_prompt_length"] == 7
    environment = found["ray_kwargs.ray_init.runtime_env.env_vars"]
    assert environment["LOWBIT_VERL_JOB"] == str(job.folder / "job.json")
    assert environment["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment
    json.dumps(found)


def test_a_run_starts_a_ray_of_its_own_or_joins_the_one_it_names(tmp_path: Path) -> None:
    job, ray = made(tmp_path, "method=bf16"), "ray_kwargs.ray_init."
    here = told(replace(job, launch=replace(job.launch, gpus=2)))
    assert (here[f"{ray}address"], here[f"{ray}num_gpus"]) == ("local", 2)  # no address: whatever this machine runs
    there = told(replace(job, launch=replace(job.launch, ray_address="auto")))
    assert there[f"{ray}address"] == "auto"
    environments = [found[f"{ray}runtime_env.env_vars"] for found in (here, there)]
    assert [values["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] for values in environments] == ["0", "1"]
    assert [values.get("RAY_prestart_worker_first_driver") for values in environments] == ["0", None]
    assert f"{ray}num_gpus" not in there


def test_a_small_model_reserves_its_cache_beforehand(tmp_path: Path) -> None:
    """Engines that share a GPU would else disturb each other's count of free memory."""
    job, rollout = made(tmp_path, "method=bf16"), "actor_rollout_ref.rollout."
    found = told(job, "cuda")
    assert found[f"{rollout}max_model_len"] == 7 + job.max_new_tokens
    pages = job.config.engine.max_batch * 1 + 2  # of 64 tokens: each sequence fits into one
    kv = 2 * job.shape.num_layers * job.shape.num_kv_heads * job.shape.head_dim * 2
    assert found[f"{rollout}engine_kwargs.vllm.kv_cache_memory_bytes"] == pages * 64 * kv
    assert f"{rollout}engine_kwargs.vllm.kv_cache_memory_bytes" not in told(job)
    assert found[f"{rollout}agent.num_workers"] == 1
    many = replace(job, config=replace(job.config, algo=replace(job.config.algo, num_prompts=128)))
    assert told(many, "cuda")[f"{rollout}agent.num_workers"] == 4


def test_a_timed_run_evaluates_nothing(tmp_path: Path) -> None:
    job = made(tmp_path, "method=bf16")
    assert (told(job)["trainer.val_before_train"], told(job)["trainer.test_freq"]) == (True, 2)
    found = told(replace(job, is_timed=True))
    assert (found["trainer.val_before_train"], found["trainer.test_freq"]) == (False, -1)


@pytest.mark.parametrize(
    ("words", "rollout"),
    [
        (("method=bf16",), "bfloat16"),
        (("method=bf16", "precision=fp32"), "float32"),
        (("method=fp16",), "float16"),
        (("method=bf16_train", "precision=bf16"), "bfloat16"),
        (("method=jet_rl",), "bfloat16"),
        (("method=qat_aligned", "precision=int4"), "bfloat16"),
    ],
)
def test_dtypes_of_both_sites(tmp_path: Path, words: tuple[str, ...], rollout: str) -> None:
    job = made(tmp_path, *words)
    for found in (told(job), told(job, "cuda")):
        for role in ("actor", "ref"):
            at = f"actor_rollout_ref.{role}.fsdp_config."
            assert set(found[f"{at}mixed_precision"].values()) == {"float32"}  # our modules cast by themselves
            assert found[f"{at}model_dtype"] == "fp32"
        assert found["actor_rollout_ref.rollout.dtype"] == rollout


def test_a_gpu_is_told_the_same_but_for_its_engines(tmp_path: Path) -> None:
    """The trainer gets the same settings on every device: no trainer goes another way where no test looks."""
    job = made(tmp_path, "method=flashrl", "precision=fp8_channel", "algo.kl_coef=0.01")
    here, there = told(job), told(job, "cuda")
    differ = {name for name in here.keys() | there.keys() if here.get(name, "none") != there.get(name, "none")}
    rollout, engine = "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.engine_kwargs.vllm."
    assert differ == {
        "trainer.device", "ray_kwargs.ray_init.runtime_env.env_vars",
        f"{rollout}enforce_eager", f"{rollout}enable_prefix_caching", f"{engine}kv_cache_memory_bytes",
        f"{engine}compilation_config",
    }  # fmt: skip


def test_an_engine_sleeps_where_that_frees_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that share a GPU: the sleep of one fails where another takes memory meanwhile."""
    job, rollout = made(tmp_path, "method=bf16"), "actor_rollout_ref.rollout."
    for limit, sleeps in ((settings.NAP_BYTES, False), (2**20, True)):  # 4 MiB of cache and weights
        monkeypatch.setattr(settings, "NAP_BYTES", limit)
        found = told(job, "cuda")
        assert [found[f"{rollout}{name}"] for name in ("enable_sleep_mode", "free_cache_engine")] == [sleeps] * 2
        assert [told(job)[f"{rollout}{name}"] for name in ("enable_sleep_mode", "free_cache_engine")] == [False] * 2
    assert found[f"{rollout}checkpoint_engine.update_weights_bucket_megabytes"] == 1  # as much as its masters take


def test_noise_in_float32_gains_has_graphs_too(tmp_path: Path) -> None:
    """The engine's worker widens them before anything is captured."""
    job, rollout = made(tmp_path, "method=bf16", "parts=[qerl.AQN]"), "actor_rollout_ref.rollout."
    noised, batch = told(job, "cuda"), job.config.engine.max_batch
    assert noised[f"{rollout}enforce_eager"] is False
    assert noised[f"{rollout}engine_kwargs.vllm.compilation_config"] == settings.vllm.graphs(batch)


def actor_metrics(loss: float, grad_norm: float, **sums: float) -> dict[str, float]:
    """verl's metrics of one update of our loss."""
    zero = dict.fromkeys(("skew_up", "skew_down", "skew_total_up", "skew_total_down"), 0.0)
    ours = (
        zero
        | {
            "tokens": 40.0,
            "ppo_kl": 4.0,
            "ratio": 44.0,
            "ratio_sq": 50.0,
            "entropy": 80.0,
            "loss": loss,
            "loss_scale": 1.0,
        }
        | sums
    )
    metrics = {f"actor/lowbit_{name}": value for name, value in ours.items()}
    return metrics | {"actor/grad_norm": grad_norm, "actor/lr": 1e-4, "actor/entropy": 9.9}


TIMERS = {"gen": 2.0, "old_log_prob": 0.5, "update_actor": 1.0, "update_weights": 0.25, "step": 4.0}


def test_a_row_is_made_of_verls_numbers() -> None:
    metrics = actor_metrics(0.25, 1.5)
    row = rows.step_row({"rollout/tokens": 40.0}, [rows.update_row(metrics)], metrics, TIMERS)
    assert row["train/loss"] == 0.25
    assert row["train/entropy"] == 2.0
    assert row["train/grad_norm"] == 1.5
    assert row["train/lr"] == 1e-4
    assert row["time/generate_s"] == 2.0
    assert row["time/other_s"] == 0.25
    assert row["rollout/tokens_per_s"] == 20.0


def test_a_row_of_several_updates_has_their_means_and_sums_over_all_their_tokens() -> None:
    """Losses and norms are means over updates; what is per token is divided by the tokens of all of them."""
    first, second = actor_metrics(0.25, 1.5), actor_metrics(0.75, 2.5, tokens=10.0, entropy=5.0, ratio=12.0)
    updates = [rows.update_row(metrics) for metrics in (first, second)]
    assert updates[1][0] == {"train/loss": 0.75, "train/grad_norm": 2.5, "train/loss_scale": 1.0, "train/skipped": 0.0}
    updates = [(row | {"correction/weight_max": float(n)}, sums) for n, (row, sums) in enumerate(updates)]
    row = rows.step_row({"rollout/tokens": 40.0}, updates, second, TIMERS)
    assert row["train/loss"] == 0.5
    assert row["train/grad_norm"] == 2.0
    assert row["train/entropy"] == pytest.approx(85 / 50)
    assert row["train/ratio_mean"] == pytest.approx(56 / 50)
    assert row["correction/weight_max"] == 0.5


def test_an_update_that_loss_scaling_skipped_is_counted() -> None:
    updates = [
        rows.update_row(actor_metrics(0.5, norm, loss_scale=scale)) for norm, scale in ((math.inf, 2.0), (3.0, 1.0))
    ]
    assert [row["train/skipped"] for row, _ in updates] == [1.0, 0.0]
    assert [row["train/loss_scale"] for row, _ in updates] == [2.0, 1.0]


def test_an_update_that_was_none_is_divergence() -> None:
    rows.check_finite({"train/loss": 1.0, "train/grad_norm": 2.0}, 3)
    for row in (
        {"train/loss": float("nan"), "train/grad_norm": 1.0},
        {"train/loss": 1.0, "train/grad_norm": float("inf")},
    ):
        with pytest.raises(Diverged, match="step 3: train/"):
            rows.check_finite(row, 3)


def test_two_runs_on_a_machine_have_sockets_of_their_own(tmp_path: Path) -> None:
    told = "ipc:///sockets/rl-colocate-zmq-01000000-replica-0-rank-1.sock"
    job = made(tmp_path / "a", "method=bf16")
    there = replace(job, folder=tmp_path / "b")
    own = own_socket(job, told)
    assert own == own_socket(read_job(job.folder / "job.json"), told)  # another process of the run
    assert own != own_socket(there, told)
    assert own.startswith("ipc:///sockets/rl-colocate-zmq-01000000-replica-0-rank-1-")
    assert own.endswith(".sock")
    assert len(own) < len(told) + 16  # a path of a socket has at most 107 bytes


def test_replicas_must_share_their_passport() -> None:
    weights = [{"name": "a", "hash": "1"}, {"name": "b", "hash": "2"}]
    first = {"engine": "verl-vllm", "weights": weights, "kv": "e4m3_kv", "state": {"k_scale": 1.0}}
    told = first | {"state": {"k_scale": 1.5}}
    assert rows.one_passport([first, told, first]) == first
    noised = first | {"weights": [weights[0], {"name": "b", "hash": "3"}]}
    with pytest.raises(RuntimeError, match=r"replica 2 has other weights than replica 0: .*'3'.* in place of .*'2'"):
        rows.one_passport([first, told, noised])
    with pytest.raises(RuntimeError, match="replica 1: kv is None, on replica 0 e4m3_kv"):
        rows.one_passport([first, first | {"kv": None}])


def test_answers_are_put_in_the_order_of_the_questions(tmp_path: Path) -> None:
    job = made(tmp_path, "method=bf16")
    run = small_run(tmp_path, ["method=bf16"])
    questions = run.eval_items[:3]
    facts = {"index": [questions[2].index, questions[0].index, questions[1].index], "acc": [1.0, 0.0, 1.0],
             "length": [4.0, 6.0, 8.0], "truncated": [0.0, 1.0, 0.0], "is_parsable": [1.0, 0.0, 1.0],
             "failure": [None, "arithmetic", None], "lost": [0.0, 0.0, 0.0]}  # fmt: skip
    record = rows.evaluation(job, questions, facts, 4)
    assert record.correct == [0, 1, 1]
    assert (record.step, record.site, record.precision) == (4, "rollout", "bf16")
    assert record.accuracy == pytest.approx(2 / 3)
    assert (record.length_mean, record.failures) == (6.0, {"arithmetic": pytest.approx(1 / 3)})
    with pytest.raises(RuntimeError, match="got no answer"):
        rows.evaluation(job, run.eval_items[:4], facts, 4)
    with pytest.raises(RuntimeError, match=r"^the engine's log-probs of 3 of 18 tokens are NaN$"):
        rows.evaluation(job, questions, facts | {"lost": [1.0, 0.0, 2.0]}, 4)
