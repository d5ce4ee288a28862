"""Plain Keras under the drop-in strategy, on real workers: what one device gives, in float64."""

import contextlib
import csv
import os
import pathlib

import keras
import numpy as np
import pytest

from tests.parts import each_a_part, parts_asked_for

from . import keras_fit
from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("keras_fit.py")
# float64, sums in another order, some 20 steps.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}

WITH_FILES = {
    "with callbacks": keras_fit.train_with_callbacks,
    "resumed": keras_fit.interrupted_and_resumed,
}

pytestmark = pytest.mark.slow


@pytest.fixture(name="job", scope="module", params=[(2, 2)], ids=["2 x 2"])
def run_job(request, tmp_path_factory):
    """The folder that the workers were given, and what each of them returned."""
    folder = tmp_path_factory.mktemp("job")
    arguments = [str(folder), parts_asked_for(request)]
    results = run_workers(PROGRAM, *request.param, arguments=arguments, timeout_seconds=600)
    return folder, results


@pytest.fixture(name="one_device", scope="module")
def plain_keras(tmp_path_factory):
    """Returns what plain Keras gives, by the name of the case; each is trained once."""
    outcomes = {}

    def outcome_of(name):
        if name not in outcomes:
            keras.config.set_floatx("float64")
            try:
                if name in keras_fit.WITHOUT_FILES:
                    outcomes[name] = keras_fit.WITHOUT_FILES[name](contextlib.nullcontext)
                else:
                    folder = tmp_path_factory.mktemp("plain")
                    outcomes[name] = WITH_FILES[name](contextlib.nullcontext, folder)
            finally:
                keras.config.set_floatx("float32")
        return outcomes[name]

    return outcome_of


def assert_equal(outcome, expected):
    assert isinstance(outcome, dict), outcome
    assert outcome["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(outcome["history"][name], values, **TOLERANCE, err_msg=name)
    for name in ("evaluate", "predict"):
        np.testing.assert_allclose(outcome[name], expected[name], **TOLERANCE, err_msg=name)
    for variable, value in zip(outcome["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(variable, value, **TOLERANCE)


@pytest.mark.parametrize("name", each_a_part(keras_fit.WITHOUT_FILES))
def test_every_worker_gets_what_one_device_gets(job, one_device, name):
    for results in job[1]:
        assert_equal(results[name], one_device(name))


@pytest.mark.part("with callbacks", "shared")
def test_with_callbacks_too(job, one_device):
    for results in job[1]:
        assert_equal(results["with callbacks"], one_device("with callbacks"))
        assert_equal(results["shared"], one_device("with callbacks"))


@pytest.mark.part("resumed")
def test_a_stopped_job_goes_on_when_the_chief_alone_has_the_backup(job, one_device):
    """As plain Keras goes on, which draws the dropout's masks from the beginning again."""
    expected = one_device("resumed")
    assert len(expected["history"]["loss"]) == 2
    for results in job[1]:
        assert_equal(results["resumed"], expected)


@pytest.mark.part("bfloat16")
def test_a_pure_bfloat16_policy(job):
    """Story: TensorFlow's broadcast of first values has no bfloat16."""
    expected = keras_fit.pure_bfloat16(contextlib.nullcontext)
    for results in job[1]:
        outcome = results["bfloat16"]
        assert isinstance(outcome, dict), outcome
        # 8 bits of mantissa, 12 steps; sums in another order.
        np.testing.assert_allclose(outcome["loss"], expected["loss"], rtol=2e-2)
        for value, weight in zip(outcome["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(value, weight, rtol=5e-2, atol=2e-2)
    assert job[1][0]["bfloat16"] == job[1][1]["bfloat16"]


def files_in(folder):
    return sorted(
        str(pathlib.Path(path, name).relative_to(folder))
        for path, _, names in os.walk(folder)
        for name in names
        if "tfevents" not in name
    )


@pytest.mark.part("with callbacks", "shared")
def test_the_chief_alone_writes(job):
    folder, _ = job
    assert sorted(path.name for path in folder.iterdir()) == ["shared", "worker_0"]
    for written in (folder / "worker_0" / "straight", folder / "shared"):
        names = files_in(written)
        assert [name for name in names if "/" not in name] == [
            "01.keras", "02.keras", "03.keras", "04.keras", "log.csv"
        ]  # fmt: skip
        assert (written / "board" / "train").is_dir() and (written / "backup").is_dir()
        # One row an epoch, of one writer.
        with open(written / "log.csv") as file:
            assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
        events = list((written / "board" / "train").glob("*tfevents*"))
        assert len(events) == 1


@pytest.mark.part("shared")
def test_what_the_chief_saved_is_plain_keras(job):
    folder, (chief, *_) = job
    model = keras.models.load_model(folder / "shared" / "04.keras")
    # Keras does not save the states of random layers, which are no weights.
    saved = {id(weight) for weight in model.weights}
    for variable, expected in zip(model.variables, chief["shared"]["weights"], strict=True):
        if id(variable) in saved:
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12)


@pytest.mark.part("outside", "part outside")
def test_a_model_compiled_outside_the_scope_is_refused(job):
    for results in job[1]:
        for case in ("outside", "part outside"):
            assert "was compiled outside the scope of the strategy" in results[case]
