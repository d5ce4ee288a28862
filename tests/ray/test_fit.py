"""`tfparallel.ray.fit` on a local Ray cluster of several raylets, some of which are killed."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'tfparallel[ray]'")

import tfparallel
from tests.ray import training
from tests.ray.clusters import (
    actor_of,
    add_node,
    cluster,
    disturbed,
    kill_raylet,
    process_of,
    steps,
    still_running,
    wait_for,
)

pytestmark = pytest.mark.slow
SLOW = 1.5  # Seconds of a step, so that it can be disturbed.
# The sums of a batch are added in another order on another number of workers.
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def four_nodes():
    with cluster(4) as started:
        yield started


@pytest.fixture(scope="module", name="on_two")
def undisturbed_on_two(four_nodes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return tfparallel.ray.fit(training.train, 2, args=[folder]), steps(folder)


def fit(*args, **options):
    """Fits, never for ever."""
    return tfparallel.ray.fit(*args, **{"start_timeout_seconds": 60, **options})


def step_is_done(folder, number, num_workers=None):
    def is_done():
        done = [step for step, _, size in steps(folder) if num_workers in (None, size)]
        return bool(done) and max(done) >= number

    return lambda: wait_for(is_done, f"step {number} in {folder}")


def test_two_workers_train_to_the_weights_of_one_device(on_two, capfd):
    weights, records = on_two
    for expected, weight in zip(training.alone(), weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=ROUNDING)
    assert [step for step, *_ in records] == list(range(training.STEPS * training.EPOCHS))
    assert {size for *_, size in records} == {2}


@pytest.mark.parametrize("find", [process_of, actor_of])
def test_a_killed_process_costs_no_bit(find, on_two, tmp_path, capfd):
    step = step_is_done(tmp_path, 11)
    weights = disturbed(
        lambda: fit(training.train, 2, args=[tmp_path, SLOW], max_failures=1),
        step,
        lambda: find(tmp_path, 1).kill(),
        (tmp_path / "hurry").touch,
    )
    for expected, weight in zip(on_two[0], weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
    shown = capfd.readouterr()
    what = "was killed by SIGKILL" if find is process_of else "was lost ("
    assert "Worker 1 on " in shown.err and what in shown.err, shown.err
    assert "restarting all workers (1 of 1)" in shown.err
    assert "[0] resuming at epoch" in shown.out
    assert still_running(tmp_path) == []


def test_four_workers_lose_two_nodes_and_get_two(four_nodes, on_two, tmp_path, capfd):
    kill, add = (lambda: kill_raylet(four_nodes)), (lambda: add_node(four_nodes))
    weights = disturbed(
        lambda: fit(training.train, (2, 4), args=[tmp_path, SLOW]),
        step_is_done(tmp_path, 8, 4), kill, kill, step_is_done(tmp_path, 10, 2), add, add,
        step_is_done(tmp_path, 11, 4), (tmp_path / "hurry").touch,
    )  # fmt: skip
    shown = capfd.readouterr()
    sizes = [size for *_, size in steps(tmp_path)]
    assert [size for at, size in enumerate(sizes) if at == 0 or size != sizes[at - 1]] == [
        4, 2, 4
    ], shown.err  # fmt: skip
    for expected, weight in zip(on_two[0], weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=ROUNDING)
    # A repeated step has the same examples; their mean is summed in another order.
    of_two = {step: seen for step, seen, _ in on_two[1]}
    assert {step for step, *_ in steps(tmp_path)} == set(of_two)
    for step, seen, _ in steps(tmp_path):
        assert seen == pytest.approx(of_two[step], rel=1e-12)
    assert still_running(tmp_path) == []


DRIVER = """
import sys, tfparallel
from tests.ray import training
tfparallel.ray.fit(training.train, 2, args=[sys.argv[1], float(sys.argv[2])])
"""


def test_a_driver_that_is_told_to_stop_saves_and_goes_on(four_nodes, on_two, tmp_path):
    """Story: Ray's handler of SIGTERM aborted the driver, and the steps since a checkpoint."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(SLOW)],
        env={**os.environ, "RAY_ADDRESS": four_nodes.address},
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        step_is_done(tmp_path, 11)()
        driver.send_signal(signal.SIGTERM)
        _, shown = driver.communicate(timeout=150)
    assert driver.returncode == 75, shown
    assert "tfparallel.ray: stopped by SIGTERM; the workers saved their state" in shown
    assert still_running(tmp_path) == []
    done = steps(tmp_path)
    weights = fit(training.train, 2, args=[tmp_path])
    for expected, weight in zip(on_two[0], weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
    # Not one step was repeated.
    assert [step for step, *_ in steps(tmp_path)] == list(range(training.STEPS * training.EPOCHS))
    assert len(done) < training.STEPS * training.EPOCHS


def test_an_error_is_told_with_its_worker(four_nodes, capfd):
    def fail():
        if os.environ["RANK"] == "1":
            raise KeyError("gone")
        import time

        time.sleep(600)

    with pytest.raises(RuntimeError, match="exited with code 1") as caught:
        fit(fail, 2)
    text = str(caught.value)
    assert text.startswith("Worker 1 on ") and "KeyError: 'gone'\nStopped worker 0." in text
    assert "[1] KeyError: 'gone'\n" in capfd.readouterr().err


def test_cpus_limit_the_threads(four_nodes):
    assert fit(lambda: os.environ["TF_NUM_INTRAOP_THREADS"], 1) == "1"


def test_too_few_resources_are_told_in_time(four_nodes):
    with pytest.raises(RuntimeError, match="Ray placed 0 workers within 1 s; at least 5") as caught:
        fit(print, 5, start_timeout_seconds=1)
    assert "{'CPU': 1}, in a cluster that has {'CPU': 4.0" in str(caught.value)
