"""Wrong input: one line on stderr that names what is wrong, exit code 2, nothing written to the results folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.cli.main import COMMANDS as COMMANDS_OF_LOWBIT
from harness.cli.main import main
from harness.foundation.project_files import HOME

RUN = (
    # numbers out of their bounds
    ("trainer.steps=0", "trainer.steps=0: must be at least 1"),
    ("trainer.steps=-5", "trainer.steps=-5: must be at least 1"),
    ("trainer.lr=-1", "trainer.lr=-1: must be above 0"),
    ("trainer.lr=0", "trainer.lr=0: must be above 0"),
    ("trainer.lr=nan", "trainer.lr=nan: must be a finite number"),
    ("trainer.lr=1e999", "trainer.lr=inf: must be a finite number"),
    ("trainer.eval_every=0", "trainer.eval_every=0: must be at least 1"),
    ("trainer.warmup_steps=-1", "trainer.warmup_steps=-1: must be at least 0"),
    ("trainer.betas=[0.9,1]", "trainer.betas.1=1: must be below 1"),
    ("trainer.grad_clip=0", "trainer.grad_clip=0: must be above 0"),
    ("engine.max_batch=0", "engine.max_batch=0: must be at least 1"),
    ("engine.temperature=0", "engine.temperature=0: must be above 0"),
    ("engine.top_p=1.5", "engine.top_p=1.5: must be at most 1"),
    ("engine.top_p=0.9", "engine.top_p=0.9: truncated sampling is not what is scored"),
    ("engine.gpu_memory=1", "engine.gpu_memory=1: must be below 1"),
    ("engine.max_new_tokens=0", "engine.max_new_tokens=0: must be at least 1"),
    ("seed=-1", "seed=-1: must be at least 0"),
    ("base_seed=-1", "base_seed=-1: must be at least 0"),
    ("base.target_accuracy=7", "base.target_accuracy=7: must be at most 1"),
    ("base.curriculum=[0]", "base.curriculum.0=0: must be at least 1"),
    ("base.batch_tokens=-1", "base.batch_tokens=-1: must be at least 0"),
    ("base.decay_from=0", "base.decay_from=0: must be above 0"),
    ("base.average=2", "base.average=2: must be at most 1"),
    ("base.tolerance=-1", "base.tolerance=-1: must be at least 0"),
    ("base.weight_decay=-1", "base.weight_decay=-1: must be at least 0"),
    ("algo.eps_low=-1", "algo.eps_low=-1: must be at least 0"),
    ("algo.dual_clip=1", "algo.dual_clip=1: must be above 1"),
    ("algo.num_prompts=0", "algo.num_prompts=0: must be at least 1"),
    ("algo.num_minibatches=1000", "algo.num_minibatches=1000: must be 1 to num_prompts"),
    ("task.n=0", "task.n=0: must be at least 1"),
    ("task.n=100000", "n=100000 is not an integer from 2 to 1024"),
    ("model.num_kv_heads=3", "num_heads=4 is not a multiple of num_kv_heads=3"),
    ("launch.gpus=-1", "launch.gpus=-1: must be at least 1"),
    ("launch.stall_s=0", "launch.stall_s=0: must be above 0"),
    ("knobs.TIS.cap=-1", "knobs.TIS.cap: -1.0 is not a positive weight"),
    ("knobs.TIS.cap=nan", "knobs.TIS.cap=nan: a number is expected"),
    # values of another type
    ("trainer.steps=abc", "trainer.steps='abc': a whole number is expected\n"),
    ("trainer.steps=3.5", "trainer.steps=3.5: a whole number is expected"),
    ("trainer.steps=1e3", "trainer.steps=1e3: a whole number is expected, such as 1000"),
    ("engine.max_new_tokens=8.0", "engine.max_new_tokens=8.0: a whole number is expected, such as 8"),
    ("trainer.steps=null", "trainer.steps=null: a whole number is expected"),
    ("trainer.steps=true", "trainer.steps=true: a whole number is expected"),
    ("trainer.steps={a:1}", "trainer.steps={'a': 1}: a whole number is expected"),
    ("trainer.lr=high", "trainer.lr='high': a number is expected"),
    ("trainer.betas=0.9", "trainer.betas=0.9: a list is expected"),
    ("trainer.betas=[0.9]", "trainer.betas.1 is missing"),
    ("trainer.betas=[0.9,0.95,1]", "trainer.betas=[0.9, 0.95, 1]: fewer values are expected\n"),
    ("model=hf model.path=", "model.path='': some text is expected\n"),
    ("task=gsm8k task.path=", "task.path='': some text is expected\n"),
    ("algo.loss=pbo", "algo.loss='pbo': must be 'ppo', 'gspo', 'cispo' or 'reinforce'"),
    ("algo.dynamic_sampling=maybe", "algo.dynamic_sampling='maybe': true or false is expected"),
    ("launch.compile=maybe", "launch.compile='maybe': true or false is expected"),
    ("launch.fp8_kernels=fast", "launch.fp8_kernels='fast': must be 'best'"),
    ("knobs.TIS.cap=abc", "knobs.TIS.cap='abc': a number is expected"),
    ("knobs.TIS.cap=true", "knobs.TIS.cap=true: a number is expected\n"),
    ("knobs.TIS.level=word", "knobs.TIS.level='word': must be 'token', 'sequence' or 'geometric'\n"),
    ("method=fp8_rl knobs.RecalibratedKV.protocol=engine", "protocol='engine': must be 'trainer' or 'inference'\n"),
    ("method=rspo knobs.RSPO.place=outside", "knobs.RSPO.place='outside': must be 'ratio' or 'clipped'\n"),
    ("knobs.TIS=3", "knobs.TIS=3: keys with values are expected, such as knobs.TIS.KEY=VALUE"),
    ("knobs=3", "knobs=3: keys with values are expected"),
    ("task.options=3", "task.options=3: keys with values are expected"),
    ("parts=foo", "parts='foo': a list is expected"),
    # words that Hydra's grammar refuses, or that ask for several runs
    ("trainer.lr=[1", "trainer.lr=[1: cannot be read"),
    ("trainer.lr={a:1", "trainer.lr={a:1: cannot be read"),
    ("task.path=a=b", "task.path=a=b: cannot be read"),
    ("launch.gpus=[", "launch.gpus=[: cannot be read"),
    ("trainer.lr=1,2", "trainer.lr=1,2: one value is expected"),
    ("launch.gpus=1,2", "launch.gpus=1,2: one value is expected"),
    ("trainer.lr=${foo}", "Interpolation key 'foo' not found"),
    ("~trainer.steps", "'~trainer.steps' is not of the form key=value"),
    ("~trainer.steps=1", "~trainer.steps=1: a key cannot be removed"),
    # names that there are not
    ("algo.lr=3", "unknown key algo.lr; nearest: trainer.lr"),
    ("steps=3", "unknown key steps; nearest: trainer.steps"),
    ("trainer.stepz=3", "unknown key trainer.stepz; nearest: trainer.steps"),
    (
        "qqqq=3",
        "unknown key qqqq; valid: algo, base, engine, model, precision, task, trainer, method, parts, knobs, "
        "evaluations, base_seed, seed; lowbit run",
    ),
    ("launch.gpu=1", "launch has no such setting; nearest: gpus"),
    ("trainer.steps", "'trainer.steps' is not of the form key=value; such as trainer.steps=VALUE\n"),
    ("=3", "'=3' is not of the form key=value"),
    ("trainer={steps:3}", "trainer={steps:3}: no such choice; valid: local, verl"),
    ("precision.weights=int8_chanel", "precision.weights=int8_chanel: unknown; nearest: int8_channel"),
    ("precision.kv=e4m3_kw", "precision.kv=e4m3_kw: unknown; nearest: e4m3_kv"),
    ("precision=int8+kv9", "precision=int8+kv9: no such choice; nearest: int8"),
    ("method=flashrk", "method=flashrk: unknown; nearest: flashrl"),
    ("parts=[foo]", "parts: unknown part foo"),
    ("knobs.TIZ.cap=3", "knobs.TIZ: method=flashrl has no such part; nearest: TIS"),
    ("knobs.TIS.cup=3", "knobs.TIS.cup: unknown knob; nearest: cap"),
    (
        "task=count",
        "task=count: no base can be trained for it, its class has no n, ceiling, answers, demonstrations; give",
    ),
    ("model.name=../x", "model.name='../x': a plain name is expected: letters, digits, '_'"),
    ("model.name=", "model.name='': a plain name is expected"),
    ("model=hf", "model: num_layers=null: without a shape a local Hugging Face folder is needed"),
    ("model=nowhere/folder", "no such choice; valid: hf, "),
    ("model=nowhere/folder", "; a folder: model=hf model.path=nowhere/folder"),
    ("model.path=nowhere", "model.path=nowhere: a folder needs model=hf beside it; add it"),
    ("model=hf model.path=nowhere", "model.path=nowhere: no such folder"),
    (f"model=hf model.path={HOME / 'README.md'}", "README.md: is a file, no model folder"),
    ("task=wordmath", "vocab_size=32: valid: 512 (model=words_10m)\n"),
    ("method=FLASHRL", "method=FLASHRL: unknown; nearest: flashrl, "),
    ("method=tis", "method=tis: unknown; nearest: mis, bf16_tis, k3_rs_tis; TIS alone is method=flashrl"),
    ("numerics_version=99", "numerics_version=99: follows from the code and cannot be set"),
    ("+outside=[a]", "+outside=[a]: follows from the code and cannot be set"),
    ("model.max_positions=3", "model.max_positions=3: with task=sort a prompt of "),
)
"""(overrides of `lowbit run method=flashrl`, what the line says)."""
COMMANDS = (
    ("", "the following arguments are required: command"),
    ("swep quick", "unknown command swep; nearest: sweep"),
    ("--nope", "unknown option --nope; a command comes first; see lowbit --help"),
    ("--nope sweep quick", "unknown option --nope; a command comes first; see lowbit --help"),
    ("sweep", "the following arguments are required: name"),
    ("sweep quik", "sweep 'quik' not found; nearest: quick"),
    ("sweep nowhere/mine.yaml", "nowhere/mine.yaml: no such file"),
    ("sweep search_aqn", "lowbit search search_aqn"),
    ("sweep smoke --ray-address auto", "only with --launcher ray"),
    ("run metod=bf16", "nearest: method"),
    ("run method=naive precision=int5", "int4"),
    ("run method=bf16 precision=int4", "method bf16 cannot use it"),
    ("sweep smoke --workers 0", "argument --workers: '0': a whole number above 0 is expected"),
    ("sweep smoke --workers -1", "argument --workers: '-1': a whole number above 0 is expected"),
    ("sweep smoke --seeds -1", "argument --seeds: '-1': whole numbers, 0 or more"),
    ("sweep smoke --seeds 1,a", "argument --seeds: '1,a': whole numbers"),
    ("sweep quick --seeds 1 --until-decided", "seeds: not with --until-decided"),
    ("sweep quick --where seed=1 --until-decided", "where=seed=1: not with --until-decided"),
    ("sweep smoke --where task.n=99 --dry-run", "where: no cell of smoke has task.n=99; valid task.n: "),
    ("sweep smoke --where task.m=4", "where: unknown key task.m; nearest: task."),
    (
        "sweep smoke --until-decided",
        "sweep smoke: its file has no `until`, which --until-decided needs; such as until:",
    ),
    ("sweep smoke --launcher pbs", "argument --launcher: invalid choice: 'pbs'"),
    ("sweep smoke --launcher slurm --slurm partition", "slurm=partition: valid: NAME=VALUE, such as partition=gpu"),
    ("sweep smoke --launcher slurm --slurm time=0", "slurm=time=0: valid: a whole number above 0, in minutes"),
    (
        "sweep smoke --launcher slurm --slurm time=5 --slurm time=6",
        "slurm=time=6: time=5 is given, too; valid: one of them\n",
    ),
    ("paper dapo --data dapo=. dapo=docs", "--data dapo=docs: dapo=. is given, too; valid: one of them\n"),
    ("sweep smoke --slurm cluster=local", "slurm=cluster=local: only with --launcher slurm"),
    ("sweep smoke --gpu h100", "gpu=h100: only with --dry-run, which predicts for it"),
    ("sweep smoke --list", "list: only with --dry-run\n"),
    ("sweep smoke --dry-run --gpu nope", "gpu=nope: an unknown GPU; valid: a100, h100, h200, b200"),
    ("sweep nothing --dry-run --gpu nope", "gpu=nope: an unknown GPU; valid: a100, h100, h200, b200"),
    ("run --dry-run --gpu h10", "gpu=h10: an unknown GPU; nearest: h100"),
    ("sweep smoke --dry-run --memory 0", "argument --memory: '0': GiB above 0 are expected"),
    ("run --memory 80", "memory=80.0: only with --dry-run, which predicts for it"),
    ("warm nowhere", "model=nowhere: neither a model folder nor a shape; valid: 0.5b, 1.5b, 3b, 7b"),
    ("warm 7b --rows 0", "argument --rows: '0': a whole number above 0 is expected"),
    ("warm 7b --tensor-parallel 3", "tensor-parallel=3: 28 heads, 4 key-value heads and 18944 MLP channels do not"),
    ("sweep smoke --max-hours inf", "'inf': a number of hours above 0 is expected"),
    ("sweep smoke --colour", "sweep: unknown arguments --colour; see lowbit sweep --help"),
    ("sweep smoke trainer.steps=0 --dry-run", "trainer.steps=0: must be at least 1"),
    ("sweep smoke launch.compile=maybe --dry-run", "launch.compile='maybe': true or false is expected"),
    ("sweep README.md", "README.md: a name of sweeps/ is expected, or a path to a .yaml file"),
    ("sweep sweeps", "sweeps: a name of sweeps/ is expected, or a path to a .yaml file"),
    ("sweep sweeps/search_aqn.yaml", "is run by another command: lowbit search sweeps/search_aqn.yaml"),
    ("search sweeps/smoke.yaml", "lowbit sweep sweeps/smoke.yaml; a file of lowbit search is called search_*.yaml"),
    ("search search_aqn --report --restart", "argument --restart: not allowed with argument --report"),
    ("search search_aqm", "search 'search_aqm' not found; nearest: search_aqn"),
    ("break-even --batches a", "argument --batches: 'a': whole numbers above 0 are expected, separated by commas"),
    ("sweep smoke --where knobs.FOO.cap=3", "where: no cell of smoke has knobs.FOO.cap; nearest: knobs.TIS.cap"),
    (
        "sweep smoke model.max_positions=3",
        "smoke: arm method=bf16: model.max_positions=3: with task=chain a prompt of ",
    ),
    ("sweep smoke algo.lr=3", "unknown key algo.lr; nearest: trainer.lr"),
    (
        "sweep smoke seed=7",
        "seed=7: a sweep gives every run its seeds; valid: seeds: [7] in the sweep's file, or lowbit",
    ),
    ("sweep smoke base_seed=7 --dry-run", "base_seed=7: a sweep gives every run its seeds; valid: base_seeds: [7] in"),
    ("sweep smoke knobs.TIS.cup=3", "knobs.TIS.cup: unknown knob; nearest: cap"),
    (
        "sweep smoke algo.num_minibatches=1000",
        "smoke: no cell can run, every arm is impossible: arm method=bf16: algo.",
    ),
    ("run method=alp knobs.ALP.first=9", "knobs.ALP.first=9: the model has 4 layers; valid: 0 to 3\n"),
    (
        "sweep smoke method=alp precision=int4 knobs.ALP.first=9 --dry-run",
        "smoke: no cell can run, every arm is impossible: arm method=bf16: knobs.ALP.first=9: the model has ",
    ),
    (
        "run model=hf model.path=folder base.n=9",
        "error: base.n=9: no base is trained here, the model is the folder; leave it out\n",
    ),
    (
        "run model=hf model.path=folder model.num_layers=3",
        "model.num_layers=3: the folder's config.json says the shape",
    ),
    ("run model=hf model.path=folder model.sft_lr=1e-3", "model.sft_lr=1e-3: no base is trained here, the model is "),
    (
        "sweep smoke model=hf model.path=folder base=default",
        "smoke: arm method=bf16: base=default: no base is trained here, the model is the folder; leave it out\n",
    ),
    ("base smoke seed=-1", "seed=-1: must be at least 0"),
    ("replay collect trainer.steps=0", "trainer.steps=0: must be at least 1"),
    ("replay report", "run `lowbit replay evaluate` first"),
    ("search quick", "quick"),
    ("search search_aqn --trials 0", "argument --trials: '0': a whole number above 0 is expected"),
    ("search search_aqn --dashboard --port 99999", "argument --port: '99999': a port from 1 to 65535 is expected"),
    ("browse --port 0", "argument --port: '0': a port from 1 to 65535 is expected"),
    ("browse", "results; lowbit sweep quick makes some"),
    ("report", "report: the name of a sweep is missing"),
    ("report nothing", "sweep 'nothing' has no results"),
    ("report nothing --main", "sweep 'nothing' has no results"),
    ("runs", "no sweep has results in "),
    ("runs nothing", "sweep 'nothing' has no results in "),
    ("passport zzz", "is 'zzz'"),
    ("results import nowhere", "nowhere"),
    ("results verify quick", "quick is one word too many"),
    ("results pack", "which sweep?"),
    ("results unpack quik", "no packed sweep 'quik'"),
    ("figures --list qurl_clip", "figures: --list does not go with names, such as qurl_clip"),
    ("figures figure1", "'figure1' is no paper figure and no sweep with results"),
    ("early-warning quick", "sweep 'quick' has no results"),
    ("runs --results=", "argument --results: '': a path is expected"),
    ("break-even --batches 0", "argument --batches: '0': whole numbers above 0 are expected"),
    ("capacity --gpus 0", "argument --gpus: '0': whole numbers above 0 are expected"),
    ("capacity --nvlink nan", "argument --nvlink: 'nan': GB/s above 0 are expected"),
    ("claims nonsense", "claim 'nonsense': unknown; `lowbit claims` lists the ids; papers and sweeps: FlashRL"),
    ("claims --write --check", "--write does not go with --check"),
    ("paper dapo --gpu h100", "gpu=h100: only with --dry-run"),
    ("paper fp8_rl --dry-run --gpu nope", "gpu=nope: an unknown GPU; valid: a100, h100, h200, b200"),
    ("paper fp8_rl --dry-run --model 8b --gpu nope", "gpu=nope: an unknown GPU; valid: a100, h100, h200, b200"),
    ("paper dapo --memory 80", "memory=80.0: only with --dry-run"),
    ("paper --dry-run", "--dry-run: of which recipe?"),
    ("paper --tiny", "--tiny: of which recipe?"),
    ("probe results/probes/161ef8798e2d.json --precisions int8", "--precisions: nothing is measured for the file"),
    ("probe results/probes/161ef8798e2d.json task.num_eval=8", "task.num_eval=8: nothing is measured for the file"),
    (
        "layers results/bases/s-sort8-b0-1fd435092bb5 engine.max_new_tokens=4",
        "engine.max_new_tokens=4: has no effect here, where the exact policy answers each question once, on the CPU; "
        "valid: task, precision, method, parts, knobs; --answers says how many, and task.options.max_new_tokens how ",
    ),
    (
        "layers results/bases/s-sort8-b0-1fd435092bb5 precision=bf16",
        "precision=bf16: method naive cannot use it; valid: int8, fp8_channel, fp8_tensor, fp8_block, w8a16, mxfp8, "
        "nvfp4, nvfp4_w4a4, mxfp4, mxfp4_w4a4, mxfp4_up_w4a4, mxfp4_mbs_w4a4, nf4, int4, int3, int2\n",
    ),
    (
        "probe results/bases/words_s-wordmath4-b0-f607159189a8 --precisions int8",
        "task 'sort' is written in token ids of models that are trained here, and results/bases/words_s-wordmath4-b0-"
        "f607159189a8/tokenizer.json has other tokens; name the model's own task, or one in text, e.g. task=gsm8k",
    ),
    ("advise --size 7b --length 1024 --gpu foo", "--gpu foo: an unknown GPU; valid: a100, h100, h200, b200"),
    ("advise --size 7b --length 1024 --k3 int8=1e-4,int8=1e-3", "--k3 int8=1e-4,int8=1e-3: int8 is given twice"),
    (
        f"eval {HOME / 'results/bases/xs-chain8-b0-1d8bca0f130c'} evaluations=[{{task:chain,num:4}}] model.path=other",
        "model.path=other: the model is the folder that the command names; leave it out\n",
    ),
    ("paper dapo --tiny model=xs", "model=xs: the model is the folder that the command names; leave it out\n"),
    ("paper dapo --memory nan", "argument --memory: 'nan': GiB above 0 are expected"),
    ("results import --tracking tensorboard", "argument --tracking: 'tensorboard' is no tracker; valid: mlflow, wandb"),
    ("search rate --tracking mlflow --no-tracking", "argument --no-tracking: not allowed with argument --tracking"),
    ("claims QuRL --check", "--check does not go with the names of claims"),
    ("claims QuRL --write", "--write does not go with the names of claims"),
    ("throughput throughput_h200 --write", "--write goes with --report alone"),
    (
        "throughput throughput_h200 --report --only size=7b",
        "--only does not go with --report, which measures nothing\n",
    ),
    ("throughput throughput_h200 --report --gpus 2", "--gpus does not go with --report, which measures nothing\n"),
    ("throughput throughput_h200 --report --dry-run", "argument --dry-run: not allowed with argument --report"),
    ("throughput throughput_cpu --gpus 2 --dry-run", "--gpus does not go with throughput_cpu, which runs on the CPU\n"),
    ("parity --report --formats int8", "parity: --formats does not go with --report, which measures nothing\n"),
    ("parity --report --samples 8", "parity: --samples does not go with --report, which measures nothing\n"),
    ("figures --list --notebooks", "figures: --list does not go with --notebooks\n"),
    ("search search_aqn --report --trials 3", "search: --trials does not go with --report, which runs nothing\n"),
    ("search search_aqn --dashboard --max-hours 1", "--max-hours does not go with --dashboard, which runs nothing\n"),
    ("search search_aqn --dry-run --port 8081", "search: --port does not go with a call without --dashboard\n"),
    ("paper dapo --again", "lowbit paper dapo: a launch or a dry run needs --model NAME=FOLDER and --data NAME=FOLDER"),
    ("paper dapo --tiny --model 32b=harness", "--tiny makes model and data itself: leave --model out\n"),
    ("paper dapo --tiny --data dapo=harness", "--tiny makes model and data itself: leave --data out\n"),
    ("results verify --tracking wandb", "--tracking goes with import without a source, which logs what is there\n"),
    ("results import harness --tracking wandb", "--tracking goes with import without a source, which logs what is "),
    ("results import --no-tracking", "--no-tracking leaves nothing to do; give a source, or a tracker\n"),
    ("results pack ..", "sweep '..' has no results in "),
    ("advise --size 7b --length 10 --probe=", "argument --probe: '': a path is expected"),
    ("parity --report", "no parity was measured yet"),
    ("parity --samples 0", "argument --samples: '0': a whole number above 0 is expected"),
    ("methods flashrk", "flashrk"),
)
"""(a command line, what the line says)."""
READS = (
    "report standard", "report --html", "figures", "figures --list", "runs", "runs quick", "passport zzz", "browse",
    "site", "site --check", "claims", "claims --check", "mismatch", "early-warning", "dose", "break-even", "capacity",
    "advise --size 7b --length 8192", "advise --cases", "export zzz folder", "eval zzz", "fp8-cache", "layers",
    "parity --report", "replay report", "results verify", "results pack quick", "results unpack",
    "search search_aqn --report", "search search_aqn --dashboard", "throughput throughput_h200 --report",
)  # fmt: skip
"""Command lines that read a results folder and make none."""


def refused(words: list[str], expected: str, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: ") and err.count("\n") == 1
    assert expected in err
    assert not results.exists() or not any(results.iterdir())


@pytest.mark.parametrize(("override", "expected"), RUN)
def test_a_wrong_override_is_refused(
    override: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    method = [] if "method=" in override else ["method=flashrl"]
    for options in ([], ["--dry-run"]):
        words = ["run", *method, *override.split(" "), *options, "--results", str(results)]
        refused(words, expected, results, capsys)


@pytest.mark.parametrize(("line", "expected"), COMMANDS)
def test_a_wrong_command_line_is_refused(
    line: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, words = tmp_path / "results", line.split()
    results.mkdir()
    with_folder = words and words[0] not in ("methods", "metrics", "swep", "warm")
    refused([*words, *["--results", str(results)] * bool(with_folder)], expected, results, capsys)


def test_an_empty_word_is_no_name_of_a_file_or_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a shell's variable that is not set leaves one; `Path` takes it for the current folder."""
    refused(
        ["results", "import", "", "--results", str(tmp_path)],
        "results import: '': a name or a path is",
        tmp_path,
        capsys,
    )
    refused(
        ["results", "pack", "", "--results", str(tmp_path)], "results pack: '': a name or a path is", tmp_path, capsys
    )
    refused(
        ["figures", "", "--results", str(tmp_path)], "error: '' is no paper figure and no sweep with", tmp_path, capsys
    )


