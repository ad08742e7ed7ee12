"""End-to-end seconds of a GRPO step: ours, TRL's GRPOTrainer and verl, one after the other on one device.

    python -m harness.devtools.bench peers --out results/bench/peers_h200.json [--device cuda] [--only ours TRL verl]
        [--trl-path DIR] [--trl-python PYTHON] [--verl-path DIR] [--model l128] [--tokens 512] ...
    python -m harness.devtools.bench peers --out results/bench/peers_1.5b_h200.json --size 1.5b --prompts 64 \\
        --prompt-tokens 128 --tokens 1024 --rows 8 --steps 3 --warm-up 1 --compile
    python -m harness.devtools.bench peers --out x.json --device cpu --engine embedded --only ours TRL \\
        --trl-python .venv-oracle-trl/bin/python --model m128 --prompts 8 --tokens 64 --prompt-tokens 8

The same folder (a decoder of `conf/model`, or random weights of a Qwen2.5 shape, with a tokenizer), prompts, samples
and lengths, BF16 products over float32 masters and vLLM colocated (on a CPU: float32, and transformers' generation in
TRL), one update per batch, no KL, micro-batches of as many rows, layer checkpoints for all or for none. Every
peer is a process with a PYTHONPATH of its own, for TRL breaks verl. verl runs twice: as it is, where it looks for
finished generations every 2 s, and asked every 0.05 s (`peer_verl_sampler.py`). Responses never end by themselves.
Steps of the warm-up are dropped; what is shown are medians and 90 % quantiles of the steps, medians of their stages.
TRL's stages are those that it times itself, of which some lie inside others. A peer that cannot run is recorded with
its last words. Left out: verl on a CPU.
`make oracles NAME=trl` makes that environment of TRL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.config.decoder_config import decoder_config
from harness.config.load import load
from harness.devtools.bench import verl_scaling
from harness.devtools.bench.folder_run import write_tokenizer
from harness.devtools.bench.runner import (
    add_device_and_out,
    add_numbers,
    check_device,
    check_gpu_memory,
    check_positive,
    kept,
    save,
)
from harness.devtools.bench.trl_step import Settings, numbers
from harness.engines.vllm.settings import DEFAULTS
from harness.foundation.own_process import absolute, exit_code, module_command
from harness.foundation.process_log import last_words
from harness.foundation.provenance import ROOT, commit, cpu_name
from harness.foundation.seeds import generator
from harness.models.checkpoint import save_decoder
from harness.models.decoder import Decoder
from harness.models.tokenizer import CHAT_TEMPLATE, save_tokenizer
from harness.studies.throughput.shapes import SIZES, shape_of

POLL_S = {"verl": 2.0, "verl, asked every 0.05 s": 0.05}
PEERS = ("ours", "TRL", *POLL_S)
END_OF_TURN = "<|im_end|>"
"""Token that verl's agent loop wants in the tokenizer of every Qwen model, also where a turn is all there is."""
TARGET = 1.3
"""Speed that a step of ours shall have over each peer's, as a factor."""
Found = dict[str, Any]


def make_folder(folder: Path, model: str, given: Settings, *, size: str | None = None) -> None:
    """The random model that all train, as bfloat16, its tokenizer, and verl's data and reward. `size`: of a Qwen2.5
    shape, in place of `model`; its tokenizer reads bytes."""
    import pandas as pd

    if size is None:
        config = decoder_config(load([f"model={model}"]).model)
        save_decoder(Decoder(config, generator=generator("cpu", 0, "peers")), folder / "m", torch.bfloat16)
        save_tokenizer(folder / "m", config.vocab_size)
    else:
        verl_scaling.make_folder(folder / "m", size, given.device)
        write_tokenizer(folder / "m", [], shape_of(size).vocab_size, chat=CHAT_TEMPLATE)
    name_the_end_of_a_turn(folder / "m" / "tokenizer.json")
    prompts = numbers(given.prompt_tokens - 1, given.prompts * given.steps)  # the chat template puts <bos> before them
    rows = [
        {"data_source": "count", "prompt": [{"role": "user", "content": text}],
         "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i}}
        for i, text in enumerate(prompts)
    ]  # fmt: skip
    for name in ("train", "val"):
        pd.DataFrame(rows if name == "train" else rows[: given.prompts]).to_parquet(folder / f"{name}.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return float(solution_str.count('1'))\n",
        encoding="utf-8",
    )


def shortest_prompt(count: int) -> int:
    """Tokens of the shortest prompts of which `count` different ones are equally long."""
    return next(size for size in itertools.count(2) if len(numbers(size - 1, count)[-1]) == size - 1)


def name_the_end_of_a_turn(file: Path) -> None:
    """The last token, which no prompt has, becomes `END_OF_TURN`; everything else stays."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[END_OF_TURN] = vocabulary.pop(max(vocabulary, key=vocabulary.get))
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def verl_words(folder: Path, given: Settings, poll_s: float) -> list[str]:
    """verl's command line."""
    batch, length = given.prompts, given.prompt_tokens + given.tokens
    sampler = "trainer.v1.sampler"
    quick = [
        f"{sampler}.custom_sampler.path={ROOT}/harness/devtools/bench/peer_verl_sampler.py",
        f"{sampler}.custom_sampler.name=QuickBuffer",
        f"+{sampler}.sampler_kwargs.poll_interval={poll_s}",
        f"+{sampler}.sampler_kwargs.train_batch_size={batch}",
        f"+{sampler}.sampler_kwargs.gen_batch_size={batch}",
    ]
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/val.parquet",
        f"data.train_batch_size={batch}", f"data.max_prompt_length={given.prompt_tokens}",
        f"data.max_response_length={given.tokens}", "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/m", "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={given.is_checkpointed}",
        f"{actor}.optim.lr={given.lr}", f"{actor}.ppo_mini_batch_size={batch}", f"{actor}.use_kl_loss=False",
        f"{actor}.ppo_micro_batch_size_per_gpu={given.rows}", f"{actor}.use_torch_compile=False",
        f"{actor}.strategy=fsdp2", f"{actor}.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.model.use_fused_kernels=True",  # without them, and without flash-attn, it loops over tokens
        f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.n={given.group}",
        f"{rollout}.gpu_memory_utilization={given.gpu_memory}", f"{rollout}.ignore_eos=True",
        f"{rollout}.max_model_len={length + 8}", f"{rollout}.enforce_eager=False",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={given.rows}", f"{rollout}.agent.num_workers=2",
        "trainer.logger=[console,file]", "trainer.n_gpus_per_node=1", "trainer.nnodes=1",
        f"trainer.total_training_steps={given.steps}", "trainer.total_epochs=1", "trainer.val_before_train=False",
        "trainer.test_freq=-1", "trainer.save_freq=-1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score", "ray_kwargs.ray_init.num_cpus=16",
        *(quick if poll_s != POLL_S["verl"] else []),
    ]  # fmt: skip


