"""Data of Grain and Hugging Face: interrupted on two workers, resumed by one of two devices."""

import importlib.util
import pathlib

import keras
import numpy as np
import pytest

from . import outside_data
from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("outside_data.py")
# float64, sums in another order, 18 steps.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
INSTALLED = [
    name
    for name, (_, package) in outside_data.SOURCES.items()
    if importlib.util.find_spec(package) is not None
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="needs other packages: pip install grain datasets"),
]


@pytest.fixture(name="job", scope="module")
def run_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return folder, run_workers(PROGRAM, arguments=[str(folder), INSTALLED], timeout_seconds=300)


@pytest.mark.parametrize("name", outside_data.SOURCES)
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_another_number_of_workers(
    job, name, tmp_path
):
    if name not in INSTALLED:
        pytest.skip(f"needs {outside_data.SOURCES[name][1]}")
    folder, workers = job
    try:
        expected = outside_data.train(name, tmp_path)
        resumed = outside_data.train(name, folder)
    finally:
        keras.config.set_floatx("float32")
    assert expected["resumed"] is None and [worker[name] for worker in workers] == [None, None]
    at = resumed["resumed"]
    assert (at["epoch"], at["step_in_epoch"]) == outside_data.WRITTEN_AT
    for outcome in (resumed, *(worker["whole"][name] for worker in workers)):
        np.testing.assert_allclose(outcome["losses"], expected["losses"], **TOLERANCE)
        for weight, expected_weight in zip(outcome["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, expected_weight, **TOLERANCE)
