"""What each worker of `test_collectives.py` runs: every check, by name, in one job.

Numbers are small integers, so that each sum is exact. `w` is the index of the worker, W their
number; N replicas of K devices a worker, of which k is one.
"""

import time
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

FLOATS = ["float64", "float32", "float16", "bfloat16"]
NUMBERS = [*FLOATS, "int64", "int32", "int16", "uint8", "uint32"]


def main():
    seen = {}
    w, W = tfparallel.worker_index(), tfparallel.num_workers()
    # Before any strategy.
    try:
        tfparallel.all_reduce(1.0)
    except RuntimeError as error:
        seen["before"] = str(error)
    # So that one check that fails on one worker does not hold up the others for ever.
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=30)
    strategy = tfparallel.MultiWorkerMirroredStrategy(communication_options=options)
    seen["place"] = [w, W, tfparallel.worker_index(), tfparallel.num_workers()]
    return seen | seen_in(CHECKS, strategy, w, W)


def seen_in(checks, strategy, w, W):
    """What each check returned, "ok" for nothing; or its error, so that the others run."""
    seen = {}
    for name, check in checks.items():
        try:
            seen[name] = check(strategy, w, W) or "ok"
        except BaseException:
            seen[name] = traceback.format_exc()
    return seen


def equal(result, expected, dtype=None):
    assert isinstance(result, tf.Tensor), result
    assert dtype is None or result.dtype == dtype, (result.dtype, dtype)
    result = result.numpy() if result.dtype != tf.bfloat16 else tf.cast(result, tf.float32).numpy()
    np.testing.assert_array_equal(result, expected)


# --- Between workers, eagerly -----------------------------------------------------------------


def all_reduce_of_each_dtype(strategy, w, W):
    total = sum(range(1, W + 1))
    for name in NUMBERS:
        x = tf.cast([w + 1, 2], name)
        equal(tfparallel.all_reduce(x), [total, 2 * W], x.dtype)
        equal(tfparallel.all_reduce(x, "max"), [W, 2], x.dtype)
        equal(tfparallel.all_reduce(x, "min"), [1, 2], x.dtype)
        mean = tfparallel.all_reduce(x, "mean")
        assert mean.dtype == (x.dtype if x.dtype.is_floating else tf.float64)
        np.testing.assert_allclose(tf.cast(mean, tf.float64), [(W + 1) / 2, 2])


def truth_values(strategy, w, W):
    x = tf.constant([w == 0, True, False])
    equal(tfparallel.all_reduce(x, "max"), [True, True, False], tf.bool)
    equal(tfparallel.all_reduce(x, "min"), [False, True, False], tf.bool)
    equal(tfparallel.all_gather(w == 0), [True] + [False] * (W - 1), tf.bool)
    equal(tfparallel.broadcast(w == 1, root=1), True, tf.bool)
    with pytest.raises(ValueError, match="Cast them to int32 to count"):
        tfparallel.all_reduce(x)


def large_unsigned_integers(strategy, w, W):
    x = tf.constant([2**31 + w], tf.uint32)
    equal(tfparallel.all_reduce(x, "max"), [2**31 + W - 1])
    equal(tfparallel.broadcast(tf.constant([2**64 - 1 - w], tf.uint64)), [2**64 - 1])


def python_numbers_keep_their_bits(strategy, w, W):
    equal(tfparallel.all_reduce(2**53 if w else 1), (W - 1) * 2**53 + 1, tf.int64)
    equal(tfparallel.all_reduce(1 + 2**-50), W * (1 + 2**-50), tf.float64)
    equal(tfparallel.all_reduce(np.float32(w), "max"), W - 1, tf.float32)


def structures(strategy, w, W):
    logs = {"loss": float(w), "more": (np.array([1, w]), tf.Variable([2.0]))}
    result = tfparallel.all_reduce(logs)
    assert list(result) == ["loss", "more"] and isinstance(result["more"], tuple)
    equal(result["loss"], W * (W - 1) / 2)
    equal(result["more"][0], [W, W * (W - 1) / 2])
    equal(result["more"][1], [2.0 * W])
    keras_variable = keras.Variable([float(w)])
    equal(tfparallel.broadcast({"v": keras_variable}, root=1)["v"], [1.0])
    assert tfparallel.all_reduce({}) == {}