def read_verl(path: Path, given: Settings) -> Found:
    """Steps and stages from verl's log file, a JSON object per line; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line)["data"] for line in lines]
    rows = [row for row in rows if "timing_s/step" in row][given.warm_up :]
    names = sorted({name for row in rows for name in row if name.startswith("timing_s/")} - {"timing_s/step"})
    stages = {name.removeprefix("timing_s/"): [row[name] for row in rows if name in row] for name in names}
    return {"steps": [row["timing_s/step"] for row in rows], "stages": stages}


def measure(peer: str, folder: Path, given: Settings, asked: argparse.Namespace) -> Found:
    """Findings of one peer, or {"failed": its last words}."""
    path, model, values = str(ROOT), str(folder / "m"), json.dumps(asdict(given))
    if peer == "ours":
        command = module_command("harness.devtools.bench.peer_ours", model, values, asked.engine)
    elif peer == "TRL":
        path = asked.trl_path or ""
        script = str(ROOT / "harness/devtools/bench/trl_step.py")
        command = [str(Path(asked.trl_python or sys.executable).absolute()), script, model, values]
    elif given.device == "cpu":
        return {"failed": "verl is compared on a GPU only"}
    else:
        path, command = asked.verl_path or "", [sys.executable, *verl_words(folder, given, POLL_S[peer])]
    log = folder / f"{peer.partition(',')[0]}-{POLL_S.get(peer, 0):g}"
    inherited = "" if peer == "TRL" and asked.trl_python else os.environ.get("PYTHONPATH", "")
    environment = DEFAULTS | os.environ | {
        "PYTHONPATH": os.pathsep.join([*absolute(path), *absolute(inherited)]), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "VERL_FILE_LOGGER_PATH": f"{log}.jsonl", "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if peer == "TRL":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its launcher of vLLM asks for that
    started = time.perf_counter()
    with Path(f"{log}.out").open("wb") as out, Path(f"{log}.err").open("wb") as errors:
        code = exit_code(command, asked.limit_s, stdout=out, stderr=errors, env=environment, cwd=folder)
    said = Path(f"{log}.out").read_text(encoding="utf-8", errors="replace").strip()
    found = read_verl(Path(f"{log}.jsonl"), given) if peer in POLL_S else Found()
    if code != 0:
        text = Path(f"{log}.err").read_text(encoding="utf-8", errors="replace")
        print((said + text)[-3000:], file=sys.stderr)
        words_of = last_words(said + "\n" + text, f"exit code {code}")
        reason = f"the limit of {asked.limit_s:g} s was reached; last words: {words_of}" if code is None else words_of
        found = found | {"cut": reason} if found.get("steps") else {"failed": reason}
    elif peer not in POLL_S:
        found = json.loads(said.splitlines()[-1])
    return found | {"all_s": time.perf_counter() - started}


def summary(found: Mapping[str, Any]) -> Found:
    """Median and 90 % quantile of the steps, medians of the stages; the failure where there is one."""
    if "failed" in found or not found["steps"]:
        return {"failed": found.get("failed", "no step was timed")}
    steps = np.array(found["steps"])
    return {
        "median_s": float(np.median(steps)),
        "p90_s": float(np.quantile(steps, 0.9)),
        "count": len(steps),
        "stages_s": {name: float(np.median(values)) for name, values in found["stages"].items() if values},
        **({"cut": found["cut"]} if "cut" in found else {}),
    }


def table(summaries: Mapping[str, Found], given: Settings) -> list[str]:
    """Lines of text: seconds, tokens per second, and how many times as long as ours."""
    own, lines = summaries.get("ours", {}).get("median_s"), list[str]()
    for peer, row in summaries.items():
        if "failed" in row:
            lines.append(f"{peer}: not measured: {row['failed']}")
            continue
        rate = given.prompts * given.group * given.tokens / row["median_s"]
        ratio = f", {row['median_s'] / own:.2f} times ours" if own and peer != "ours" else ""
        stages = ", ".join(f"{name} {value:.3f}" for name, value in row["stages_s"].items() if value >= 0.001)
        timed = f"{row['median_s']:.3f} s (p90 {row['p90_s']:.3f}, {row['count']} steps)"
        cut = f"; then {row['cut']}" if "cut" in row else ""
        lines.append(f"{peer}: {timed}, {rate:.0f} tokens/s{ratio}; {stages}{cut}")
    return lines


def options(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    add_device_and_out(parser, needs_out=True)
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm", help="ours (default: vllm)")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER",
                        help=f"each in quotes: {', '.join(map(repr, PEERS))} (default: all)")  # fmt: skip
    parser.add_argument("--model", default="l128", help="of conf/model (default: l128, 42 million parameters)")
    parser.add_argument("--size", choices=sorted(SIZES), help="Qwen2.5's shape of that size, in place of --model")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="vLLM's share of the GPU (default: 0.3)")
    parser.add_argument("--checkpoint-layers", action="store_true", help="all peers compute layers again")
    parser.add_argument("--compile", action="store_true", help="our layers run compiled")
    parser.add_argument("--trl-path", help="folders with TRL and its datasets, first on its PYTHONPATH (A:B)")
    parser.add_argument("--trl-python", help="an interpreter with TRL, in place of this one")
    parser.add_argument("--verl-path", help="folder with verl and its transformers, first on its PYTHONPATH")
    parser.add_argument("--limit-s", type=float, default=540, help="seconds for a peer (default: 540)")
    add_numbers(
        parser, ("prompts", 32, "of a step"), ("group", 8, "responses to a prompt"),
        ("prompt-tokens", 64, "of a prompt"), ("tokens", 512, "of every response"),
        ("rows", 64, "sequences of a micro-batch"),
        ("steps", 12, "of training"), ("warm-up", 3, "steps that are dropped"),
    )  # fmt: skip


def command(asked: argparse.Namespace) -> int:
    """Measure the peers that were asked for, keeping what the file has of the others. Exit code 1 if one failed.

    Raises ValueError, one line, for what cannot be measured here.
    """
    check_positive(asked, "prompts", "group", "prompt_tokens", "tokens", "rows", "steps", "warm_up")
    check_gpu_memory(asked)
    if asked.limit_s <= 0:
        raise ValueError(f"--limit-s: {asked.limit_s:g}; valid: above 0")
    check_device(asked.device)
    given = Settings(
        device=asked.device, prompts=asked.prompts, group=asked.group, prompt_tokens=asked.prompt_tokens,
        tokens=asked.tokens, rows=asked.rows, steps=asked.steps, warm_up=asked.warm_up,
        gpu_memory=asked.gpu_memory, is_checkpointed=asked.checkpoint_layers, is_compiled=asked.compile,
    )  # fmt: skip
    if given.prompts * given.group % given.rows:
        raise ValueError(f"--rows: {given.rows}; it must divide the {given.prompts * given.group} samples of a step")
    if given.warm_up >= given.steps:
        raise ValueError(f"--warm-up: {given.warm_up}; valid: 1 to {given.steps - 1} for --steps {given.steps}")
    if given.prompt_tokens < (least := shortest_prompt(given.prompts * given.steps)):
        raise ValueError(
            f"--prompt-tokens: {given.prompt_tokens}; valid: >= {least}, so that all prompts are equally long"
        )
    place = torch.cuda.get_device_name() if given.device == "cuda" else cpu_name()
    model = asked.size or asked.model
    ours = {"engine": asked.engine} if asked.engine != "vllm" else {}  # files that say nothing have vLLM
    head: Found = {"what": "peers", "device": place, "model": model, "settings": asdict(given) | ours}
    runs = kept(asked.out, "runs", **head)
    with tempfile.TemporaryDirectory(prefix="lowbit-peers-") as temporary:
        make_folder(Path(temporary), asked.model, given, size=asked.size)
        for peer in asked.only:
            runs[peer] = measure(peer, Path(temporary), given, asked)
            summaries = {name: summary(runs[name]) for name in PEERS if name in runs}
            content = head | {"commit": commit()[0], "target": TARGET, "summary": summaries, "runs": runs}
            save(asked.out, content)
            print(table({peer: summaries[peer], "ours": summaries.get("ours", {"failed": "-"})}, given)[0], flush=True)
    print("\n".join(["", *table({name: summary(runs[name]) for name in PEERS if name in runs}, given)]))
    return int(any("failed" in run for run in runs.values()))
