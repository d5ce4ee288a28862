"""Of data that can be indexed a worker reads its own rows, where predictions need not meet."""

import pathlib

import keras
import numpy as np
import pytest

from . import own_reading
from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("own_reading.py")
NUM_WORKERS, NUM_DEVICES = 2, 2
# float64, sums in another order, 8 steps.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}

pytestmark = pytest.mark.slow


@pytest.fixture(name="job", scope="module")
def run_job():
    return run_workers(PROGRAM, NUM_WORKERS, NUM_DEVICES, timeout_seconds=600)


@pytest.fixture(name="one_device", scope="module")
def plain_keras():
    keras.config.set_floatx("float64")
    try:
        seen = {name: own_reading.train(**case) for name, case in own_reading.CASES.items()}
        return seen | {"sample partition": own_reading.weighted_sample_partition()}
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize("case", own_reading.CASES)
def test_all_is_as_on_one_device(job, one_device, case):
    expected = one_device[case]
    for seen in job:
        results = seen[case]
        for name, values in expected["history"].items():
            np.testing.assert_allclose(results["history"][name], values, **TOLERANCE, err_msg=name)
        np.testing.assert_allclose(results["evaluate"], expected["evaluate"], **TOLERANCE)
        np.testing.assert_allclose(results["predict"], expected["predict"], **TOLERANCE)
        for weight, expected_weight in zip(results["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, expected_weight, **TOLERANCE)
    np.testing.assert_allclose(job[0][case]["at chief"], expected["predict"], **TOLERANCE)
    assert job[1][case]["at chief"] is None
    assert sum(len(seen[case]["own"]) for seen in job) == own_reading.NUM_EXAMPLES


def test_a_sample_partition_takes_class_weights(job, one_device):
    losses, weights = one_device["sample partition"]
    for seen in job:
        own_losses, own_weights = seen["sample partition"]
        np.testing.assert_allclose(own_losses, losses, **TOLERANCE)
        for weight, expected_weight in zip(own_weights, weights, strict=True):
            np.testing.assert_allclose(weight, expected_weight, **TOLERANCE)


@pytest.mark.parametrize("case", ["keras", "weighted"])
@pytest.mark.parametrize("what", ["read", "validated"])
def test_an_epoch_reads_each_row_on_one_worker(job, case, what):
    rows = [seen[case][what] for seen in job]
    assert sorted(rows[0] + rows[1]) == [*range(own_reading.NUM_EXAMPLES)]


def test_where_predictions_meet_each_worker_reads_all(job):
    """What is read need not be sent."""
    for seen in job:
        assert seen["joined"]["read"] == [*range(own_reading.NUM_EXAMPLES)]


@pytest.mark.parametrize(
    ("change", "message"), [("order", "order.first rows: "), ("seed", "order.order: ")]
)
def test_workers_with_other_data_are_refused_together(job, change, message):
    for seen in job:
        assert message in seen[change], seen[change]