def all_gather_of_uneven_rows(strategy, w, W):
    joined = tfparallel.all_gather({"rows": tf.fill([w, 2], w), "one": w, "b": np.zeros((1, 3))})
    equal(joined["rows"][:, 0], [k for k in range(W) for _ in range(k)])
    equal(joined["one"], list(range(W)))
    assert joined["b"].shape == (W, 3)
    for name in NUMBERS:
        equal(tfparallel.all_gather(tf.cast([w, 7], name)), np.ravel([[k, 7] for k in range(W)]))


def gather_to_the_root_alone(strategy, w, W):
    for root in range(W):
        rows = tfparallel.gather(tf.fill([w + 1, 2], float(w)), root=root)
        expected = [float(k) for k in range(W) for _ in range(k + 1)] if w == root else []
        equal(rows[:, 0], expected, tf.float32)


def broadcast_to_the_last_bit(strategy, w, W):
    values = [-0.0, float("nan"), float("inf"), 1 / 3] if w == 1 else [float("nan"), 1.0, 2.0, 3.0]
    result = tfparallel.broadcast(tf.constant(values, tf.float64), root=1).numpy()
    assert result.tobytes() == np.array([-0.0, float("nan"), float("inf"), 1 / 3]).tobytes()


def reduce_scatter_of_equal_shares(strategy, w, W):
    x = tf.reshape(tf.range(4.0 * W), [2 * W, 2])
    equal(tfparallel.reduce_scatter(x), W * x.numpy()[2 * w : 2 * w + 2])
    equal(tfparallel.reduce_scatter(x + w, "max"), x.numpy()[2 * w : 2 * w + 2] + W - 1)
    with pytest.raises(ValueError, match=rf"multiple of {W}.* Received: shape \({W + 1}, 2\)"):
        tfparallel.reduce_scatter(tf.ones([W + 1, 2]))


def gradients_in_shares(strategy, w, W):
    """Of several types, one of them larger than what a transport sends at once."""
    generator = np.random.default_rng(0)
    large = generator.integers(-9, 9, size=(W, W * 200_000, 2)).astype("float32")
    small = generator.integers(-9, 9, size=(W, 3 * W))

    @tf.function
    def in_graph(tensors):
        return strategy.workers.reduce_scatter(tensors)

    tensors = [tf.constant(large[w])]
    tensors += [tf.constant(small[w], dtype) for dtype in (tf.float32, tf.float64, tf.bfloat16)]
    for function in (strategy.workers.reduce_scatter, in_graph):
        first, *others = function(tensors)
        equal(first, large.sum(0)[w * 200_000 : (w + 1) * 200_000])
        for share, tensor in zip(others, tensors[1:], strict=True):
            equal(share, small.sum(0)[3 * w : 3 * w + 3], tensor.dtype)


def in_a_function(strategy, w, W):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def collective(x):
        return (
            tfparallel.all_reduce(x[:2]),
            tfparallel.all_gather(x),
            tfparallel.gather(x, root=1),
            tfparallel.broadcast(x[:2], root=1),
            tfparallel.reduce_scatter(tf.ones([W])),
        )

    for _ in range(2):
        total, joined, gathered, sent, share = collective(tf.fill([w + 2], float(w)))
        equal(total, [W * (W - 1) / 2] * 2)
        everyone = [float(k) for k in range(W) for _ in range(k + 2)]
        equal(joined, everyone)
        equal(gathered, everyone if w == 1 else [])
        equal(sent, [1.0, 1.0])
        equal(share, [W])


# --- Gradients between workers ----------------------------------------------------------------


