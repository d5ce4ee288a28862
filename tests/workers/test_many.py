"""More than ten workers, which TensorFlow ranks by the text of their indices: 0, 1, 10, 2."""

import pathlib

import numpy as np
import pytest

from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("many.py")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [11, 23])
def test_what_is_joined_comes_in_the_order_of_the_workers(number):
    job = run_workers(PROGRAM, number, arguments=["collectives"], timeout_seconds=300)
    workers = list(range(number))
    for worker, seen in enumerate(job):
        assert seen == {
            "ranks": sorted(workers, key=str),  # Fails once TensorFlow counts.
            "all_gather": workers,
            "uneven": [each for each in workers for _ in range(each % 3)],
            "exchange": workers,
            "reduce_scatter": [2.0 * worker * number, (2.0 * worker + 1) * number],
        }


def test_eleven_workers_train_to_the_weights_of_one_device():
    one, *_ = run_workers(PROGRAM, 1, arguments=["training"], timeout_seconds=300)
    eleven = run_workers(PROGRAM, 11, arguments=["training"], timeout_seconds=600)
    for seen in eleven:
        assert seen["gathered"] == [list(range(11))] * 2
        np.testing.assert_allclose(seen["losses"], one["losses"], rtol=1e-6)  # float32.
        np.testing.assert_allclose(seen["predictions"], one["predictions"], rtol=1e-12)
        for weight, expected in zip(seen["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-12)
