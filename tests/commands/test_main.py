"""Usage, help and mistakes: answered at once, without TensorFlow."""

import configparser
import importlib.metadata
import os
import re
import signal
import subprocess
import sys

import packaging.requirements
import pytest

from tests.commands.command_line import ROOT, TASKS
from tfparallel.commands.main import main

BLOBS = str(TASKS / "blobs.py")


@pytest.mark.parametrize("arguments, code", [([], 2), (["--help"], 0), (["-h"], 0)])
def test_usage_lists_the_commands_with_an_example(capsys, arguments, code):
    assert main(arguments) == code
    shown = "".join(capsys.readouterr())
    assert "  train " in shown and "  check " in shown
    assert shown.index("tfparallel train task.py --parallel=data") < shown.index("  check ")


def test_an_unknown_command_is_a_usage_error(capsys):
    assert main(["fly"]) == 2
    message = capsys.readouterr().err
    names = "init, train, check, plan, launch, trace, doctor, bench"
    assert f"must be one of {names}. Received: 'fly'" in message


@pytest.mark.parametrize("command", ["train", "check"])
def test_help_shows_an_example_and_every_flag(capsys, command):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"  tfparallel {command} models/digits_cnn.py" in shown
    assert "(default: 64)" in shown and "--report" in shown


PROGRAMS = [
    "bench all_reduce", "bench pipeline", "bench train", "check", "doctor", "init", "launch",
    "plan", "plan all_reduce", "trace", "train",
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_by_topic(capsys, program):
    assert main([*program.split(), "--help"]) == 0
    usage, empty, example, *rest = capsys.readouterr().out.splitlines()
    assert usage.startswith("usage: tfparallel ") and (empty, example) == ("", "example:")
    assert "Others:" not in rest, "a flag has no topic yet"
    assert all(len(line) <= 100 for line in rest[1:]), rest
    assert "<" not in "".join(rest) and "repeat this option" not in "".join(rest)


def test_help_of_bench_names_what_it_measures(capsys):
    """Story: `bench` and its help named collectives alone."""
    assert main(["bench", "--help"]) == 0
    head = " ".join(capsys.readouterr().out.partition("Measurements:")[0].split())
    assert "`tfparallel bench train TASK.py`" in head
    assert "`tfparallel bench pipeline TASK.py`" in head


@pytest.mark.parametrize("program", ["bench all_reduce", "bench train", "bench pipeline"])
def test_a_report_has_both_its_names_in_each_bench(capsys, program):
    assert main([*program.split(), "--help"]) == 0
    assert "--report=FILE.json, --json" in capsys.readouterr().out


def test_help_offers_what_a_flag_takes(capsys):
    """Story: `bench train --help` offered --nproc_per_node=gpu, which it refuses."""
    for program, offered in (
        ("launch", "=N|gpu|cpu|auto"), ("bench train", "=A,B"), ("bench all_reduce", "=N"),
    ):  # fmt: skip
        assert main([*program.split(), "--help"]) == 0
        assert f"--nproc_per_node{offered}" in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "a.py", "--paralel=data"],
         "--paralel is not a flag of `train`. Did you mean --parallel?"),
        (["train", "a.py", "--batch_sise=8"],
         "--batch_sise is not a flag of `train`. Did you mean --global_batch_size?"),
        (["bench", "train", "a.py", "--qqq"],
         "--qqq is not a flag of `bench train`. `tfparallel bench train --help` shows the flags."),
        (["launch", "--inject=a", "--", "b"],
         "--inject is not a flag of `launch`. It is a flag of `train`. `tfparallel launch --help` "
         "shows the flags. A program's own flags come after the program: `-- PROGRAM --inject`."),
        (["train", "a.py", "--batch_size=8"], "of `train`. The flag here is --global_batch_size."),
        (["train", "a.py", "--batch-size=8"], "of `train`. The flag here is --global_batch_size."),
        (["train", "a.py", "--gpus=2"], "The flag here is --num_devices"),
        (["train", "a.py", "--workers=2"], "The flag here is --num_workers."),
        (["train", "a.py", "--np=2"], "The flag here is --num_workers."),
        (["train", "a.py", "--nproc_per_node=2"], "The flag here is --num_workers."),
        (["launch", "--nprocs=2", "--", "b"], "The flag here is --nproc_per_node."),
        (["train", "a.py", "--output=b"], "The flag here is --save or --report."),
        (["train", "a.py", "--lr=1"],
         "It is set in the task file: the optimizer, in `compile_model"),
        (["train", "a.py", "--learning_rate=1"], "It is set in the task file: the optimizer"),
        (["launch", "-n", "2", "--", "b"], "The flag here is --nproc_per_node."),
        (["launch", "-np", "2", "--", "b"], "The flag here is --nproc_per_node."),
        (["launch", "--nodes=2", "--", "b"], "The flag here is --nnodes."),
        (["train", "a.py", "-j", "4"], "-j is not a flag of `train`."),
        (["train", "a.py", "--batchsize=8"], "The flag here is --global_batch_size."),
        (["train", "a.py", "--micro_batches=4"], "Did you mean --num_micro_batches?"),
        (["train", "a.py", "--checkpoint=b"], "Did you mean --checkpoint_dir?"),
        (["check", "a.py", "--epochs=3"], "of `check`. The flag here is --steps."),
        (["check", "a.py", "--save=a"], "of `check`. It is a flag of `train`."),
        (["train", "a.py", "--device=gpu"], "The flag here is --device_type."),
        (["train", "a.py", "--cpu"], "The flag here is --device_type=cpu."),
        (["train", "a.py", "--max_steps=9"], "The flag here is --steps_per_epoch."),
        (["check", "a.py", "--max_steps=9"], "The flag here is --steps."),
        (["train", "a.py", "--no-cuda"], "The flag here is --device_type=cpu."),
        (["train", "a.py", "--patience=3"], "in the task file: in `callbacks()`."),
        (["bench", "all_reduce", "--dtype=bf16"], "The value here is --dtype=bfloat16."),
        (["train", "a.py", "--bf16"], "The flag here is --precision=mixed_bfloat16."),
        (["train", "a.py", "--fsdp"], "The flag here is --parallel=data --shard=parameters."),
        (["train", "a.py", "--tensor_parallel_size=2"], "The flag here is --parallel=tensor."),
        (["train", "a.py", "--num_stages=2"], "The flag here is --num_devices."),
        (["train", "a.py", "--gradient_accumulation_steps=4"],
         "The flag here is --sync=accumulate:4."),
        (["train", "a.py", "--resume"], "The flag here is --checkpoint_dir."),
        (["train", "a.py", "--dataset=mnist"], "in the task file: in `load_data()`."),
        (["train", "a.py", "--nnodes=2"],
         "It is for the launcher: `tfparallel launch --nnodes=N"),
        (["train", "a.py", "--master_addr=a"],
         "`tfparallel launch --rdzv_endpoint=HOST:PORT -- tfparallel train …`."),
        (["check", "a.py", "--mpi"], "launch --transport=mpi -- tfparallel check …`."),
        (["train", "a.py", "--independent"], "launch --independent -- tfparallel train …`."),
        (["train", ""], "The task file does not exist. Received: ''"),
        (["train", "", ""], "One task file is required. Received: ['', '']"),
        (["train", BLOBS, "--dtype"], "--dtype needs a value. Received: none. Use --dtype=float"),
        (["train", "a.py", "--local_rank=0"], "Nothing here needs it: drop it."),
        (["train", "a.py", "--version"], "`tfparallel --version` shows the versions."),
        (["launch", "--standalone", "--", "b"], "Nothing here needs it: drop it."),
        (["launch", "-H", "a:2", "--", "b"], "The flag here is --nnodes."),
        (["launch", "--k8s", "--", "b"], "The flag here is --emit=kubernetes."),
        (["launch", "--emit=k8s", "--", "b"], "The value here is --emit=kubernetes."),
        (["launch", "--np", "2", "a.py"], "The flag here is --nproc_per_node."),
        (["launch", "a.py", "x y"], "Type `tfparallel launch … -- python a.py 'x y'`."),
        (["bench", "all_reduce", "-b", "8"], "The flag here is --min_bytes."),
        (["bench", "train", "a.py", "--num_workers=2"], "The flag here is --nproc_per_node."),
        (["bench", "a.py"], "Example: tfparallel bench all_reduce a.py"),
        (["bench", "training", "a.py"], "Did you mean `tfparallel bench train`?"),
        (["plan", "allreduce", "--ranks=4"], "Did you mean `tfparallel plan all_reduce`?"),
        (["init", "--kind=classification"], "The value here is --kind=image."),
        (["doctor", "--json"], "The flag here is --report."),
        (["train", "a.py", "--parallel=data,pipeline"],
         "For several at once, use --parallel=hybrid --mesh=data=2,pipeline=2."),
        (["train", "a.py", "--parallel=DataParallel"], "Did you mean --parallel=data?"),
        (["train", "a.py", "--parallel", "=", "data"], "Type --parallel=VALUE, without spaces."),
        (["train", "a.py", "--strategy=MirroredStrategy"],
         "The value here is --strategy=mirrored."),
        (["train", BLOBS, "--sync=local-sgd:8"], "Did you mean --sync=local_sgd:8?"),
        (["train", BLOBS, "--parallel=hybrid", "--mesh=dp=2,pp=2"],
         "Received: 'dp=2,pp=2'. Here, dp is data, pp is pipeline."),
        (["train", BLOBS, "–parallel=data"], "begins with two hyphens: --parallel=data."),
        (["train", BLOBS, "--mesh", "data=2", "pipeline=2"], "A flag's value has no spaces"),
        (["train", str(ROOT / "setup.cfg")],
         "must be a Python file that ends in .py. Received: '"),
        (["a.py", "--num_devices=2"], "Did you mean `tfparallel train a.py`?"),
        (["run", "a.py"], "Received: 'run'. Did you mean `tfparallel train`?"),
        (["--num_devices=2", "train"], "Flags come after the command: `tfparallel train …`."),
        (["fly"], "Received: 'fly'. `tfparallel --help` explains them.\n"),
        (["train", "a.py", "--parallel=ddp"], "--parallel=ddp. The value here is --parallel=data."),
        (["train", "a.py", "--parallel=data-parallel"], "Did you mean --parallel=data?"),
        (["train", "a.py", "--parallel=sequence"],
         "The value here is --parallel=hybrid --mesh=sequence=2."),
        (["train", "a.py", "--parallel=fsdp"],
         "The value here is --parallel=data --shard=parameters."),
        (["train", "a.py", "--shard=params"], "The value here is --shard=parameters."),
        (["train", "a.py", "--parallel=piplin"], "Did you mean --parallel=pipeline?"),
        (["train", "a.py", "--precision=BF16"], "The value here is --precision=mixed_bfloat16."),
        (["train", BLOBS[:-3]], f"Did you mean {BLOBS}?"),
        (["train", BLOBS, "num_devices=2"], "Did you mean --num_devices=2?"),
        (["train", str(TASKS)], f"Received: a folder, '{TASKS}'. Choose a file in it, such as "),
        (["plan", BLOBS, "--parallel=data"], "The value here is --parallel=auto."),
        (["train", BLOBS, "--epochs"], "--epochs needs a value. Received: none. Use --epochs=N"),
        (["train", BLOBS, "--shard"], "Use --shard=optimizer|gradients|parameters"),
        (["plan", str(ROOT / "docs")], f"Received: a folder, '{ROOT / 'docs'}'.\n"),
        (["train"], "One task file is required. Received: []. Example: tfparallel train"),
        (["bench", "allreduce"], "Received: ['allreduce']. Did you mean all_reduce?"),
        (["init", "data.csv"], "Pass the data with a flag: tfparallel init task.py --data=data"),
        (["help", "trian"], "Received: 'trian'. Did you mean `tfparallel train`?"),
        (["trian", "a.py"], "Received: 'trian'. Did you mean `tfparallel train`?"),
        (["trace", "nowhere"], "The folder does not exist; a folder with a job's records"),
        (["trace"], "One folder is required, such as the --log_dir of `tfparallel launch`."),
        (["trace", "a", "b"], "Received: a b. Example:"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_a_sentence(capsys, arguments, message):
    """Story: absl's words, "Did you mean: parallel ?", and one text for two mistakes."""
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_one_mistake_is_told_once(capsys):
    """Story: a batch of no rows was said to be too small for micro-batches, too."""
    assert main(["train", BLOBS, "--global_batch_size=0"]) == 2
    message = capsys.readouterr().err
    assert "must be at least 1. Received: --global_batch_size=0." in message
    assert "micro_batches" not in message


def test_help_of_a_command_is_found_in_each_order(capsys):
    texts = []
    for arguments in (["help", "trace"], ["trace", "help"], ["trace", "--help"]):
        assert main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and texts[0].startswith("usage: tfparallel trace")


def test_help_names_each_choice_once(capsys):
    assert main(["train", "--help"]) == 0
    words = re.split(r"[^\w]+", capsys.readouterr().out)
    once = ("mirrored", "multi_worker", "gpipe", "except_last", "mixed_float16")
    assert [words.count(name) for name in once] == [1] * len(once)


def test_help_is_there_at_once():
    """It loads one module of this package, and others of Python's alone."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tfparallel", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    loaded = names[names.index("runpy") + 1 :]  # Before it, what the installation begins with.
    others = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others == {"tfparallel", "tfparallel.commands", "tfparallel.commands.main"}


@pytest.mark.parametrize("command", ["train", "launch", "plan"])
def test_a_reader_that_has_gone_is_no_error_of_ours(command):
    """As `tfparallel train --help | head -1` may end."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tfparallel", command, "--help"],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", ["train", "launch", "init"])
