"""Workers that step by themselves, against plain Keras on each one's rows, averaged by hand."""

import json

import keras
import pytest

from tests.commands.command_line import TASKS, tfparallel
from tests.parts import each_a_part, parts_asked_for
from tfparallel.replication.sync.option import Synchronization

from .jobs import ROOT, run_workers

PROGRAM = ROOT / "tests/workers/local_steps.py"
AVERAGED = ["2, 5", "3, 1", "100, 8", "diloco: 2, 5", "diloco: 3, 1"]


@pytest.fixture(name="job", scope="module")
def run_job(request, tmp_path_factory):
    """What each worker found, by the part of the program."""
    arguments = [str(tmp_path_factory.mktemp("checkpoints")), parts_asked_for(request)]
    return run_workers(PROGRAM, 2, 2, arguments, timeout_seconds=600)


@pytest.mark.slow
@pytest.mark.part("every step")
def test_averaged_after_each_step_of_plain_sgd_it_is_every_step(job):
    for seen in job:
        assert all(value < 1e-12 for value in seen["every step"].values())


@pytest.mark.slow
@pytest.mark.parametrize("case", each_a_part(AVERAGED))
def test_weights_are_the_average_by_rows(job, case):
    """Of short batches too, of which a worker may have none."""
    for seen in job:
        assert seen[case]["by hand"] < 1e-12 and seen[case]["between workers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", each_a_part([*AVERAGED, "post_local_sgd"]))
def test_metrics_are_of_all_rows_and_the_same_on_all_workers(job, case):
    history = job[0][case]["history"]
    assert history == job[1][case]["history"]
    # Of 37, 33 and 40 examples: a sum of whole numbers, divided by how many there are.
    for accuracy in history["accuracy"]:
        correct = accuracy * job[0][case]["examples"]
        assert abs(correct - round(correct)) < 1e-9


@pytest.mark.slow
@pytest.mark.part("post_local_sgd")
def test_until_it_begins_every_step_is_exact(job):
    for seen in job:
        differences = seen["post_local_sgd"]
        assert differences["until it begins"] == 0 < differences["from exact"]


@pytest.mark.slow
@pytest.mark.part("bytes")
def test_little_is_sent(job):
    assert job[0]["bytes"]["local"] < 0.35 * job[0]["bytes"]["every step"]


@pytest.mark.slow
@pytest.mark.part("in the middle")
def test_a_callback_may_evaluate_in_the_middle_of_an_epoch(job):
    result = job[0]["in the middle"]
    assert result == job[1]["in the middle"] and len(result["evaluated"]) == 2


@pytest.mark.slow
@pytest.mark.part("bytes")
def test_what_was_averaged_is_not_sent_again(job):
    assert job[0]["bytes"]["evaluate"] < 0.2 * job[0]["bytes"]["of weights"]


@pytest.mark.slow
@pytest.mark.parametrize("every", each_a_part(["every 3", "every 5", "diloco: every 3"]))
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(job, every):
    assert [seen[every]["weights"] for seen in job] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("every", each_a_part(["every 3", "every 5", "diloco: every 3"]))
def test_an_epoch_ends_with_one_state_of_the_optimizer(job, every):
    """Also where its last step has averaged the weights, and no rows came after it."""
    assert [seen[every]["state"] for seen in job] == [0, 0]


@pytest.mark.slow
@pytest.mark.part("within an epoch")
@pytest.mark.parametrize("case", ["new model", "same model"])
def test_a_run_goes_on_within_an_epoch(job, case):
    """The first step used to be trained instead of passed; steps before an error still counted."""
    for seen in job:
        assert seen["within an epoch"][case] == {"passed": 5, "weights": 0, "history": 0}


@pytest.mark.slow
@pytest.mark.part("options")
@pytest.mark.parametrize("option", ["jit_compile", "steps_per_execution"])
def test_options_of_keras(job, option):
    assert all(seen["options"][option] < 1e-12 for seen in job)


@pytest.mark.slow
@pytest.mark.part("masks")
def test_workers_draw_different_masks(job):
    assert job[0]["masks"] != job[1]["masks"]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
@pytest.mark.part("of a map")
def test_a_map_of_optimizers_trains_as_one_of_them(job):
    """Story: a map has no learning rate, and the average of its state raised an error."""
    for seen in job:
        figures = seen["of a map"]
        assert figures["apart"] < 1e-12 and figures["steps"] == [6, 6, 6], figures
        assert "Received: an optimizer that accumulates gradients" in figures["refused"]


@pytest.mark.slow
@pytest.mark.part("refused")
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("accumulates", "Received: an optimizer that accumulates gradients"),
        ("scales", "Received: a LossScaleOptimizer"),
        ("joins", "might mix examples"),
        ("own step", "Received: a model with a custom `train_step`"),
    ],
)
def test_what_only_all_workers_can_do_is_refused(job, case, message):
    said = job[0]["refused"][case]
    assert message in said and "Use sync='every_step'" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("--sync=local_sgd:8",), ("--compression=powersgd:2",)], ids=lambda flags: flags[0]
)
def test_a_task_is_trained_and_reported(tmp_path, flags):
    report = tmp_path / "report.json"
    code, _, errors = tfparallel(
        *("train", TASKS / "blobs.py", "--num_workers=2", "--num_devices=1", "--device_type=cpu"),
        *("--epochs=2", "--global_batch_size=16", f"--report={report}", *flags),
    )
    assert code == 0, errors
    written = json.loads(report.read_text())
    name, _, value = flags[0].removeprefix("--").partition("=")
    assert written[name] == value
    assert written["sent_bytes"]["sums"] > 0 and written["num_reductions"] > 0


@pytest.mark.parametrize(
    "spec",
    ["every_step", "accumulate:4", "accumulate:auto"]
    + ["local_sgd:8", "post_local_sgd:100,8", "diloco:8"],
)
def test_it_prints_as_it_was_asked_for(spec):
    assert str(Synchronization.parse(spec)) == spec


@pytest.mark.parametrize(
    "spec",
    ["never", "accumulate", "accumulate:0", "local_sgd", "local_sgd:0", "local_sgd:x"]
    + ["post_local_sgd:8", "local_sgd:2,3", "diloco", "diloco:0"],
)
def test_invalid_policies_raise(spec):
    with pytest.raises(ValueError, match="`sync` must be every_step, .* Received: "):
        Synchronization.parse(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("train", "--sync=local_sgd:8"), "without other workers"),
        (("train", "--sync=local_sgd:0"), "--sync: `sync` must be"),
        (("train", "--sync=local_sgd:8", "--parallel=pipeline"), "Use --parallel=data"),
        (("train", "--sync=local_sgd:8", "--compression=bf16"), "Drop one"),
        (("check", "--sync=local_sgd:8"), "Received: --sync=local_sgd:8. Drop it"),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    command, *others = flags
    code, _, errors = tfparallel(
        command, TASKS / "blobs.py", "--num_devices=2", "--device_type=cpu", *others
    )
    assert code == 2 and message in errors