@pytest.mark.parametrize("line", READS)
def test_a_command_that_reads_results_wants_their_folder(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, words = tmp_path / "results", line.split()
    told = f"lowbit: error: --results {results}: no such folder; lowbit {words[0]} reads results that are there\n"
    assert main([*words, "--results", str(results)]) == 2
    assert capsys.readouterr().err == told
    assert not results.exists()
    results.write_text("mine")
    assert main([*words, "--results", str(results)]) == 2
    assert capsys.readouterr().err == told.replace("no such folder", "a file, where a folder is expected")


@pytest.mark.parametrize(
    ("words", "file", "text", "key"),
    [
        (["layers"], "layers/x.json", "{}", "policy"),
        (["layers"], "layers/x.json", '{"policy": "x", "precision": "int8", "rows": [{"name": "all"}]}', "k3"),
        (["fp8-cache"], "fp8_cache/x.json", "{}", "rows"),
        (["parity", "--report"], "parity/cpu.json", "{}", "hardware"),
        (["replay", "report"], "replay/x.json", "{}", "sampler"),
        (["mismatch"], "probes/x.json", '{"formats": []}', "is_untrained"),
        (["claims"], "bench/jet_rl_7b_h200.json", "{}", "size"),
    ],
)
def test_a_record_that_lacks_a_key_is_named(
    words: list[str], file: str, text: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    assert main([*words, "--results", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lowbit: error: {path}: {key} is missing")


def test_every_command_says_whether_it_makes_its_results_folder() -> None:
    makes = {"base", "doctor", "paper", "probe", "run", "sweep"}
    both = {"eval", "fp8-cache", "layers", "parity", "passport", "replay", "results", "search", "throughput"}
    assert {line.split()[0] for line in READS} >= both
    always_read = {line.split()[0] for line in READS} - both
    without = {"completion", "methods", "metrics", "warm"}
    assert makes | both | always_read | without == set(COMMANDS_OF_LOWBIT)


@pytest.mark.parametrize(
    "line",
    [
        "sweep smoke", "sweep smoke --dry-run", "sweep smoke --until-decided --dry-run", "run method=bf16",
        "run method=bf16 --dry-run", "search search_aqn --dry-run", "paper rilq --tiny --dry-run", "base smoke",
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["file", "file/results"])
def test_a_file_where_the_results_folder_should_be_is_told_before_anything_else(
    line: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([*line.split(), "--results", str(tmp_path / place)]) == 2
    out, err = capsys.readouterr()
    assert not out and err == f"lowbit: error: results={tmp_path / place}: cannot be written: Not a directory\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("line", ["run model=hf task=chain model.path=", "eval ", "probe ", "layers ", "warm "])
def test_a_config_json_with_an_impossible_size_is_named(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(HOME / "results/bases/xs-chain8-b0-1d8bca0f130c", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": "4"}))
    assert main([*f"{line}{tmp_path}".split(), *["--results", str(tmp_path)] * (line != "warm ")]) == 2
    told = f"lowbit: error: {path}: num_attention_heads='4': a whole number above 0 is expected\n"
    assert capsys.readouterr().err == told
