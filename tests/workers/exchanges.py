"""What each worker of `test_exchanges.py` runs: every check, by name, in one job of 3 workers.

Rooted and personalized collectives, groups and messages. `w` is the index of the worker, W their
number; N replicas, of which k is one.
"""

import time

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.workers.collectives import NUMBERS, equal, gradient, on_replicas, seen_in


def main():
    w, W = tfparallel.worker_index(), tfparallel.num_workers()
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=300)
    strategy = tfparallel.MultiWorkerMirroredStrategy(communication_options=options)
    return seen_in(CHECKS, strategy, w, W)


def blocks(sender, num_ranks, rows=2):
    """Row block k of a sender's value is for rank k, and says so: 100 · sender + k."""
    return np.repeat([100 * sender + k for k in range(num_ranks)], rows)


# --- Between workers, eagerly -----------------------------------------------------------------


def reduce_to_the_root_alone(strategy, w, W):
    for name in NUMBERS:
        x = tf.cast([[w + 1, 2]], name)
        for root in (0, W - 1):
            for op, expected in [("sum", [W * (W + 1) / 2, 2 * W]), ("max", [W, 2])]:
                result = tfparallel.reduce(x, root, op)
                equal(result, [expected if w == root else [0, 0]], x.dtype)
    equal(tfparallel.reduce(w == 0, 1, "max"), w == 1, tf.bool)
    mean = tfparallel.reduce({"a": float(w)}, root=1, op="mean")
    equal(mean["a"], (W - 1) / 2 if w == 1 else 0.0, tf.float64)


def all_to_all_transposes(strategy, w, W):
    expected = np.repeat([100 * k + w for k in range(W)], 2)
    for name in ("float32", "int64", "float64", "int32"):
        equal(tfparallel.all_to_all(tf.constant(blocks(w, W), name)), expected, name)
    small = tf.constant([10 * w + k for k in range(W)])
    for name in NUMBERS:
        equal(tfparallel.all_to_all(tf.cast(small, name)), [10 * k + w for k in range(W)], name)
    truth = tf.constant([w == 1] * W)
    wide = {"x": tf.tile(tf.constant(blocks(w, W))[:, None, None], [1, 3, 2]), "y": truth}
    result = tfparallel.all_to_all(wide)
    equal(result["x"], np.tile(expected[:, None, None], [1, 3, 2]))
    equal(result["y"], [k == 1 for k in range(W)], tf.bool)


def scatter_from_each_root(strategy, w, W):
    for root in range(W):
        for name in ("float32", "int64", "bfloat16", "uint8", "bool"):
            x = tf.cast(blocks(w, W) % 7, name)
            expected = tf.cast([(100 * root + w) % 7] * 2, name)
            equal(tfparallel.scatter(x, root), tf.cast(expected, tf.float32).numpy(), name)


def in_a_function(strategy, w, W):
    """Of sizes that are known, and that are not; as often as it is called."""

    def collective(x):
        sums = tfparallel.reduce(x[:2], root=1)
        return tfparallel.all_to_all(x), tfparallel.scatter(x, root=2), sums

    known = tf.function(collective)
    unknown = tf.function(collective, input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    for rows in (1, 2, 5, 37):
        x = tf.tile(tf.constant(blocks(w, W, rows), tf.float32)[:, None], [1, 2])
        for function in (known, unknown):
            received, share, sums = function(x)
            equal(received[:, 1], np.repeat([100 * k + w for k in range(W)], rows))
            equal(share[:, 0], [200 + w] * rows)
            total = sum(blocks(k, W, rows)[:2] for k in range(W))
            equal(sums[:, 0], total if w == 1 else 0 * total)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"multiple of {W}, one share"):
        unknown(tf.ones([W + 1, 2]))


def gradients(strategy, w, W):
    """J_w = (w + 1) Σ a·y."""
    a = np.arange(1.0, 2 * W + 1)

    def exchanged(x):  # Share r of x goes to rank r, where it is share w of y.
        return (w + 1) * tf.reduce_sum(a * tfparallel.all_to_all(x))

    mine = a[2 * w : 2 * w + 2]
    equal(gradient(exchanged, a), np.concatenate([(r + 1) * mine for r in range(W)]))

    def scattered(x):
        return (w + 1) * tf.reduce_sum(a[:2] * tfparallel.scatter(x, root=1))

    shares = np.concatenate([(r + 1) * a[:2] for r in range(W)])
    equal(gradient(scattered, a), shares if w == 1 else 0 * shares)

    def reduced(x):  # The root's loss alone depends on it.
        return (w + 1) * tf.reduce_sum(a * tfparallel.reduce(x, root=1))

    equal(gradient(reduced, a), 2 * a)


def second_derivatives(strategy, w, W):
    """J = Σ y³ / 3 of what arrives: the gradient is x², and its sum's gradient 2 x."""
    x = tf.constant(np.arange(1.0, W + 1) + w)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(tfparallel.all_to_all(x) ** 3 / 3)
        first = inner.gradient(loss, x)
    equal(first, x.numpy() ** 2)
    equal(outer.gradient(first, x), 2 * x.numpy())


