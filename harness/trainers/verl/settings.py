"""A run's config as verl's settings: dotted key -> value, on top of verl's own defaults.

Pure, but for the name of the vLLM build. What verl would do by its own rule (optimizer groups, schedule, loss,
advantages, tasks) is left to the classes that this package puts in its place; here is what only settings can say.
`merged` puts the values into verl's tree and refuses a key that verl does not know.
"""

from __future__ import annotations

from typing import Any

from harness.api import Plan, base_dtype
from harness.config.compose import Composed
from harness.config.schema import Launch
from harness.engines.vllm import settings as vllm
from harness.engines.vllm.builds import BUILDS, Build
from harness.engines.vllm.memory import num_parameters, small_cache, weight_bytes
from harness.foundation.did_you_mean import nearest
from harness.foundation.seeds import stable_seed
from harness.numerics.formats import at_rollout
from harness.trainers.verl.job import JOB, VerlJob

ROLLOUT = "lowbit"
"""The name under which our rollout and our agent loop are registered."""
PLUGIN = "harness.trainers.verl.plugin"
BUCKET_MIB = {"cpu": 256, "cuda": 2048}
"""Size of the buffer in which weights travel, at most; through shared memory a tensor must fit into it whole."""
NAP_BYTES = 2**30
"""Size of weights and cache up to which an engine stays awake while its trainer updates. vLLM's sleep asserts that the
GPU has no less free memory afterwards, which jobs that share it break for each other; so small, it would free
nothing."""
PRECISION = {"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"}
"""Dtypes of FSDP, on every device: float32 turns its casts and verl's autocast off. What computes in fewer bits casts
by itself, as under the local trainer (`harness.trainers.local.policy`)."""
LOOP_SAMPLES, MAX_LOOPS = 128, 8
"""Responses of a batch for which a process of agent loops is started, and how many of them at most."""
OPEN = (
    "actor_rollout_ref.rollout.engine_kwargs.vllm.",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "actor_rollout_ref.rollout.enable_sleep_mode",
    "ray_kwargs.ray_init.",
)
"""Keys that verl's yaml leaves out and its code reads."""


def verl_settings(job: VerlJob, composed: Composed, build: Build, prompt_length: int) -> dict[str, Any]:
    """Every setting of a run. `prompt_length`: tokens of the longest prompt."""
    return {
        **_data(job, prompt_length), **_actor(job, prompt_length),
        **_rollout(job, composed.plan, build, prompt_length), **_trainer(job), **_ray(job),
    }  # fmt: skip


def _data(job: VerlJob, prompt_length: int) -> dict[str, Any]:
    """Our files in our order; verl draws nothing by itself."""
    return {
        "data.train_files": [str(job.train_file)], "data.val_files": [str(job.eval_file)],
        "data.train_batch_size": job.config.algo.num_prompts, "data.shuffle": False, "data.validation_shuffle": False,
        "data.filter_overlong_prompts": False, "data.dataloader_num_workers": 0,
        "data.max_prompt_length": prompt_length, "data.max_response_length": job.max_new_tokens,
    }  # fmt: skip


