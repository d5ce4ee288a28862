"""The data of workers: shares of the examples, and batches that should have been the same."""

import pathlib

import keras
import numpy as np
import pytest

from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("data.py")

pytestmark = pytest.mark.slow


@pytest.fixture(name="saved_in", scope="module")
def folder_to_save_in(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(name="job", scope="module")
def run_job(saved_in):
    arguments = [str(saved_in)]
    return run_workers(PROGRAM, 2, num_devices=2, arguments=arguments, timeout_seconds=600)


@pytest.mark.parametrize("loss", ["by_sample", "joined"])
def test_shares_of_unequal_size_and_length_train_as_one_device_does(job, loss):
    for seen in job:
        errors = seen[loss]
        # Float64; sums in another order.
        assert max(errors["weights"], errors["history"], errors["evaluate"]) < 1e-9, errors
        # A row is trained on where it was read; a worker that has none is lent one.
        assert (errors["rows sent"] < 100) == (loss == "by_sample")


def test_predictions_go_where_they_are_wanted(job):
    for worker, seen in enumerate(job):
        errors = seen["by_sample"]
        assert errors["all"] < 1e-9 and errors["own"] < 1e-9
        for destination in ("chief", "chief again"):
            assert errors[destination] is None if worker else errors[destination] < 1e-9


def test_several_rows_of_each_example_are_joined_in_order(job):
    for seen in job:
        assert seen["several rows"]["rows"] == 27
        assert seen["several rows"]["error"] < 1e-12  # Float64; sums in another order.


def test_each_file_that_workers_save_is_there_and_whole(job, saved_in):
    paths = ["own_0.keras", "own_1.keras", "shared.keras", "shared.weights.h5"]
    assert job[1]["saved"] == paths
    models = [keras.models.load_model(saved_in / path) for path in paths[:3]]
    models.append(keras.models.clone_model(models[0]))
    models[-1].load_weights(saved_in / paths[3])
    for model in models[1:]:
        for weight, expected in zip(model.get_weights(), models[0].get_weights(), strict=True):
            np.testing.assert_array_equal(weight, expected)


def test_a_share_without_end_beside_one_that_ends_is_refused(job):
    for seen in job:
        assert "batches of each worker: [3, -1]" in seen["infinite"], seen["infinite"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("order", "different batches in one of the first 2 steps"),
        ("length", "data[0]: '(12, 2)' on worker 0; '(10, 2)' on worker 1"),
        ("batch size", "fit.batch_size: 4 on worker 0; 6 on worker 1"),
        ("optimizer", "optimizer.momentum: '0.0' on worker 0; '0.9' on worker 1"),
    ],
)
def test_workers_that_train_something_else_are_refused_together(job, change, message):
    for seen in job:
        assert message in seen[change], seen[change]


def test_workers_that_evaluate_or_predict_something_else_are_refused_together(job):
    said = [seen["without training"] for seen in job]
    for each in said:
        for name in ("evaluate", "predict", "mapped"):
            assert "different batches in one of the first 2 steps" in each[name], name
    assert said[0]["not mapped"] == said[1]["not mapped"] > 0


def test_workers_that_agree_train_after_all_that(job):
    assert [seen["nothing"] for seen in job] == ["trained", "trained"]