# --- In replicas ------------------------------------------------------------------------------


def replicas_exchange(strategy, w, W):
    N = strategy.num_replicas

    def exchange(k):
        x = tf.constant(blocks(k, N), tf.float32)
        return (
            tfparallel.all_to_all(x),
            tfparallel.all_to_all(tf.tile(x[:, None], [1, 3])),
            tfparallel.scatter(x, root=1),
            tfparallel.scatter(x, root=N - 1),
            tfparallel.reduce(x, root=1),
        )

    total = sum(blocks(k, N) for k in range(N))
    for k, (received, wide, share, last, sums) in on_replicas(strategy, exchange):
        equal(received, blocks(0, N) * 100 + k)
        equal(wide[:, 2], blocks(0, N) * 100 + k)
        equal(share, [100 + k] * 2)
        equal(last, [100 * (N - 1) + k] * 2)
        equal(sums, total if k == 1 else 0 * total)


def replicas_differentiate(strategy, w, W):
    N = strategy.num_replicas
    a = np.arange(1.0, N + 1)

    def gradients(k):
        return (
            gradient(lambda x: (k + 1) * tf.reduce_sum(a * tfparallel.all_to_all(x)), a),
            gradient(lambda x: (k + 1) * tf.reduce_sum(tfparallel.scatter(x, root=1)), a),
            gradient(lambda x: (k + 1) * tf.reduce_sum(a * tfparallel.reduce(x, 1)), a),
        )

    for k, (exchanged, scattered, reduced) in on_replicas(strategy, gradients):
        equal(exchanged, [(r + 1) * a[k] for r in range(N)])
        equal(scattered, a if k == 1 else 0 * a)
        equal(reduced, 2 * a)


# --- Groups -----------------------------------------------------------------------------------


def groups_of_some_workers(strategy, w, W):
    ends, all_of_them, single = (tfparallel.new_group(r) for r in ([2, 0], range(W), [1]))
    assert (ends.ranks, ends.size, repr(ends)) == ((0, 2), 2, "Group(ranks=(0, 2))")
    assert ends.rank == {0: 0, 1: None, 2: 1}[w]
    if ends.rank is not None:
        equal(tfparallel.all_reduce(w + 1, group=ends), 4)
        equal(tfparallel.all_gather(tf.fill([w + 1], w), group=ends), [0, 2, 2, 2])
        equal(tfparallel.gather([w], root=2, group=ends)[0], [0, 2] if w == 2 else [])
        equal(tfparallel.broadcast([1.0 * w], root=2, group=ends)[0], 2.0)
        equal(tfparallel.reduce(w + 1, root=2, group=ends), 4 if w == 2 else 0)
        equal(tfparallel.reduce_scatter(tf.range(4.0), group=ends), [0, 2] if w == 0 else [4, 6])
        equal(tfparallel.scatter(tf.range(4) + w, root=2, group=ends), [2, 3] if w == 0 else [4, 5])
        equal(tfparallel.all_to_all(tf.range(2) + 10 * w, group=ends), [ends.rank, 20 + ends.rank])
        large = tf.fill([300_000], float(w + 1))
        equal(tfparallel.all_reduce(large, group=ends)[-3:], [4.0] * 3)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tfparallel.all_gather(x, group=ends) ** 2)
            return tfparallel.all_reduce(tape.gradient(loss, x), "max", group=ends)

        equal(step(tf.constant([1.0 + w])), [2 * 3 * 2.0])
    # The others go on by themselves, and all meet again.
    equal(tfparallel.all_reduce(1, group=all_of_them), W)
    if single.rank is not None:
        equal(tfparallel.all_reduce(5, group=single), 5)
        equal(tfparallel.broadcast(5, root=1, group=single), 5)
        tfparallel.barrier(60, group=single)
    equal(tfparallel.all_reduce(w), W * (W - 1) / 2)


def groups_meet_at_barriers(strategy, w, W):
    ends = tfparallel.new_group([0, 2])
    if w == 1:
        return
    for _ in range(3):
        tfparallel.barrier(60, group=ends)
    start = time.time()
    if w == 2:
        time.sleep(0.5)
    arrival = time.time()
    tfparallel.barrier(60, group=ends)
    last = tfparallel.all_reduce(arrival, "max", group=ends)
    assert time.time() >= float(last) and float(last) - start >= 0.4


