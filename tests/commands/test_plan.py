"""`tfparallel plan` over meshes, and `--parallel=auto`, run as users run them."""

import json
import re

import keras
import numpy as np
import pytest

from tests.commands.command_line import ROOT, TASKS
from tests.commands.command_line import tfparallel as run
from tfparallel.planning.candidates import meshes_of
from tfparallel.task import load_task

BLOBS, MLP = TASKS / "blobs.py", ROOT / "models" / "mlp.py"


@pytest.mark.slow
def test_plan_ranks_every_mesh(tmp_path):
    report = tmp_path / "plan.json"
    code, shown, said = run("plan", MLP, "--num_devices=4", f"--report={report}")
    assert code == 0, said
    first, command, why = shown.splitlines()[:3]
    mesh = re.fullmatch(r"first: (.*), [\d.e+]+ ms a step; the command:", first)[1]
    assert command.split()[:3] == ["tfparallel", "train", str(MLP)]
    assert why.startswith(f"why: {mesh} ")
    for each in meshes_of(4):  # It has no sequence to divide.
        is_shown = re.search(rf"^{each}\b", shown, re.MULTILINE)
        assert bool(is_shown) == (each.sequence == 1), each
    assert re.search(r"^measured in \d+ s, layer by layer, at 8 and 64 rows;", shown, re.MULTILINE)
    plan = json.loads(report.read_text())
    assert len(plan["meshes"]) == 9 and plan["why"] in why
    shards = {each.get("shard") for each in plan["meshes"] if each["mesh"]["data"] == 4}
    assert shards == {None, "optimizer", "parameters"}
    can = [each for each in plan["meshes"] if "why_not" not in each and "shard" not in each]
    steps = [each["step_seconds"] for each in can]
    assert steps == sorted(steps) and min(steps) > 0


@pytest.mark.slow
def test_the_first_meshes_are_tried(tmp_path):
    report = tmp_path / "plan.json"
    code, shown, said = run("plan", MLP, "--num_devices=2", "--num_trials=2", f"--report={report}")
    assert code == 0, said
    assert re.search(r"^mesh +tried +step ", shown, re.MULTILINE)
    assert re.search(r" ms a step, measured; the command:$", shown.splitlines()[0])
    assert re.search(r"^measured in .*; 2 meshes tried in \d+ s$", shown, re.MULTILINE)
    first, second, *others = json.loads(report.read_text())["meshes"]
    assert 0 < first["measured_seconds"] <= second["measured_seconds"]
    assert not any("measured_seconds" in each for each in others)


@pytest.mark.slow
def test_a_mesh_that_cannot_be_trained_is_listed_and_the_next_is_tried():
    task = TASKS / "comparing_loss.py"
    code, shown, said = run("plan", task, "--num_devices=2", "--num_trials=4")
    assert code == 0, said
    assert "; 2 meshes tried in " in shown
    lines = [line for line in shown.splitlines() if line.endswith(" the batch is divided")]
    refused = sorted(line.split()[0].rstrip(",") for line in lines)
    assert refused == [*3 * ["data=2"], "pipeline=2"]  # Three times: whole, and in shares.
    assert shown.startswith(("first: one device, ", "first: tensor=2, "))


@pytest.mark.slow
def test_what_exceeds_the_memory_is_listed_with_its_excess():
    code, shown, _ = run("plan", MLP, "--num_devices=2", "--device_memory=70KiB")
    assert code == 0
    assert re.search(r"^data=2 .* KiB too much for a device$", shown, re.MULTILINE)
    assert shown.startswith(("first: pipeline=2, ", "first: tensor=2, "))
    code, shown, _ = run("plan", MLP, "--num_devices=2", "--device_memory=2KiB")
    assert code == 1 and shown.startswith("nothing fits 2 devices of 2 KiB: ")
    (fits,) = re.findall(r" in (\S+ KiB) a device \(", shown.splitlines()[0])
    memory = f"--device_memory={fits.replace(' ', '')}"
    code, shown, _ = run("plan", MLP, "--num_devices=2", memory)  # It is enough, as was said.
    assert code == 0, shown


