"""Collective keys: few, the same on all workers, and another for whatever differs in shape."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.collectives import transport, transport_selection
from tfparallel.collectives.lost_worker import WorkerLostError, naming_lost_worker
from tfparallel.collectives.packing import size_step
from tfparallel.collectives.traffic import ROWS

ABORTED = "Graph execution error:\n\nDetected at node {}\n\nCollective ops is aborted by: {}\n"
SILENT = """Error reported from /job:worker/task:1: The following tasks are unhealthy \
(stopped sending heartbeats):
/job:worker/replica:0/task:1
The tasks have crashed."""
RESET = """recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:worker/replica:0/task:12 while calling \
/tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Connection reset by peer"}"""
NO_ANSWER = "Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/Heartbeat"


@pytest.mark.parametrize(
    ("error", "said", "worker", "reason"),
    [
        (tf.errors.UnavailableError, SILENT, 1, "stopped sending heartbeats"),
        (tf.errors.DeadlineExceededError, NO_ANSWER, 0, "no answer to a heartbeat"),
        (tf.errors.UnavailableError, RESET, 12, "Connection reset by peer"),
        (tf.errors.UnavailableError, "Socket closed", None, "Socket closed"),
        (tf.errors.DeadlineExceededError, "Deadline Exceeded", None, None),
        (tf.errors.InternalError, SILENT, None, None),
    ],
)
def test_what_tensorflow_says_of_a_lost_worker(error, said, worker, reason):
    """The words of TensorFlow 2.21, of cut links and killed workers; `heartbeat` is a layer."""
    error = error(None, None, ABORTED.format("heartbeat/MatMul", said))
    kind = type(error) if reason is None else WorkerLostError
    with pytest.raises(kind) as caught, naming_lost_worker():
        raise error
    if reason is None:
        assert caught.value is error
        return
    assert caught.value.worker == worker
    who = "another worker" if worker is None else f"worker {worker}"
    assert str(caught.value).startswith(f"The connection to {who} was lost")
    assert f"Received: {reason}. " in str(caught.value)


def test_steps_of_sizes():
    sizes = np.concatenate([np.arange(1, 5000), 2 ** np.arange(13, 31), 2 ** np.arange(13, 30) + 1])
    steps, padded = size_step(tf.constant(sizes, tf.int32))
    steps, padded = steps.numpy(), padded.numpy()
    assert (padded >= sizes).all()
    assert (padded[sizes > 4] <= 1.25 * sizes[sizes > 4]).all()
    # One step, one size; larger sizes have larger steps.
    assert len(set(steps)) == len(set(padded)) == len(set(zip(steps, padded, strict=True)))
    order = np.argsort(sizes)
    assert (np.diff(steps[order]) >= 0).all() and steps.min() == 0 and steps.max() < 120


def test_keys_are_as_many_as_shapes(workers):
    def keys(group, _):
        for length in (3, 5, 3, 5, 3):
            group.all_reduce([tf.ones([length])])
        group.all_reduce([tf.ones([3], tf.float64)])
        group.all_reduce([tf.ones([3])], "max")
        return list(group._signatures.values())

    by_worker = workers(keys, [None, None])
    assert by_worker[0] == by_worker[1] == [0, 1, 2, 3]


def test_tensors_of_a_type_travel_together(workers):
    def summed(group, scale):
        one, two, three = group.all_reduce(
            [scale * tf.ones([2, 2]), tf.constant([1, 2]), scale * tf.ones([3])]
        )
        return [one.numpy(), two.numpy(), three.numpy(), len(group._signatures)]

    for one, two, three, num_keys in workers(summed, [1.0, 3.0]):
        np.testing.assert_array_equal(one, np.full((2, 2), 4.0))
        np.testing.assert_array_equal(two, [2, 4])
        np.testing.assert_array_equal(three, np.full(3, 4.0))
        assert num_keys == 2


def test_uneven_rows_are_joined_in_the_order_of_the_workers(workers):
    def joined(group, rows):
        tensors = group.all_gather_uneven([tf.constant(rows), tf.constant(rows) > 2])
        return [tensor.numpy().tolist() for tensor in tensors]

    local_rows = [np.arange(6, dtype="float32").reshape(3, 2), np.zeros((0, 2), "float32")]
    whole = local_rows[0].tolist()
    for rows, mask in workers(joined, local_rows):
        assert rows == whole
        assert mask == (local_rows[0] > 2).tolist()


@pytest.mark.slow
def test_a_loop_takes_the_same_key_at_each_turn(workers):
    def looped(group, start):
        @tf.function
        def loop(x):
            for _ in tf.range(50):
                (x,) = group.all_reduce([x])
                x = x / 2
            return x

        return loop(tf.constant([start, 1.0])).numpy().tolist(), len(group._signatures)

    for values, num_keys in workers(looped, [1.0, 3.0]):
        assert values == [2.0, 1.0]
        assert num_keys == 1


def test_users_collectives_have_keys_of_their_own(workers):
    def keys(group, _):
        user = group.for_users
        return user._group_key != group._group_key, user._ordering_tokens is group._ordering_tokens

    assert workers(keys, [None, None]) == [(True, True)] * 2


def test_bytes_are_counted_by_what_they_are(workers):
    def sent(group, _):
        group.all_reduce([tf.ones([8])])
        group.all_gather([tf.ones([2, 3])], [2, 2], ROWS)
        return group.traffic.read()

    assert workers(sent, [None, None]) == [{"sums": 32, "slices": 0, "rows": 24}] * 2


def test_exchange(workers):
    contents = [{"name": "é", "shards": [1, 2]}, None]
    assert workers(lambda group, value: group.exchange(value, "a test"), contents) == [contents] * 2


def test_a_text_cannot_be_sent(workers):
    def send(group, _):
        with pytest.raises(ValueError, match="of type string and shape"):
            group.all_gather([tf.constant(["a"])], [1, 1])

    workers(send, [None, None])


def test_workers_agree_on_nccl_by_what_each_offers(workers, monkeypatch):
    offers = {0: {"device": "GPU:0", "gpu": "aa"}, 1: {"device": "GPU:0", "gpu": "bb"}}
    monkeypatch.setattr(transport.nccl, "offer", lambda device: offers[int(device[-1])])

    def taken(group, _):
        by_name, by_tensorflow = (transport.joined(group, name) for name in ("nccl", "tensorflow"))
        outcome = transport_selection.by_default(group)
        assert group.exchange(group.worker_index, "a test") == [0, 1]  # They are still in step.
        return [by_name.transport, by_tensorflow.transport, outcome.choice.what_runs]

    assert workers(taken, [None, None]) == [
        ["nccl", "nccl", "TensorFlow CollectiveReduceV2 (NCCL)"]
    ] * 2
    offers[1] = offers[0]

    def refused(group, _):
        try:
            transport.joined(group, "nccl")
        except ValueError as error:
            return [str(error), transport.joined(group, "tensorflow").transport]

    by_worker = workers(refused, [None, None])
    assert by_worker[0] == by_worker[1] and by_worker[0][1] == "ring_tuned"
    assert "Received: all_reduce='nccl', but workers 0 and 1 share a GPU" in by_worker[0][0]