def mistakes_with_groups(strategy, w, W):
    messages = []

    def expect(error, call):
        with pytest.raises(error) as raised:
            call()
        messages.append(str(raised.value))

    for ranks in ([], [0, 0], [0, W], [True], [0] if w else [1]):
        expect(ValueError, lambda ranks=ranks: tfparallel.new_group(ranks))
    expect(ValueError, lambda: tfparallel.new_group([0], timeout_seconds=0))
    expect(RuntimeError, lambda: tf.function(lambda: tfparallel.new_group([0]))())
    ends = tfparallel.new_group([0, 2])
    if w == 1:
        expect(ValueError, lambda: tfparallel.all_reduce(1, group=ends))
        expect(ValueError, lambda: tfparallel.barrier(group=ends))
    else:
        expect(ValueError, lambda: tfparallel.broadcast(1, root=1, group=ends))
        expect(ValueError, lambda: tfparallel.all_reduce(tf.ones([w + 1]), group=ends))
        expect(ValueError, lambda: tfparallel.all_to_all(tf.ones([3]), group=ends))
    expect(ValueError, lambda: tfparallel.all_reduce(1, group=[0, 1]))
    # Not between replicas.
    with pytest.raises(RuntimeError, match="outside replicas.*Received: group=Group"):
        on_replicas(strategy, lambda k: tfparallel.all_reduce(1, group=ends))
    equal(tfparallel.all_reduce(1), W)
    return messages


# --- Messages ---------------------------------------------------------------------------------


def messages_arrive(strategy, w, W):
    """Round a ring, of every type, in any structure; sizes that repeat, and that do not."""
    to, origin = (w + 1) % W, (w - 1) % W
    for name in [*NUMBERS, "bool"]:
        for size in (5, 5, 1):
            x = tf.cast(tf.range(size) + w, name)
            if w % 2 == 0 and w != W - 1:
                tfparallel.send(x, to)
                y = tfparallel.recv(x, origin)
            else:
                y = tfparallel.recv(x, origin)
                tfparallel.send(x, to)
            equal(y, tf.cast(tf.cast(tf.range(size) + origin, name), tf.float32), name)
    if w == 0:
        large = tf.reshape(tf.range(600_000.0), [-1, 3])
        tfparallel.send({"a": large, "b": (2**53, [])}, dest=2, tag=7)
        tfparallel.send({"c": np.zeros([0, 4]), "d": -0.0}, dest=2)
    if w == 2:
        like = {"a": tf.TensorSpec([None, 3]), "b": (0, [])}
        second = tfparallel.recv(like, source=0, tag=7)
        equal(second["a"], np.arange(600_000.0).reshape(-1, 3), tf.float32)
        equal(second["b"][0], 2**53, tf.int64)
        first = tfparallel.recv({"c": np.zeros([0, 4]), "d": 0.0}, source=0)
        assert first["c"].shape == (0, 4) and np.signbit(first["d"].numpy())
    tfparallel.barrier(300)


def mistakes_with_messages(strategy, w, W):
    messages = []

    def expect(error, call):
        with pytest.raises(error) as raised:
            call()
        messages.append(str(raised.value))

    expect(ValueError, lambda: tfparallel.send(1, dest=w))
    expect(ValueError, lambda: tfparallel.recv(1, source=W, tag=-1, timeout_seconds=0))
    expect(ValueError, lambda: tfparallel.send("text", dest=(w + 1) % W))
    expect(RuntimeError, lambda: tf.function(lambda: tfparallel.send(1.0, dest=(w + 1) % W))())
    with pytest.raises(RuntimeError, match="outside replicas"):
        on_replicas(strategy, lambda k: tfparallel.recv(1.0, source=0))
    tfparallel.barrier(300)
    # The shapes differ: both are told.
    if w == 0:
        expect(ValueError, lambda: tfparallel.send({"x": tf.ones([2, 3])}, dest=1))
    if w == 1:
        expect(ValueError, lambda: tfparallel.recv({"x": tf.ones([3])}, source=0))
    # Nobody answers: the first message is withdrawn, and the second arrives.
    if w == 0:
        expect(RuntimeError, lambda: tfparallel.send(1.0, dest=1, timeout_seconds=1))
        tfparallel.barrier(300)
        tfparallel.send(2.0, dest=1, timeout_seconds=300)
    elif w == 1:
        tfparallel.barrier(300)
        equal(tfparallel.recv(0.0, source=0, timeout_seconds=300), 2.0)
        expect(RuntimeError, lambda: tfparallel.recv(0.0, source=2, timeout_seconds=1))
    else:
        tfparallel.barrier(300)
    equal(tfparallel.all_reduce(1), W)
    return messages


def a_group_waits_until_its_deadline(strategy, w, W):
    """Last: TensorFlow's collectives end with it."""
    ends = tfparallel.new_group([0, 2], timeout_seconds=40)
    tfparallel.barrier(300)
    message = ""
    if w == 0:
        with pytest.raises(RuntimeError) as raised:
            tfparallel.all_reduce(1.0, group=ends)  # Worker 2 never calls it.
        message = str(raised.value)
    tfparallel.barrier(300)
    return message


CHECKS = {
    check.__name__: check
    for check in [
        reduce_to_the_root_alone,
        all_to_all_transposes,
        scatter_from_each_root,
        in_a_function,
        gradients,
        second_derivatives,
        replicas_exchange,
        replicas_differentiate,
        groups_of_some_workers,
        groups_meet_at_barriers,
        mistakes_with_groups,
        messages_arrive,
        mistakes_with_messages,
        a_group_waits_until_its_deadline,
    ]
}