@pytest.mark.slow
def test_auto_trains_to_the_weights_of_one_device(tmp_path):
    """What is too large for a device goes to two, in the stages or parts that were planned."""
    train = ["train", BLOBS, "--epochs=2", "--seed=7", "--global_batch_size=32"]
    for name, *form in (
        ("none", "--parallel=none"),
        ("auto", "--parallel=auto", "--num_devices=2", "--device_memory=3.5KiB"),
    ):
        code, shown, said = run(
            *train, *form, f"--save={tmp_path / name}.keras", f"--report={tmp_path / name}.json"
        )
        assert code == 0, said
    assert re.search(r"^--parallel=auto takes (pipeline|tensor)=2 \(--parallel=\w+\): ", shown)
    models = [keras.models.load_model(tmp_path / f"{name}.keras") for name in ("none", "auto")]
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)  # Sums in another order.
    written = json.loads((tmp_path / "auto.json").read_text())
    first = written["plan"]["meshes"][0]
    assert written["configuration"]["parallel"] == first["form"]
    assert written["layout"]["mesh"] == first["mesh"]


@pytest.mark.slow
def test_auto_shares_out_what_is_too_large_for_a_replica(tmp_path):
    """Its layers have no parts and no stages: what fits is shares of the weights alone."""
    task = TASKS / "own_matrices.py"
    limits = ["--num_devices=2", "--device_memory=1.7MiB"]
    code, shown, said = run("plan", task, *limits)
    assert code == 0, said
    assert shown.startswith("first: data=2, shard=parameters, ")
    assert shown.splitlines()[1].strip() == (
        f"tfparallel train {task} --parallel=data --num_devices=2 --shard=parameters "
        "--global_batch_size=64"
    )
    train = ["train", task, "--epochs=2", "--seed=7"]
    for name, *form in (("none", "--parallel=none"), ("auto", "--parallel=auto", *limits)):
        code, shown, said = run(
            *train, *form, f"--save={tmp_path / name}.keras", f"--report={tmp_path / name}.json"
        )
        assert code == 0, said
    assert shown.startswith("--parallel=auto chose data=2, shard=parameters (--parallel=data): ")
    layers = {"tests>Mix": type(load_task(str(task)).build_model().layers[-1])}
    one, auto = (
        keras.models.load_model(tmp_path / f"{name}.keras", custom_objects=layers)
        for name in ("none", "auto")
    )
    for whole, joined in zip(one.get_weights(), auto.get_weights(), strict=True):
        np.testing.assert_allclose(whole, joined, rtol=0, atol=1e-5)  # Sums in another order.
    written = json.loads((tmp_path / "auto.json").read_text())
    assert written["shard"] == written["configuration"]["shard"] == "parameters"
    assert written["plan"]["meshes"][0]["shard"] == "parameters"


@pytest.mark.slow
def test_auto_trains_what_was_the_fastest_when_tried(tmp_path):
    report = tmp_path / "auto.json"
    flags = ["--parallel=auto", "--num_devices=2", "--num_trials=3", f"--report={report}"]
    code, shown, said = run("train", BLOBS, "--epochs=1", *flags)
    assert code == 0, said
    written = json.loads(report.read_text())
    tried = [each for each in written["plan"]["meshes"] if "measured_seconds" in each]
    assert len(tried) == 3 and written["plan"]["measured"]["trial_seconds"] > 0
    fastest = min(tried, key=lambda each: each["measured_seconds"])
    assert fastest == tried[0] and written["configuration"]["parallel"] == fastest["form"]
    assert written["configuration"]["num_trials"] == 0
    assert re.search(r"^--parallel=auto takes .* (tried|alike)", shown, re.MULTILINE)


@pytest.mark.slow
def test_auto_on_one_device_measures_nothing():
    code, shown, said = run("train", BLOBS, "--parallel=auto", "--device_type=cpu")
    assert code == 0, said
    assert shown.startswith(
        "--parallel=auto chose one device (--parallel=none): there is one device"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", BLOBS, "--parallel=auto", "--mesh=data=2"], "--mesh is for --parallel=hybrid"),
        (["train", BLOBS, "--parallel=auto", "--num_workers=2"], "is for --parallel=data, model"),
        (["train", BLOBS, "--parallel=auto", "--all_reduce=ring"], "with --parallel=auto"),
        (["plan", BLOBS, "--parallel=model", "--schedule=gpipe"], "with --parallel=model"),
        (["plan", BLOBS, "--parallel=hybrid"], "auto, model, pipeline"),
        (["plan", BLOBS, "--parallel=model", "--num_trials=2"], "Drop --num_trials, or use"),
        (["train", BLOBS, "--num_trials=2"], "=data. Drop --num_trials, or use"),
        (["plan", BLOBS, "--num_trials=-1"], "must be at least 0. Received: --num_trials=-1"),
    ],
    ids=["mesh", "workers", "all_reduce", "schedule", "form", "trials", "of data", "negative"],
)
def test_mistakes_are_answered_before_tensorflow_loads(arguments, said):
    code, _, shown = run(*arguments)
    assert code == 2
    assert said in shown.replace("|", ", ")
