"""What each worker of `test_mpi.py` runs: collectives through MPI, right and wrong."""

import os
import tempfile
import time
import traceback

import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.collectives import profile, transport_selection
from tfparallel.collectives.mpi.communicator import ALGORITHMS

BLOCK = 262_144  # Float32s of a block of shared memory.
SIZES = (0, 1, 17, 16_384, BLOCK - 1, BLOCK, 3 * BLOCK + 5)
DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


def whole_numbers(size, rank, modulus):
    return (31 * np.arange(size) + 7 * rank) % modulus


def every_algorithm_sums(group):
    """Several tensors at once, of every size, as if the workers shared no memory, too."""
    n, rank = group.num_workers, group.worker_index
    communicator = group.communicator
    shared = communicator._shared
    cases = [(name, shared) for name in ALGORITHMS] + [("mpi_ring", None)]
    for name, communicator._shared in cases:
        communicator.use(name)

        @tf.function
        def step(*tensors):
            return group.all_reduce(tensors)

        sums = step(*[tf.constant(whole_numbers(k, rank, 1000), tf.float32) for k in SIZES])
        for size, y in zip(SIZES, sums, strict=True):
            expected = sum(whole_numbers(size, other, 1000) for other in range(n))
            np.testing.assert_array_equal(y, expected, f"{name}, {size}")
    communicator._shared = shared
    communicator.use("mpi")