def test_help_loads_what_the_site_installs(command):
    """Story: `make docs`, which reads `--help`, missed cloudpickle. It has no TensorFlow."""
    program = (
        "import sys; from tfparallel.commands.main import main; before = set(sys.modules);"
        f"main(['{command}', '--help']); print('\\n', *set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    tops = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    site = {packaging.requirements.Requirement(line).name
            for line in setup["options.extras_require"]["docs"].split()}  # fmt: skip
    packages = importlib.metadata.packages_distributions()
    needed = {name for top in tops & set(packages) for name in packages[top]} - {"tfparallel"}
    assert {name.replace("_", "-") for name in needed} <= site


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "One task file is required. Received: []"),
        ([BLOBS, "other.py"], "One task file is required"),
        ([BLOBS, "--epohcs=3"], "epohcs"),
        ([BLOBS, "--seed=x"], "seed"),
        ([BLOBS, "--parallel=fly"], "must be one of none, data, model, tensor, pipeline, hybrid"),
        ([BLOBS, "--global_batch_size=0"], "at least 1. Received: --global_batch_size=0"),
        ([BLOBS, "--num_devices=0"], "at least 1. Received: --num_devices=0"),
        ([BLOBS, "--seed=-1"], "Received: --seed=-1"),
        (
            [BLOBS, "--devices=CPU:0,CPU:1", "--num_devices=2"],
            "not both. Received: --num_devices=2 with --devices=CPU:0,CPU:1. Drop one",
        ),
        (
            [BLOBS, "--devices=CPU:0", "--device_type=cpu"],
            "Received: --devices=CPU:0 with --device_type=cpu. Drop --device_type",
        ),
        ([BLOBS, "--parallel=hybrid"], "needs a mesh: the number of devices along each axis"),
        ([BLOBS, "--mesh=data=2"], "Received: --mesh=data=2 with --parallel=data. Drop --mesh"),
        ([BLOBS, "--parallel=hybrid", "--mesh=data=2,rows=2"], "Received: 'data=2,rows=2'"),
        ([BLOBS, "--parallel=hybrid", "--mesh=data=2,data=2"], "each once"),
        ([BLOBS, "--parallel=hybrid", "--mesh=seq=2"], "data, pipeline, tensor, sequence, each"),
        ([BLOBS, "--parallel=hybrid", "--mesh=sequence=0"], "at least 1. Received: sequence=0."),
        (
            [BLOBS, "--parallel=hybrid", "--mesh=sequence=2,tensor=2"],
            "Received: a mesh of tensor=2, sequence=2. Use tensor=1 or sequence=1.",
        ),
        (
            [BLOBS, "--parallel=hybrid", "--mesh=data=8,pipeline=2", "--global_batch_size=16"],
            "--num_micro_batches=4, for 8 replicas, with --global_batch_size=16",
        ),
        (
            [BLOBS, "--precision=float32", "--dtype=float64"],
            "--precision=float32 with --dtype=float64. Drop one",
        ),
        ([BLOBS, "--report=r.txt"], "must end in .json. Received: --report=r.txt"),
        ([BLOBS, "--report=no/r.json"], "mkdir -p no"),
        (["absent.py"], "does not exist. Received: 'absent.py'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_mistakes_of_both_commands(capsys, command, arguments, message):
    assert main([command, *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"tfparallel {command}: ") and message in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--parallel=none", "--num_devices=4"], "one device. Received: --num_devices=4. Use"),
        (["--parallel=none", "--devices=CPU:0,CPU:1"], "one device. Received: --devices=CPU:0"),
        (["--devices=CPU:0,CPU:90"], "On the command line: --num_devices=2 --device_type=cpu."),
        (["--shard=gradients"], "--shard=gradients with --sync=every_step. Add --sync=accumulate"),
        (
            ["--parallel=hybrid", "--mesh=data=2", "--shard=gradients", "--sync=accumulate:2"],
            "Received: --shard=gradients with --parallel=hybrid. Use one of them",
        ),
        (["--epochs=0"], "Received: --epochs=0"),
        (["--steps_per_epoch=0"], "Received: --steps_per_epoch=0"),
        (["--save=model.h5"], "must end in .keras. Received: --save=model.h5"),
        (["--save=no/a.keras"], "does not exist. Received: --save=no/a.keras"),
        ([f"--checkpoint_dir={BLOBS}"], "must not be a file"),
        (["--checkpoint_every_steps=5"], "or add --checkpoint_dir."),
        (
            ["--checkpoint_dir=a", "--checkpoint_every_steps=0"],
            "Received: --checkpoint_every_steps=0",
        ),
        ([f"--tensorboard={BLOBS}"], "The folder must not be a file. Received: --tensorboard="),
        (["--inject=kill:worker=1"], "kill needs step. Received: 'kill:worker=1'"),
    ],
)
def test_mistakes_of_train(capsys, arguments, message):
    assert main(["train", BLOBS, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps=0"], "Received: --steps=0"),
        (["--parallel=none"], "A parallelism to check is required"),
        (["--precision=int8"], "precision"),
    ],
)
def test_mistakes_of_check(capsys, arguments, message):
    assert main(["check", BLOBS, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_all_mistakes_are_told_at_once(capsys):
    assert main(["train", BLOBS, "--epochs=0", "--seed=-1", "--save=a"]) == 2
    shown = capsys.readouterr().err
    assert all(name in shown for name in ("--epochs=0", "--seed=-1", "--save=a"))


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_versions_are_named(capsys, arguments):
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tfparallel 0.1.0, tensorflow 2.") and ", keras 3." in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps-per-epoch=0"], "Received: --steps_per_epoch=0"),
        (["--steps-per-epoch", "0"], "Received: --steps_per_epoch=0"),
        (["--checkpoint-every-steps=5"], "--checkpoint_every_steps=5 alone"),
        (["--no-such-flag"], "no-such-flag"),
        (["--no-stop-on-nan", "--epochs=0"], "Received: --epochs=0"),
    ],
)
def test_flags_may_have_dashes(capsys, arguments, message):
    assert main(["train", BLOBS, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--epochs=banana", "--epochs must be a whole number. Received: --epochs=banana."),
        ("--num_devices=1.5", "--num_devices must be a whole number. Received: --num_devices=1.5."),
        ("--start_timeout=soon", "--start_timeout must be a number. Received: "),
        ("--parallel=all", "--parallel must be one of none, data, model,"),
        ("--stop_on_nan=maybe", "--stop_on_nan must be true or false. Received: "),
    ],
)
def test_a_value_that_cannot_be_gets_a_sentence(capsys, flag, message):
    assert main(["train", BLOBS, flag]) == 2
    assert message in capsys.readouterr().err
