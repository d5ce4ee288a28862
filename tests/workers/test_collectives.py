"""Collectives for users, between real workers: `collectives.py` is what each of them runs."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

from .collectives import CHECKS
from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("collectives.py")
RETURNING = ("workers_that_disagree", "what_cannot_be_sent", "a_barrier_names_who_is_missing")


@pytest.fixture(
    name="job",
    scope="module",
    params=[
        pytest.param((3, 1, "ring_tuned"), id="3", marks=pytest.mark.slow),
        pytest.param((2, 2, "mpi"), id="2 x 2 by MPI"),
    ],
)
def run_job(request):
    """What each worker saw, by check; one job for all of them."""
    *size, transport = request.param
    environment = {"TFPARALLEL_ALL_REDUCE": transport}
    return run_workers(PROGRAM, *size, timeout_seconds=600, environment=environment)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in RETURNING])
def test_on_every_worker(job, name):
    for worker, seen in enumerate(job):
        assert seen[name] == "ok", f"worker {worker}:\n{seen[name]}"


@pytest.mark.slow
def test_workers_know_their_place_before_any_strategy_and_after(job):
    assert [seen["place"] for seen in job] == [[w, len(job)] * 2 for w in range(len(job))]


@pytest.mark.slow
def test_a_collective_before_the_strategy_is_refused(job):
    for worker, seen in enumerate(job):
        assert f"worker {worker} of {len(job)} (TF_CONFIG), but the workers are" in seen["before"]


@pytest.mark.slow
def test_workers_that_disagree_are_named_with_what_they_sent(job):
    others = {2: "worker 1", 3: "workers 1 and 2"}[len(job)]
    same = {2: "worker 0", 3: "workers 0 and 2"}[len(job)]
    expected = [
        f"Received: {same}: all_reduce(op='sum') of float32 (3,); worker 1: "
        "all_reduce(op='sum') of float32 (4,).",
        f"of float64 (3,); {others}: all_reduce(op='sum') of float32 (3,).",
        f"of acc: float64 (); {others}: all_reduce(op='sum') of loss: float64 ().",
        f"{same}: all_gather() of float32 (rows, 2); worker 1: all_gather() of float32 (rows, 3).",
        f"all_reduce(op='mean') of float64 (); {others}: all_reduce(op='sum') of float64 ().",
        f"{same}: broadcast(root=0) of float64 (); worker 1: broadcast(root=1) of float64 ().",
        f"worker 0: all_gather() of float64 (rows,); {others}: all_reduce(op='sum') of float64 ().",
        f"{same}: all_reduce(op='sum') of float64 (); worker 1: all_reduce(op='sum') of string ().",
    ]
    for seen in job:
        messages = seen["workers_that_disagree"]
        assert isinstance(messages, list), messages
        for message, part in zip(messages, expected, strict=True):
            assert part in message


@pytest.mark.slow
def test_what_cannot_be_sent_is_refused_on_all_workers(job):
    last = len(job) - 1
    expected = [
        "A numeric or boolean tensor is required. Received: a tensor of type string.",
        "`op` must be 'sum', 'mean', 'max' or 'min'. Received: op='average'.",
        f"`root` must be an integer from 0 to {last}: .* Received: root={last + 1}.",
        "Received: root=True.",
        "a: Dense tensors .* Received: NoneType None. "
        "b: A numeric or boolean tensor .* of type complex128.",
        "Received: int 18446744073709551616.",
        "At least one axis is required, which is split. Received: a scalar.",
        "positive number of seconds. Received: timeout_seconds=0.",
    ]
    for seen in job:
        messages = seen["what_cannot_be_sent"]
        assert isinstance(messages, list), messages
        for message, pattern in zip(messages, expected, strict=True):
            assert re.search(pattern, message), message


@pytest.mark.slow
def test_a_barrier_names_who_is_missing(job):
    came = {2: "worker 0 arrived", 3: "workers 0 and 2 arrived"}[len(job)]
    for worker, seen in enumerate(job):
        message = seen["a_barrier_names_who_is_missing"]
        assert f"Not all {len(job)} workers" in message, message
        expected = "the last one arrived too late" if worker == 1 else f"{came}, worker 1 did not"
        assert expected in message


# --- Alone ------------------------------------------------------------------------------------


def test_a_process_that_is_alone_is_worker_0_of_1():
    assert (tfparallel.worker_index(), tfparallel.num_workers()) == (0, 1)
    tfparallel.barrier()


def test_alone_values_come_back_as_tensors():
    x = tf.constant([[1.0, 2.0]])
    for function in (
        tfparallel.all_reduce,
        tfparallel.all_gather,
        tfparallel.gather,
        tfparallel.broadcast,
        tfparallel.reduce_scatter,
    ):
        assert function(x) is x
    assert tfparallel.all_gather(3).numpy().tolist() == [3]
    mean = tfparallel.all_reduce({"n": 3, "x": x}, "mean")
    assert (float(mean["n"]), mean["n"].dtype) == (3.0, tf.float64)
    with pytest.raises(ValueError, match=r"integer from 0 to 0: .* Received: root=1\."):
        tfparallel.broadcast(x, root=1)
    with pytest.raises(ValueError, match="Cast them to int32"):
        tfparallel.all_reduce(True)


def test_before_a_strategy_the_environment_says_who_this_is(monkeypatch):
    monkeypatch.setenv("TFPARALLEL_WORKERS", "localhost:1001,localhost:1002,localhost:1003")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (tfparallel.worker_index(), tfparallel.num_workers()) == (2, 3)
    message = r"worker 2 of 3 \(torchrun\), but the workers are not connected"
    with pytest.raises(RuntimeError, match=message):
        tfparallel.all_reduce(1.0)


@pytest.mark.slow
def test_the_mean_in_a_layer_is_over_the_replicas_that_have_rows():
    """2 rows on 3 replicas: in a program, where `num_replicas_in_sync` is 1.

    A mean of means is the batch's only where all replicas have as many rows: it is refused by
    default.
    """

    class Mean(keras.layers.Layer):
        def call(self, inputs):
            return 0 * inputs + tfparallel.all_reduce(keras.ops.mean(inputs), "mean")

    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((1,)), Mean()]), strategy, check_rows=False
    )
    for rows, expected in [([1.0, 4.0], 2.5), ([1.0, 4.0, 10.0], 5.0)]:
        assert model.predict(np.array(rows)[:, None], verbose=0)[:, 0].tolist() == [
            expected
        ] * len(rows)


def test_tensorflows_own_strategy_of_several_workers_cannot_join():
    from tfparallel.collectives import in_replica

    class OfTwoWorkers:
        num_replicas_in_sync = 2

    with pytest.raises(RuntimeError, match="OfTwoWorkers of 2 replicas, 1 of them here"):
        in_replica._workers(OfTwoWorkers(), 1)