def every_type(group):
    n, rank = group.num_workers, group.worker_index
    for size in (100, 3 * BLOCK):
        terms = [whole_numbers(size, other, 40) - 20 for other in range(n)]
        for op, combine in (("sum", np.sum), ("max", np.max), ("min", np.min)):
            tensors = [tf.cast(terms[rank], dtype) for dtype in DTYPES]
            for dtype, y in zip(DTYPES, group.all_reduce(tensors, op), strict=True):
                assert y.dtype == dtype
                np.testing.assert_array_equal(tf.cast(y, tf.int64), combine(terms, 0))
        rows = [tf.reshape(tf.cast(terms[rank], dtype), [-1, 4]) for dtype in DTYPES]
        for y in group.all_gather(rows, [size // 4] * n):
            np.testing.assert_array_equal(tf.cast(y, tf.int64), np.reshape(terms, [-1, 4]))


def the_same_bits_everywhere(group):
    """Random numbers, whose sum depends on the order of its terms."""
    values = np.random.default_rng(group.worker_index).standard_normal(3 * BLOCK + 5)
    for name in ALGORITHMS:
        group.communicator.use(name)
        for dtype in (tf.float32, tf.bfloat16):
            (total,) = group.all_reduce([tf.cast(values, dtype)])
            digest = tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(total), 2**62)
            lowest, highest = (int(group.all_reduce([digest], op)[0]) for op in ("min", "max"))
            assert lowest == highest, f"{name}, {dtype}"
    group.communicator.use("mpi")


def other_collectives(group):
    n, rank = group.num_workers, group.worker_index
    for size in (4 * n, 3 * n * BLOCK):
        terms = [whole_numbers(size, other, 1000).astype(np.float32) for other in range(n)]
        share = slice(rank * size // n, (rank + 1) * size // n)
        results = {
            name: group.run_on_arrays(name, tf.constant(terms[rank]))
            for name in ("reduce_scatter", "broadcast", "all_to_all", "all_gather")
        }
        np.testing.assert_array_equal(results["reduce_scatter"], np.sum(terms, 0)[share])
        np.testing.assert_array_equal(results["broadcast"], terms[0])
        np.testing.assert_array_equal(
            results["all_to_all"], np.concatenate([term[share] for term in terms])
        )
        np.testing.assert_array_equal(results["all_gather"], np.concatenate(terms))


def order_in_a_function(group):
    """Two sums that do not depend on each other, in a loop: one order on all workers."""
    x = tf.Variable(tf.ones([1000]))

    @tf.function
    def steps():
        total = tf.constant(0.0)
        for _ in tf.range(20):
            a = group.all_reduce([x[:10]])[0]
            b = group.all_reduce([x])[0]
            total += a[0] + b[-1]
        return total

    for _ in range(5):
        assert float(steps()) == 40 * group.num_workers


def results_outlive_later_calls(group):
    results = [group.all_reduce([tf.fill([BLOCK], float(k))])[0] for k in range(5)]
    values = [float(y[0]) for y in results]
    assert values == [k * group.num_workers for k in range(5)]
    del results
    num_buffers = group.communicator._buffers.num_made
    for _ in range(20):
        group.all_reduce([tf.ones([BLOCK])])
    assert group.communicator._buffers.num_made == num_buffers


def the_profile_of_worker_0_decides(group):
    """For all, whatever the others have; one of another machine is refused by all."""
    tensorflow = group.by_tensorflow
    names = transport_selection.names_of(tensorflow)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TFPARALLEL_PROFILES"] = folder
        chosen = transport_selection.TransportChoice(tensorflow, calibrate=False).choose(1000)
        assert (chosen.choice.algorithm, chosen.choice.source) == ("ring_tuned", "default")
        if group.worker_index == 0:
            path = profile.save(names, {"ring_tuned": [(1000, 2e-3)], "ring": [(1000, 1e-3)]})
        chosen = transport_selection.TransportChoice(tensorflow).choose(1000)
        assert (chosen.choice.algorithm, chosen.choice.source) == ("ring", "profile")
        assert chosen.workers.transport == "ring" and "50% less time" in chosen.choice.why
        assert float(chosen.workers.all_reduce([tf.ones([3])])[0][0]) == group.num_workers
        if group.worker_index == 0:
            path.write_text(path.read_text().replace(names[0], "worker:elsewhere"))
        try:
            transport_selection.TransportChoice(tensorflow)
            raise AssertionError("A profile of another machine was taken.")
        except ValueError as error:
            assert "worker:elsewhere" in str(error)


def disagreement(group):
    """What is said where shapes, types or the order differ, with shared memory and without."""
    is_second, messages = group.worker_index == 1, []
    calls = {
        "shape": lambda: group.all_reduce([tf.ones([4 if is_second else 3])]),
        "type": lambda: group.all_reduce([tf.ones([3], tf.float64 if is_second else tf.float32)]),
        "order": lambda: group.all_reduce([tf.ones([3])], "max" if is_second else "sum"),
    }
    communicator = group.communicator
    for name in ("mpi", "mpi_library"):
        shared = communicator._shared
        if name == "mpi_library":
            communicator._shared = None
        communicator.use(name)
        for call in calls.values():
            try:
                call()
                messages.append("nothing")
            except ValueError as error:
                messages.append(str(error))
        communicator._shared = shared
        communicator.use("mpi")
    assert float(group.all_reduce([tf.constant(1.0)])[0]) == group.num_workers
    return messages


CHECKS = {
    check.__name__: check
    for check in (
        every_algorithm_sums,
        every_type,
        the_same_bits_everywhere,
        other_collectives,
        order_in_a_function,
        results_outlive_later_calls,
        the_profile_of_worker_0_decides,
        disagreement,
    )
}


def main():
    group = tfparallel.MultiWorkerMirroredStrategy(all_reduce="mpi").workers
    seen = {"transport": group.transport}
    for name, check in CHECKS.items():
        try:
            seen[name] = check(group) or "ok"
        except Exception:
            seen[name] = traceback.format_exc()
            break
    # Last: whoever was late is not waited for again.
    group.communicator._waiting.timeout_seconds = 0.5
    try:
        if group.worker_index == 1:
            time.sleep(1.5)
        else:
            group.all_reduce([tf.ones([3])])
        seen["late"] = "nothing"
    except RuntimeError as error:
        seen["late"] = str(error)
    return seen