def _actor(job: VerlJob, prompt_length: int) -> dict[str, Any]:
    algo, trainer, launch = job.algo, job.config.trainer, job.launch
    moved, longest = offloaded(launch), prompt_length + job.max_new_tokens
    # verl ends a run at a row that no pass has room for; the local trainer gives such a row a pass of its own
    pass_tokens = max(launch.micro_batch_tokens, -(-longest // launch.sequence_parallel))
    shared: dict[str, Any] = {  # with the frozen reference
        "strategy": "fsdp2", "fsdp_config.strategy": "fsdp2", "fsdp_config.model_dtype": "fp32",
        "fsdp_config.use_torch_compile": False, "fsdp_config.mixed_precision": dict(PRECISION),
        "fsdp_config.ulysses_sequence_parallel_size": launch.sequence_parallel,
    }  # fmt: skip
    values: dict[str, Any] = shared | {
        "ppo_mini_batch_size": algo.num_prompts,  # of one update: `trainer.py` cuts a batch
        "ppo_epochs": 1, "shuffle": False, "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": pass_tokens, "use_torch_compile": False,
        "use_kl_loss": algo.kl_coef != 0, "entropy_coeff": algo.entropy_coef, "calculate_entropy": True,
        "optim.lr": trainer.lr, "optim.clip_grad": trainer.grad_clip, "optim.weight_decay": trainer.weight_decay,
        "optim.betas": list(trainer.betas), "optim.lr_scheduler_type": "constant",
        "fsdp_config.param_offload": "params" in moved, "fsdp_config.optimizer_offload": "optimizer" in moved,
        "fsdp_config.offload_policy": "host" in moved,
        # With it every GPU would hold unsharded gradients of all weights until an update's last pass.
        "fsdp_config.use_no_sync_for_gradient_accumulation": False,
        "checkpoint.save_contents": ["model", "optimizer", "extra"],
        "checkpoint.load_contents": ["model", "optimizer", "extra"],
    }  # fmt: skip
    model = {
        "path": str(job.model),
        "use_remove_padding": launch.sequence_parallel > 1,  # verl asks for it there; our passes never pad
        "enable_gradient_checkpointing": False,
        "external_lib": PLUGIN,
    }
    parts = {"actor": values, "ref": shared, "model": model}
    return {f"actor_rollout_ref.{part}.{name}": value for part, own in parts.items() for name, value in own.items()}


def offloaded(launch: Launch) -> set[str]:
    """Parts that rest on the host: of params, optimizer and host."""
    return {"none": set[str](), "all": {"params", "optimizer"}}.get(launch.offload, {launch.offload})


def _rollout(job: VerlJob, plan: Plan, build: Build, prompt_length: int) -> dict[str, Any]:
    engine, device, shape = job.config.engine, job.config.trainer.device, job.shape
    is_cpu, max_seqs = device == "cpu", engine.max_num_seqs or engine.max_batch
    max_length = model_length(job, prompt_length)
    room = {"gpu_memory_utilization": engine.gpu_memory, "max_num_seqs": max_seqs, "max_model_len": max_length}
    cache = {} if is_cpu or job.launch.tensor_parallel > 1 else small_cache(shape, plan, room)
    is_small = bool(cache) and weight_bytes(shape, plan) + sum(cache.values()) <= NAP_BYTES
    sleeps = not is_cpu and not is_small
    masters = 4 * num_parameters(shape)
    num_samples = job.config.algo.num_prompts * job.config.algo.group_size
    sampling = {"n": 1, "do_sample": True, "temperature": engine.temperature, "top_p": 1.0, "top_k": -1}
    values: dict[str, Any] = {
        "name": ROLLOUT, "n": job.config.algo.group_size, "temperature": engine.temperature, "top_p": 1.0, "top_k": -1,
        "dtype": str(base_dtype(plan)).removeprefix("torch."), "load_format": "dummy", "calculate_log_probs": True,
        "tensor_model_parallel_size": job.launch.tensor_parallel, **room, "enforce_eager": is_cpu,
        "seed": stable_seed(job.config.seed, "verl rollout") % 2**31, "free_cache_engine": sleeps,
        "enable_sleep_mode": sleeps, "enable_prefix_caching": not is_cpu,
        "checkpoint_engine.update_weights_bucket_megabytes": min(BUCKET_MIB[device], 1 + masters // 2**20),
        "agent.num_workers": 1 if is_cpu else max(1, min(MAX_LOOPS, num_samples // LOOP_SAMPLES)),
        "agent.default_agent_loop": ROLLOUT, "agent.agent_loop_config_path": str(job.folder / "agent.yaml"),
        **{f"val_kwargs.{name}": value for name, value in sampling.items()},
        **{f"engine_kwargs.vllm.{name}": value for name, value in cache.items()},
        "engine_kwargs.vllm.kv_cache_dtype": "auto" if plan.rollout_kv is None else build.kv[plan.rollout_kv.name],
    }  # fmt: skip
    if (adapters := at_rollout(plan.adapters)) is not None:
        wanted = {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm.lora_rank(adapters.rank)}
        values |= {f"engine_kwargs.vllm.{name}": value for name, value in wanted.items()}
    if not is_cpu:
        values["engine_kwargs.vllm.compilation_config"] = vllm.graphs(max_seqs)
    return {f"actor_rollout_ref.rollout.{name}": value for name, value in values.items()}


def model_length(job: VerlJob, prompt_length: int) -> int:
    """Tokens of prompt and response that the servers make room for. Raises ValueError where the longest prompt and a
    whole response do not fit: verl would cut responses short without a word."""
    trained, evaluated = prompt_length + job.max_new_tokens, job.evaluation_length
    need, given, positions = max(trained, evaluated), job.config.engine.max_model_len, job.shape.max_positions
    field = f"engine.max_new_tokens={job.max_new_tokens}"
    what = f"a prompt of {prompt_length} and {job.max_new_tokens} new tokens need {trained} positions"
    if evaluated > trained:
        field, what = "evaluations", f"the longest prompt with a whole answer needs {evaluated} positions"
    if need > positions:
        raise ValueError(f"{field}: {what}, the model has {positions}")
    if given is not None and not need <= given <= positions:
        raise ValueError(f"engine.max_model_len={given}: {what}; valid: {need} to {positions}")
    return given or need


def _trainer(job: VerlJob) -> dict[str, Any]:
    trainer, launch = job.config.trainer, job.launch
    return {
        "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, "reward.num_workers": 0,
        "trainer.logger": [], "trainer.device": trainer.device, "trainer.nnodes": launch.nodes,
        "trainer.n_gpus_per_node": launch.gpus, "trainer.total_epochs": trainer.steps,
        "trainer.total_training_steps": trainer.steps,
        "trainer.val_before_train": not job.is_timed, "trainer.test_freq": -1 if job.is_timed else trainer.eval_every,
        "trainer.save_freq": -1,
        "trainer.max_actor_ckpt_to_keep": 1, "trainer.resume_mode": "auto",
        "trainer.default_local_dir": str(job.checkpoints), "trainer.project_name": "lowbit",
        "trainer.experiment_name": job.folder.name,
    }  # fmt: skip


def _ray(job: VerlJob) -> dict[str, Any]:
    """Settings of Ray's start, with the environment of every one of its processes."""
    values: dict[str, Any] = {"runtime_env.env_vars": environment(job), "include_dashboard": False}
    if job.launch.ray_address is not None:
        values["address"] = job.launch.ray_address
    else:
        # Else Ray joins a cluster that this machine has. CPUs are pretended: each unit of verl asks for some.
        values |= {"address": "local", "num_gpus": job.launch.gpus, "num_cpus": 64}
    storage = {"transfer_queue.backend.SimpleStorage.num_data_storage_units": job.launch.nodes}
    return {f"ray_kwargs.ray_init.{name}": value for name, value in values.items()} | storage


def environment(job: VerlJob) -> dict[str, str]:
    """Environment variables that numbers and registration depend on, for the driver and every worker."""
    values = {name: value for name, value in vllm.ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    values |= vllm.DEFAULTS | {
        JOB: str(job.folder / "job.json"), "VERL_USE_EXTERNAL_MODULES": PLUGIN, "VERL_ENGINE_VENDOR": ROLLOUT,
        "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    if job.launch.ray_address is not None:
        values["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # known by its address, not the loopback
    else:
        values["RAY_prestart_worker_first_driver"] = "0"  # else one idle process per core of the host
    if job.config.trainer.device == "cpu":
        values |= {"VERL_PLATFORM": "cpu", "VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": str(job.launch.threads)}
    return values


def build_of(device: str) -> Build:
    """The vLLM build of a device."""
    return BUILDS["cpu" if device == "cpu" else "cuda"]


def merged(tree: Any, values: dict[str, Any]) -> Any:
    """verl's configuration with our values in it. Raises ValueError for a key that verl does not have."""
    from omegaconf import OmegaConf

    known = set(_dotted(OmegaConf.to_container(tree, resolve=False)))
    for key, value in values.items():
        if key not in known and not key.startswith(OPEN):
            raise ValueError(f"verl has no setting {key}; {nearest(key, sorted(known))}")
        OmegaConf.update(tree, key, value, merge=False, force_add=True)
    return tree


def _dotted(values: Any, prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, value in values.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, dict):
            names += _dotted(value, f"{prefix}{name}.")
    return names
