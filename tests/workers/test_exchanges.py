"""Rooted and personalized collectives, groups and messages, between real workers and replicas.

`exchanges.py` is what each worker runs.
"""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

from .exchanges import CHECKS, gradient
from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("exchanges.py")
RETURNING = ("mistakes_with_groups", "mistakes_with_messages", "a_group_waits_until_its_deadline")


@pytest.fixture(
    name="job",
    scope="module",
    params=[
        pytest.param((3, 1, "ring_tuned"), id="3"),
        pytest.param((3, 2, "mpi"), id="3 x 2 by MPI"),
    ],
)
def run_job(request):
    """What each worker saw, by check; one job for all of them."""
    *size, transport = request.param
    environment = {"TFPARALLEL_ALL_REDUCE": transport}
    return run_workers(PROGRAM, *size, timeout_seconds=900, environment=environment)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in RETURNING])
def test_on_every_worker(job, name):
    for worker, seen in enumerate(job):
        assert seen[name] == "ok", f"worker {worker}:\n{seen[name]}"


def check_messages(messages, expected):
    assert isinstance(messages, list), messages
    for message, pattern in zip(messages, expected, strict=True):
        assert re.search(pattern, message), message


@pytest.mark.slow
def test_mistakes_with_groups_are_told(job):
    outside = "Only the workers of a group .* from worker 1 with group=Group.ranks=.0, 2"
    for worker, seen in enumerate(job):
        expected = [
            r"each once, of this job: workers 0 to 2\. Received: ranks=\[\]",
            r"Received: ranks=\[0, 0\]",
            r"Received: ranks=\[0, 3\]",
            r"Received: ranks=\[True\]",
            r"Received: worker 0: new_group\(\[1\].*; workers 1 and 2: new_group\(\[0\]",
            r"positive number of seconds\. Received: timeout_seconds=0\.",
            r"outside replicas and `tf\.function`s",
        ]
        if worker == 1:
            expected += [outside, outside]
        else:
            expected += [
                r"`root` must be one of \[0, 2\].* Received: root=1\.",
                r"worker 0: all_reduce.* of float32 \(1,\); worker 2: all_reduce.* \(3,\)\.",
                r"must be a multiple of 2.* Received: shape \(3,\)",
            ]
        expected.append(r"what `tfparallel\.new_group` returned\. Received: group=\[0, 1\]")
        check_messages(seen["mistakes_with_groups"], expected)


@pytest.mark.slow
def test_mistakes_with_messages_are_told_to_both(job):
    differ = r"worker 0 sends x: float32 \(2, 3\); worker 1 expects x: float32 \(3,\)\. Pass `like"
    for worker, seen in enumerate(job):
        others = {0: "workers 1 and 2", 1: "workers 0 and 2", 2: "workers 0 and 1"}[worker]
        expected = [
            f"`dest` must be the index of another worker: {others}. Received: dest={worker} on",
            r"Received: source=3 .*`tag` must .*tag=-1\. `timeout_seconds` .*timeout_seconds=0\.",
            r"Messages hold numeric and boolean tensors\. Received: a tensor of type string",
            r"outside replicas and outside any `tf\.function`",
            *([differ] if worker < 2 else []),
        ]
        if worker == 0:
            expected.append(r"Worker 1 did not call or finish `tfparallel\.recv\(source=0, tag")
        if worker == 1:
            expected.append(r"Worker 2 did not call or finish `tfparallel\.send\(dest=1, tag")
        check_messages(seen["mistakes_with_messages"], expected)


@pytest.mark.slow
def test_a_group_waits_for_a_member_until_its_deadline(job):
    message = job[0]["a_group_waits_until_its_deadline"]
    assert re.search(
        r"workers 0 and 2 made this call within 40 s|waited 40 s.* worker 2 did not arrive", message
    )


# --- Local replicas, and alone ----------------------------------------------------------------


@pytest.fixture(name="strategy", scope="module")
def make_strategy():
    return tfparallel.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])


def on_replicas(strategy, function):
    def call():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return function(tf.cast(index, tf.float64))

    for run in (strategy.run, tf.function(strategy.run)):
        yield from enumerate(strategy.experimental_local_results(run(call)))


def test_local_replicas_exchange(strategy):
    """Also eagerly, where the index of a replica is a tensor."""

    def exchange(k):
        x = 10 * k + tf.range(6, dtype=tf.float64)
        return (
            tfparallel.all_to_all(x),
            tfparallel.scatter(x, root=2),
            tfparallel.reduce(x[:2], root=1, op="mean"),
        )

    for k, (received, share, mean) in on_replicas(strategy, exchange):
        assert received.shape == 6 and share.shape == 2
        assert received.numpy().tolist() == [10 * j + 2 * k + i for j in range(3) for i in (0, 1)]
        assert share.numpy().tolist() == [20 + 2 * k, 21 + 2 * k]
        assert mean.numpy().tolist() == ([10, 11] if k == 1 else [0, 0])


def test_local_replicas_differentiate(strategy):
    a = np.arange(1.0, 4.0)

    def gradients(k):
        return (
            gradient(lambda x: (k + 1) * tf.reduce_sum(a * tfparallel.all_to_all(x)), a),
            gradient(lambda x: (k + 1) * tf.reduce_sum(tfparallel.scatter(x, root=1)), a),
            gradient(lambda x: 2 * tf.reduce_sum(a * tfparallel.reduce(x + k, 1, "max")), a),
        )

    for k, (exchanged, scattered, reduced) in on_replicas(strategy, gradients):
        assert exchanged.numpy().tolist() == [(r + 1) * a[k] for r in range(3)]
        assert scattered.numpy().tolist() == ([1, 2, 3] if k == 1 else [0, 0, 0])
        assert reduced.numpy().tolist() == ([2, 4, 6] if k == 2 else [0, 0, 0])


@pytest.mark.parametrize("name", ["reduce", "scatter", "all_to_all"])
def test_a_layer_that_exchanges_by_rank_is_refused(strategy, name):
    """On one device it would do something else."""

    class Exchange(keras.layers.Layer):
        def call(self, inputs):
            return inputs + 0 * tf.reduce_sum(getattr(tfparallel, name)(inputs))

    with pytest.raises(ValueError, match="exchanges values by rank, so the result depends on"):
        model = tfparallel.data_parallel(
            lambda: keras.Sequential([keras.Input((2,)), Exchange()]), strategy
        )
        model.predict(np.ones((6, 2)), verbose=0)


def test_alone_values_come_back_as_tensors():
    x = tf.constant([1.0, 2.0])
    alone = tfparallel.new_group([0])
    assert (alone.rank, alone.size) == (0, 1)
    for function in (tfparallel.reduce, tfparallel.scatter, tfparallel.all_to_all):
        assert function(x) is x and function(x, group=alone) is x
    assert tfparallel.all_reduce(x, group=alone) is x
    tfparallel.barrier(group=alone)
    with pytest.raises(ValueError, match=r"worker 0\. Received: ranks=\[0, 1\]"):
        tfparallel.new_group([0, 1])
    with pytest.raises(
        ValueError, match=r"`dest` must be another one\. Received: dest=0 on worker 0"
    ):
        tfparallel.send(x, dest=0)
