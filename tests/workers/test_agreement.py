"""Workers that come apart are told so; those of which one has no rows train as one device does."""

import pathlib

import keras
import numpy as np
import pytest

from . import agreement
from .jobs import JobFailed, run_workers

PROGRAM = pathlib.Path(__file__).with_name("agreement.py")

pytestmark = pytest.mark.slow


@pytest.fixture(name="job", scope="module")
def run_job(tmp_path_factory):
    arguments = [str(tmp_path_factory.mktemp("saved"))]
    return run_workers(PROGRAM, 2, arguments=arguments, timeout_seconds=600)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weights of the chief alone", "hold different weights at the start of `fit`"),
        ("weights drawn apart", "hold different weights at the start of `fit`"),
        ("a learning rate of the chief alone", "different weights after the first epoch"),
        ("a learning rate in the last epoch", "hold different weights at the end of `fit`"),
        ("a draw of the chief alone", "seed_generator_state' on worker 1 differs"),
        ("train_on_batch", "The workers were given different batches"),
        ("predict_on_batch", "The workers were given different batches"),
        ("local_sgd", "The workers were given different batches"),
        ("other rows to validate on", "The workers read different data"),
        ("another order", "The workers were given different batches"),
        ("what is no difference", "nothing"),
        ("ragged rows of their own", "Dense tensors are required. Received: RaggedTensorSpec("),
        ("a prediction of the chief alone", "The workers are at different points of the program"),
        ("evaluate", "hold different weights at the start of `evaluate`"),
        ("predict", "hold different weights at the start of `predict`"),
        ("weights before train_on_batch", "different weights at the start of `train_on_batch`"),
        ("test_on_batch, again", "different weights at the start of `test_on_batch`"),
        ("a row of the chief alone", "hold different weights at the start of `fit`"),
        ("class weights of their own", "class_weight"),
        ("words in another order", "vocabulary"),
        ("another loss", "loss"),
        ("an error that one worker caught", "The workers are at different points of the program"),
        ("a stop within an epoch", "epochs of different lengths, by worker: 4, 5"),
    ],
)
def test_workers_that_come_apart_are_told(job, name, said):
    """Story: each of these ended without an error, with other weights on each worker."""
    for seen in job:
        assert said in seen["errors"][name]


def test_all_stop_if_one_is_to(job):
    """Story: the others waited for it in the next epoch, and the job was lost."""
    assert [seen["stopped"] for seen in job] == [2, 2]


def test_what_the_chief_writes_is_there_behind_fit(job):
    """Story: without a meeting there the other worker found the file of the last `fit`, or none."""
    assert [seen["same"] for seen in job] == [[True] * 2] * 2


@pytest.mark.parametrize("how", agreement.LACKING)
def test_a_worker_without_rows_computes_those_of_another_in_vain(job, how):
    """Story: it computed a row of ones, and 0 · NaN of that, or an error, was everybody's."""
    keras.config.set_floatx("float64")
    try:
        weights, losses = agreement.rows_that_one_worker_lacks(how, is_plain=True)
    finally:
        keras.config.set_floatx("float32")
    for seen in job:
        weights_seen, seen_losses = seen["lacking"][how]
        np.testing.assert_allclose(seen_losses, losses, rtol=1e-9)
        for one, other in zip(weights_seen, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_step_in_which_no_worker_has_rows(job):
    """Story: every weight was NaN after it."""
    keras.config.set_floatx("float64")
    try:
        expected = agreement.a_step_without_rows(is_plain=True)
    finally:
        keras.config.set_floatx("float32")
    for seen in job:
        for one, other in zip(seen["empty"], expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)


def test_no_rows_are_no_nan_where_updates_are_of_several_steps(job):
    assert all(seen["finite"] for seen in job)


SLEEPS = """
import time

import keras
import numpy as np
import tfparallel

def main(method):
    tfparallel.init(stall_timeout=3.0)
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    )
    model.compile("sgd", "mse")
    if tfparallel.worker_index() == 0:
        getattr(model, method)(np.ones((4, 2)), np.ones((4, 1)))
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_who_does_not_come_is_missed_before_the_first_step(method):
    """Story: `stall_timeout` counted from the first step on, and `fit` waited for ever."""
    with pytest.raises(JobFailed, match="Worker 0 makes no progress.*another worker, or the data"):
        run_workers(SLEEPS, 2, arguments=[method], timeout_seconds=50)