def gradient(function, x):
    x = tf.constant(x, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = function(x)
    return tape.gradient(loss, x)


def gradients_of_sums(strategy, w, W):
    """J_w = (w + 1) Σ a·y, and so ∂ΣJ/∂x_w = Σ_w (w + 1) · a for a sum, a W-th of it for a mean."""
    a, weights = np.array([1.0, 2.0]), W * (W + 1) / 2

    def loss(op):
        return lambda x: (w + 1) * tf.reduce_sum(a * tfparallel.all_reduce(x, op))

    equal(gradient(loss("sum"), [3.0, w]), weights * a)
    np.testing.assert_allclose(gradient(loss("mean"), [3.0, w]), weights * a / W, rtol=1e-15)
    # Element 0 ties on all workers; the maximum of element 1 is the last worker's alone.
    share = [1 / W, 1.0 if w == W - 1 else 0.0]
    np.testing.assert_allclose(gradient(loss("max"), [3.0, w]), weights * a * share, rtol=1e-15)
    share = [1 / W, 1.0 if w == 0 else 0.0]
    np.testing.assert_allclose(gradient(loss("min"), [3.0, w]), weights * a * share, rtol=1e-15)


def gradients_of_a_structure(strategy, w, W):
    x, y = tf.constant(1.0), tf.constant([2.0])
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        sums = tfparallel.all_reduce({"x": x, "y": y, "n": 3})
        loss = 5 * tf.reduce_sum(sums["y"])
    assert [g if g is None else g.numpy().tolist() for g in tape.gradient(loss, [x, y])] == [
        None,
        [5.0 * W],
    ]


def gradients_of_the_rest(strategy, w, W):
    def rows(x):  # J_w = (w + 1) Σ_i i·y_i over the joined rows
        y = tfparallel.all_gather(x)
        return (w + 1) * tf.reduce_sum(y * tf.range(tf.shape(y)[0], dtype=tf.float64))

    weights, first = W * (W + 1) / 2, sum(k + 1 for k in range(w))
    equal(gradient(rows, np.ones(w + 1)), weights * np.arange(first, first + w + 1))

    def gathered(x):  # The root's loss alone depends on it.
        return 3 * tf.reduce_sum(tfparallel.gather(x, root=1))

    equal(gradient(gathered, np.ones(w + 1)), [3.0] * (w + 1))

    def sent(x):
        return (w + 1) * tf.reduce_sum(tfparallel.broadcast(x, root=1))

    equal(gradient(sent, [1.0, 2.0]), [weights] * 2 if w == 1 else [0.0, 0.0])

    def scattered(x):  # ∂ΣJ/∂x: the weight of the worker that receives the row.
        return (w + 1) * tf.reduce_sum(tfparallel.reduce_scatter(x))

    equal(gradient(scattered, np.ones(W)), np.arange(1.0, W + 1))


def second_derivatives(strategy, w, W):
    """J = y³ / 3 with y = Σ x_w, on each worker: the gradient is W y², and that again 2 W² y."""
    x = tf.constant(2.0, tf.float64)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tfparallel.all_reduce(x) ** 3 / 3
        first = inner.gradient(loss, x)
    equal(first, W * (2.0 * W) ** 2)
    equal(outer.gradient(first, x), 2 * W**2 * (2.0 * W))


def contrast(rows):
    normal = tf.math.l2_normalize(rows, axis=1)
    similar = tf.matmul(normal, normal, transpose_b=True)
    return tf.reduce_mean(tf.reduce_logsumexp(similar, axis=1))


def batch_and_weight():
    generator = np.random.default_rng(0)
    return generator.normal(size=(11, 4)), generator.normal(size=(4, 3))


def contrastive_gradient_of_one_device():
    x, start = batch_and_weight()
    alone = tf.constant(start)
    with tf.GradientTape() as tape:
        tape.watch(alone)
        loss = contrast(x @ alone)
    return tape.gradient(loss, alone)


def contrastive_loss_between_workers(strategy, w, W):
    """Each worker has its own rows, and the gradient of the whole batch; no `strategy.run`."""
    x, start = batch_and_weight()
    weight = tf.Variable(start)
    bounds = [11 * k // W for k in range(W + 1)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = contrast(tfparallel.all_gather(x[bounds[w] : bounds[w + 1]] @ weight))
        # Every worker's J_w is the whole loss, so Σ J counts it W times: the mean counts once.
        return tfparallel.all_reduce(tape.gradient(loss, weight), "mean")

    np.testing.assert_allclose(step(), contrastive_gradient_of_one_device(), rtol=1e-12)


# --- In replicas ------------------------------------------------------------------------------


def on_replicas(strategy, function):
    """Runs `function(k)` on each replica in a graph; returns what each of this worker gave."""

    @tf.function
    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            return function(int(tf.get_static_value(context.replica_id_in_sync_group)))

        return strategy.run(on_replica)

    first = strategy.first_replica
    return list(enumerate(strategy.experimental_local_results(step()), first))


def replicas_reduce(strategy, w, W):
    N = strategy.num_replicas
    total = N * (N + 1) // 2
    for name in NUMBERS:
        for op, expected in [("sum", total), ("max", N), ("min", 1)]:
            results = on_replicas(
                strategy, lambda k, a=name, b=op: tfparallel.all_reduce(tf.cast([k + 1], a), b)
            )
            assert len(results) == N // W
            for _, result in results:
                equal(result, [expected], tf.as_dtype(name))
    for _, result in on_replicas(strategy, lambda k: tfparallel.all_reduce(float(k), "mean")):
        equal(result, (N - 1) / 2, tf.float64)
    for _, result in on_replicas(strategy, lambda k: tfparallel.all_reduce([k == 1, True], "min")):
        equal(tf.stack(result), [False, True])


def replicas_join(strategy, w, W):
    N = strategy.num_replicas
    expected = [float(k) for k in range(N) for _ in range(k)]
    for k, result in on_replicas(
        strategy,
        lambda k: (
            tfparallel.all_gather(tf.fill([k], float(k))),
            tfparallel.gather(tf.fill([k], float(k)), root=1),
            tfparallel.broadcast(tf.constant([10.0 * k, k]), root=1),
            tfparallel.reduce_scatter(tf.range(2.0 * N)),
            tfparallel.all_gather(k == 1),
        ),
    ):
        joined, gathered, sent, share, truth = result
        equal(joined, expected)
        equal(gathered, expected if k == 1 else [])
        equal(sent, [10.0, 1.0])
        equal(share, [2.0 * k * N, (2.0 * k + 1) * N])
        equal(truth, [j == 1 for j in range(N)])


def replicas_differentiate(strategy, w, W):
    N = strategy.num_replicas
    weights, a = N * (N + 1) / 2, np.array([1.0, 2.0])

    def reduced(op):
        def function(k):
            return gradient(
                lambda x: (k + 1) * tf.reduce_sum(a * tfparallel.all_reduce(x, op)), [3.0, k]
            )

        return on_replicas(strategy, function)

    for _, result in reduced("sum"):
        equal(result, weights * a)
    for k, result in reduced("max"):
        share = [1 / N, 1.0 if k == N - 1 else 0.0]
        np.testing.assert_allclose(result, weights * a * share, rtol=1e-15)

    def rows(k):
        def loss(x):
            y = tfparallel.all_gather(x)
            return (k + 1) * tf.reduce_sum(y * tf.range(tf.shape(y)[0], dtype=tf.float64))

        return gradient(loss, np.ones(k + 1))

    for k, result in on_replicas(strategy, rows):
        first = k * (k + 1) / 2
        equal(result, weights * np.arange(first, first + k + 1))


def contrastive_loss_in_a_custom_loop(strategy, w, W):
    x, start = batch_and_weight()
    N = strategy.num_replicas
    bounds = [11 * k // N for k in range(N + 1)]
    with strategy.scope():
        weight = tf.Variable(start)

    def step(k):
        with tf.GradientTape() as tape:
            loss = contrast(tfparallel.all_gather(x[bounds[k] : bounds[k + 1]] @ weight))
        return tfparallel.reduce_gradients([tape.gradient(loss, weight)], weight=1.0)[0]

    expected = contrastive_gradient_of_one_device()
    for _, result in on_replicas(strategy, step):
        np.testing.assert_allclose(result, expected, rtol=1e-12)


# --- Called by Keras --------------------------------------------------------------------------


class Spread(keras.layers.Layer):
    """Adds a loss that compares all examples of the batch, and one that averages over replicas."""

    def call(self, inputs):
        rows = tfparallel.all_gather(inputs)
        self.add_loss(-keras.ops.mean(keras.ops.square(rows - keras.ops.mean(rows, axis=0))))
        total = tfparallel.all_reduce(keras.ops.sum(inputs))
        top = tfparallel.all_reduce(keras.ops.max(inputs), "max")
        self.add_loss(0.1 * keras.ops.square(total / 10) + 0.1 * top)
        return inputs


def mean_square_of_the_batch(y, prediction):
    """A loss outside a replica: the values are the global batch's."""
    assert tfparallel.all_reduce(prediction) is prediction
    return keras.ops.mean(keras.ops.square(tfparallel.all_gather(y) - prediction), axis=-1)


class Rendezvous(keras.callbacks.Callback):
    """A callback is the worker's own."""

    seen = None

    def on_epoch_end(self, epoch, logs=None):
        self.seen = tfparallel.all_gather(tfparallel.worker_index()).numpy().tolist()


def in_keras_the_batch_is_whole(strategy, w, W):
    """11 examples in batches of 6 and of 9: with idle replicas, too."""
    keras.config.set_floatx("float64")
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(11, 4)), generator.normal(size=(11, 2))

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((4,)), keras.layers.Dense(3), Spread(), keras.layers.Dense(2)]
        return keras.Sequential(layers)

    def fit(model, batch_size, **kwargs):
        model.compile(keras.optimizers.SGD(0.1), mean_square_of_the_batch)
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, epochs=2, **kwargs)
        return [v.numpy() for v in model.variables]

    for batch_size in (6, 9, 10):
        model, callback = tfparallel.data_parallel(build, strategy), Rendezvous()
        actual = fit(model, batch_size, callbacks=[callback])
        assert callback.seen == list(range(W))
        if w == 0:
            # One device, in the middle of a job: plain Keras waits for nobody.
            for one, other in zip(fit(build(), batch_size), actual, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
            model(x)
        tfparallel.barrier(60)
    keras.config.set_floatx("float32")


# --- Mistakes ---------------------------------------------------------------------------------


def workers_that_disagree(strategy, w, W):
    messages = []
    for call in [
        lambda: tfparallel.all_reduce(tf.ones([3 + (w == 1)])),
        lambda: tfparallel.all_reduce(np.ones(3, "float32" if w else "float64")),
        lambda: tfparallel.all_reduce({"loss" if w else "acc": 1.0}),
        lambda: tfparallel.all_gather(tf.ones([w, 2 + (w == 1)])),
        lambda: tfparallel.all_reduce(1.0, "sum" if w else "mean"),
        lambda: tfparallel.broadcast(1.0, root=w % 2),
        lambda: tfparallel.all_reduce(1.0) if w else tfparallel.all_gather(1.0),
        lambda: tfparallel.all_reduce("a" if w == 1 else 1.0),
    ]:
        with pytest.raises(ValueError) as raised:
            call()
        messages.append(str(raised.value))
    # The job goes on.
    equal(tfparallel.all_reduce(1), W)
    return messages


def what_cannot_be_sent(strategy, w, W):
    messages = []
    for call in [
        lambda: tfparallel.all_reduce("text"),
        lambda: tfparallel.all_reduce(1.0, op="average"),
        lambda: tfparallel.broadcast(1.0, root=W),
        lambda: tfparallel.gather(1.0, root=True),
        lambda: tfparallel.all_reduce({"a": None, "b": tf.constant(1j)}),
        lambda: tfparallel.all_reduce(2**64),
        lambda: tfparallel.reduce_scatter(1.0),
        lambda: tfparallel.barrier(0),
    ]:
        with pytest.raises(ValueError) as raised:
            call()
        messages.append(str(raised.value))
    with pytest.raises(RuntimeError, match="outside any `tf.function`"):
        tf.function(tfparallel.barrier)()
    return messages


def a_barrier_waits(strategy, w, W):
    """The last comes 0.5 s after the others, and nobody leaves before it has come."""
    tfparallel.barrier(60)
    start = time.time()
    if w == W - 1:
        time.sleep(0.5)
    arrival = time.time()
    tfparallel.barrier(60)
    last = tfparallel.all_reduce(arrival, "max")
    assert time.time() >= float(last) and float(last) - start >= 0.4


def a_barrier_names_who_is_missing(strategy, w, W):
    tfparallel.barrier(60)
    if w == 1:
        time.sleep(4)  # It does something else, for longer than the others wait.
    with pytest.raises(RuntimeError) as raised:
        tfparallel.barrier(0.5)
    message = str(raised.value)
    tfparallel.barrier(60)
    return message


def the_layout_names_every_device(strategy, w, W):
    layout, per_worker = strategy.layout, len(strategy.devices)
    assert layout.mesh.data == W * per_worker
    assert layout.device(data=strategy.first_replica) == f"/job:worker/task:{w}/device:CPU:0"
    assert layout.devices[-1] == f"/job:worker/task:{W - 1}/device:CPU:{per_worker - 1}"
    assert layout.reduction.startswith("all-reduce by "), layout.reduction


CHECKS = {
    check.__name__: check
    for check in [
        all_reduce_of_each_dtype,
        truth_values,
        large_unsigned_integers,
        python_numbers_keep_their_bits,
        structures,
        all_gather_of_uneven_rows,
        gather_to_the_root_alone,
        broadcast_to_the_last_bit,
        reduce_scatter_of_equal_shares,
        gradients_in_shares,
        in_a_function,
        gradients_of_sums,
        gradients_of_a_structure,
        gradients_of_the_rest,
        second_derivatives,
        contrastive_loss_between_workers,
        replicas_reduce,
        replicas_join,
        replicas_differentiate,
        contrastive_loss_in_a_custom_loop,
        in_keras_the_batch_is_whole,
        the_layout_names_every_device,
        workers_that_disagree,
        what_cannot_be_sent,
        a_barrier_waits,
        a_barrier_names_who_is_missing,
    ]
}
