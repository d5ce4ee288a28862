"""TensorFlow's custom-training tutorial, exact: `reduce_gradients` and `distribute_optimizer`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

THREE = ["CPU:0", "CPU:1", "CPU:2"]
VOCABULARY, LENGTH, NUM_CLASSES = 11, 5, 3
BATCH_SIZE = 8


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.fixture(name="strategy")
def make_strategy():
    return tfparallel.MirroredStrategy(THREE)


def tokens_and_labels(num_examples=21):
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, VOCABULARY, (num_examples, LENGTH))
    return tokens, tokens.sum(1) % NUM_CLASSES


def batches():
    """Of 8, 8 and 5 examples: 3 + 3 + 2 and 2 + 2 + 1 on three replicas."""
    return tf.data.Dataset.from_tensor_slices(tokens_and_labels()).batch(BATCH_SIZE)


def build_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int64"),
            keras.layers.Embedding(VOCABULARY, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )


def mean_loss(model, tokens, labels):
    """The mean over the examples given, and the regularization losses."""
    cross_entropy = keras.losses.sparse_categorical_crossentropy(
        labels, model(tokens, training=True), from_logits=True
    )
    return tf.reduce_mean(cross_entropy) + tf.add_n(model.losses)


def train_on_one_device(optimizer, num_epochs=4):
    model = build_model()
    losses = []

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = mean_loss(model, *batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for _ in range(num_epochs):
        for batch in batches():
            losses.append(float(train_step(batch)))
    return model, losses


def train_on_replicas(strategy, make_optimizer, num_epochs=4, prepare_in_scope=True):
    """The tutorial's loop; the two lines are marked."""
    with strategy.scope():
        model = build_model()
        optimizer = make_optimizer()
        if prepare_in_scope:
            optimizer = tfparallel.distribute_optimizer(optimizer)  # 1
    if not prepare_in_scope:
        optimizer = tfparallel.distribute_optimizer(optimizer)  # 1

    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = mean_loss(model, *batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = tfparallel.reduce_gradients(gradients, weight=tf.shape(batch[0])[0])  # 2
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function(reduce_retracing=True)
    def distributed_train_step(batch):
        strategy.run(train_step, args=(batch,))

    for _ in range(num_epochs):
        for batch in strategy.experimental_distribute_dataset(batches()):
            distributed_train_step(batch)
    return model, optimizer


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "adam": lambda: keras.optimizers.Adam(
        0.01, global_clipnorm=0.2, gradient_accumulation_steps=2
    ),
    "averages": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3
    ),
}


def test_the_tutorial_with_its_own_loss(strategy):
    """`tf.nn.compute_average_loss` gives shares of the global loss: their sum is its gradient."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 4)), rng.normal(size=(6, 2))
    w = rng.normal(size=(4, 2))
    alone = tf.Variable(w)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.mean_squared_error(y, x @ alone))
    expected = tape.gradient(loss, alone)
    with strategy.scope():
        weight = tf.Variable(w)

    def step(k):
        rows = slice(2 * k, 2 * k + 2)
        with tf.GradientTape() as tape:
            per_example = keras.losses.mean_squared_error(y[rows], x[rows] @ weight)
            loss = tf.nn.compute_average_loss(per_example)
        return tfparallel.reduce_gradients([tape.gradient(loss, weight)])[0]

    for result in on_replicas(strategy, step):
        np.testing.assert_allclose(result, expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_and_slots_are_those_of_one_device(strategy, name):
    alone = OPTIMIZERS[name]()
    expected, _ = train_on_one_device(alone)
    model, optimizer = train_on_replicas(strategy, OPTIMIZERS[name])
    assert_equal(model.variables, expected.variables)
    # An accumulator's value is the sum of its copies; the other slots are equal in all.
    accumulated = {id(v) for v in getattr(optimizer, "_accumulated_gradients", ())}
    for variable, reference in zip(optimizer.variables, alone.variables, strict=True):
        copies = [copy.numpy() for copy in variable.value.values]
        if id(variable) in accumulated:
            copies = [np.sum(copies, axis=0)]
        for copy in copies:
            np.testing.assert_allclose(copy, reference.numpy(), rtol=1e-9, atol=1e-12)


def assert_equal(variables, expected):
    """float64, sums in another order, 12 steps: 1e-9 of the value, or 1e-12."""
    for variable, reference in zip(variables, expected, strict=True):
        for copy in getattr(variable.value, "values", [variable]):
            np.testing.assert_allclose(
                copy.numpy(), reference.numpy(), rtol=1e-9, atol=1e-12, err_msg=variable.path
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipnorm", "adam"])
def test_an_optimizer_may_be_prepared_outside_the_scope(strategy, name):
    expected, _ = train_on_one_device(OPTIMIZERS[name]())
    model, _ = train_on_replicas(strategy, OPTIMIZERS[name], prepare_in_scope=False)
    assert_equal(model.variables, expected.variables)


@pytest.mark.slow
def test_the_shards_sizes_matter():
    """A plain mean of the replicas' gradients differs: the test above could fail."""
    strategy = tfparallel.MirroredStrategy(THREE)
    expected, _ = train_on_one_device(OPTIMIZERS["sgd"]())
    unweighted = tfparallel.reduce_gradients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfparallel, "reduce_gradients", lambda terms, weight: unweighted(terms))
        model, _ = train_on_replicas(strategy, OPTIMIZERS["sgd"])
    with pytest.raises(AssertionError):
        assert_equal(model.variables, expected.variables)


@pytest.mark.slow
def test_gradients_that_were_not_reduced_are_refused(strategy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfparallel, "reduce_gradients", lambda gradients, weight: gradients)
        with pytest.raises(ValueError, match="5 of 5 gradients from elsewhere") as raised:
            train_on_replicas(strategy, OPTIMIZERS["adam"])
    assert "Adam was prepared by `distribute_optimizer`" in str(raised.value)
    assert "Call `reduce_gradients` right before `apply_gradients`" in str(raised.value)


@pytest.mark.slow
def test_one_gradient_changed_after_the_reduction_is_named(strategy):
    reduce_gradients = tfparallel.reduce_gradients

    def clipped_by_hand(gradients, weight):
        first, second, *rest = reduce_gradients(gradients, weight)
        return [first, tf.clip_by_norm(second, 1.0), *rest]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfparallel, "reduce_gradients", clipped_by_hand)
        with pytest.raises(ValueError, match=r"1 of 5 gradients .* \(the first has index 1\)"):
            train_on_replicas(strategy, OPTIMIZERS["sgd"])


def test_reducing_outside_a_replica_is_refused(strategy):
    with strategy.scope(), pytest.raises(RuntimeError, match="a call outside any replica"):
        tfparallel.reduce_gradients([tf.constant(1.0)])


@pytest.mark.parametrize("wrong", ["adam", None, tf.constant(1.0)])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(ValueError, match="takes a Keras optimizer. Received: "):
        tfparallel.distribute_optimizer(wrong)


# --- reduce_gradients, by numbers -------------------------------------------------------------


def on_replicas(strategy, function):
    """Runs `function(replica)` on each replica in one graph; returns what each gave."""

    @tf.function
    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            return function(int(tf.get_static_value(context.replica_id_in_sync_group)))

        return strategy.run(on_replica)

    return strategy.experimental_local_results(step())


def test_the_weighted_mean_of_small_integers(strategy):
    """G = (3·1 + 0·5 + 1·9) / 4 = 3, and of twice that 6; exact in floating point."""
    gradients, weights = [1.0, 5.0, 9.0], [3, 0, 1]

    def reduce(k):
        one = tf.constant([gradients[k]], tf.float64)
        two = tf.constant([[2 * gradients[k]], [0.0]], tf.float32)
        return tfparallel.reduce_gradients([one, None, two], weight=weights[k])

    for one, missing, two in on_replicas(strategy, reduce):
        assert missing is None
        assert (one.numpy().tolist(), one.dtype) == ([3.0], tf.float64)
        assert (two.numpy().tolist(), two.dtype) == ([[6.0], [0.0]], tf.float32)


def test_a_replica_of_weight_zero_may_hold_nan(strategy):
    """The mean over no examples is NaN, and must not spread to the others."""
    gradients, weights = [1.0, float("nan"), 9.0], [3, 0, 1]
    results = on_replicas(
        strategy,
        lambda k: tfparallel.reduce_gradients([tf.constant([gradients[k]])], weight=weights[k]),
    )
    assert [float(result[0][0]) for result in results] == [3.0] * 3


def test_sparse_gradients_stay_sparse_and_are_joined(strategy):
    rows = [[0, 2], [2], [1, 2, 2]]

    def reduce(k):
        values = tf.fill([len(rows[k]), 1], 10.0 * (k + 1))
        gradient = tf.IndexedSlices(values, tf.constant(rows[k]), tf.constant([3, 1]))
        (reduced,) = tfparallel.reduce_gradients([gradient], weight=len(rows[k]))
        assert isinstance(reduced, tf.IndexedSlices)
        return reduced.values, reduced.indices, tf.convert_to_tensor(reduced)

    for values, indices, dense in on_replicas(strategy, reduce):
        assert indices.numpy().tolist() == [0, 2, 2, 1, 2, 2]
        # Shares of 2/6, 1/6 and 3/6.
        np.testing.assert_allclose(
            values[:, 0], [10 / 3, 10 / 3, 20 / 6, 15, 15, 15], rtol=1e-6
        )
        np.testing.assert_allclose(dense[:, 0], [10 / 3, 15, 10 / 3 + 20 / 6 + 30], rtol=1e-6)


# --- all_gather -------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_gather_joins_uneven_rows_in_the_order_of_the_replicas(strategy):
    sizes = [2, 0, 3]

    def gather(k):
        return tfparallel.all_gather(tf.fill([sizes[k], 2], float(k)))

    for joined in on_replicas(strategy, gather):
        assert joined[:, 0].numpy().tolist() == [0.0, 0.0, 2.0, 2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [False, True])
def test_one_tensor_that_all_replicas_give_counts_once_for_each(strategy, is_traced):
    """TensorFlow hands it to `merge_call` as one tensor, of which there would be one replica."""
    ones = tf.ones([6])

    def step(value):
        summed = tfparallel.all_reduce(value)
        return summed, tfparallel.reduce_scatter(value), tfparallel.all_gather(value)

    def run(value):
        return strategy.run(step, [value])

    run = tf.function(run) if is_traced else run
    for summed, share, joined in zip(
        *map(strategy.experimental_local_results, run(ones)), strict=True
    ):
        assert summed.numpy().tolist() == [3.0] * 6
        assert share.numpy().tolist() == [3.0] * 2
        assert joined.numpy().tolist() == [1.0] * 18


def test_the_gradient_of_all_gather_sums_over_the_replicas(strategy):
    """J_k = (k + 1) Σ_i i·x_i over all 6 rows i: ∂ΣJ/∂x_i = (1 + 2 + 3)·i."""
    sizes = [1, 2, 3]

    def gradient(k):
        local_rows = tf.ones([sizes[k], 1])
        with tf.GradientTape() as tape:
            tape.watch(local_rows)
            joined = tfparallel.all_gather(local_rows)
            loss = (k + 1.0) * tf.reduce_sum(joined[:, 0] * tf.range(6.0))
        return tape.gradient(loss, local_rows)[:, 0]

    results = [result.numpy().tolist() for result in on_replicas(strategy, gradient)]
    assert results == [[0.0], [6.0, 12.0], [18.0, 24.0, 30.0]]


def test_a_contrastive_loss_of_the_joined_rows_is_that_of_one_device(strategy):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(7, 4))
    w = generator.normal(size=(4, 3))

    def contrast(rows):
        normal = tf.math.l2_normalize(rows, axis=1)
        similar = tf.matmul(normal, normal, transpose_b=True)
        return tf.reduce_mean(tf.reduce_logsumexp(similar, axis=1))

    alone = tf.Variable(w)
    with tf.GradientTape() as tape:
        loss = contrast(x @ alone)
    expected = tape.gradient(loss, alone)

    with strategy.scope():
        weight = tf.Variable(w)
    bounds = [0, 2, 4, 7]

    def step(k):
        with tf.GradientTape() as tape:
            loss = contrast(tfparallel.all_gather(x[bounds[k] : bounds[k + 1]] @ weight))
        # Each replica's loss is the whole loss; the sum of its gradients over replicas, which
        # all_gather takes, counts it three times, and the mean of the three shares once.
        return tfparallel.reduce_gradients([tape.gradient(loss, weight)], weight=1.0)[0]

    for result in on_replicas(strategy, step):
        np.testing.assert_allclose(result, expected, rtol=1e-12)


class Spread(keras.layers.Layer):
    """Adds a loss that compares all examples of the batch."""

    def call(self, inputs):
        rows = tfparallel.all_gather(inputs)
        self.add_loss(-keras.ops.mean(keras.ops.square(rows - keras.ops.mean(rows, axis=0))))
        return inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch_size",
    [
        6,
        7,
        9,
    ],
)
def test_a_layer_that_gathers_sees_the_batch(batch_size):
    """11 examples: 6 + 5, 7 + 4, and 9 + 2 with an idle replica."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(11, 4)), generator.normal(size=(11, 2))
    layers = keras.layers
    trained = []
    for devices in (THREE[:1], THREE):
        keras.utils.set_random_seed(3)
        model = tfparallel.data_parallel(
            lambda: keras.Sequential(
                [keras.Input((4,)), layers.Dense(3), Spread(), layers.Dense(2)]
            ),
            devices=devices,
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        trained.append(model.variables)
    assert_equal(trained[1], trained[0])


def test_outside_a_replica_all_gather_is_the_whole_batch_already(strategy):
    rows = tf.ones([3, 2])
    with strategy.scope():
        assert tfparallel.all_gather(rows) is rows


def test_tensorflows_all_reduce_refuses_a_backward_pass_of_its_own():
    """Why `all_reduce` is written anew; it fails on the day that TensorFlow's allows it."""
    strategy = tf.distribute.MirroredStrategy(
        THREE[:2], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    passes = {}

    def forward():
        context = tf.distribute.get_replica_context()
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = context.all_reduce(tf.distribute.ReduceOp.SUM, x)
        passes[int(context.replica_id_in_sync_group)] = (tape, x, y)

    def backward():
        context = tf.distribute.get_replica_context()
        tape, x, y = passes[int(context.replica_id_in_sync_group)]
        return tape.gradient(y, x)

    strategy.run(forward)
    with pytest.raises(RuntimeError, match="Mismatching ReplicaContext"):
        strategy.run(backward)


def test_an_embedding_that_is_read_once_a_batch_has_one_slice_an_index(strategy):
    table = tf.zeros((9, 2))

    def reduce(k):
        with tf.GradientTape() as tape:
            tape.watch(table)
            read = tf.gather(table, tf.range(2)) * (k + 1.0)
        (reduced,) = tfparallel.reduce_gradients([tape.gradient(read, table)])
        return reduced.values, reduced.indices

    for values, indices in on_replicas(strategy, reduce):
        assert indices.numpy().tolist() == [0, 1]
        assert values.numpy().tolist() == [[6, 6], [6, 6]]


# --- batch normalization ----------------------------------------------------------------------


def normalized_loop(strategy, synchronized, num_steps=6, batch_size=9, weighted=False):
    """Trains on batches; returns the weights, moving averages among them."""
    x = np.random.default_rng(2).normal(size=(num_steps, 9, 4)) * 3 + 1
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(synchronized=synchronized),
                keras.layers.Dense(1),
            ]
        )
        optimizer = tfparallel.distribute_optimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def step(rows):
        def on_replica(local_rows):
            with tf.GradientTape() as tape:
                squares = model(local_rows, training=True)[:, 0] ** 2
                loss = tf.nn.compute_average_loss(squares, global_batch_size=batch_size)
                if weighted:
                    loss = tf.reduce_mean(squares)
            gradients = tape.gradient(loss, model.trainable_variables)
            weight = tf.shape(local_rows)[0] if weighted else None
            gradients = tfparallel.reduce_gradients(gradients, weight)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(on_replica, args=(rows,))

    for rows in strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(x.reshape(-1, 4)).batch(batch_size, drop_remainder=True)
    ):
        step(rows)
    return model.get_weights()


def test_batch_norm_of_each_replica_is_refused_in_a_custom_loop(strategy):
    with pytest.raises(ValueError, match=r"Layer 'batch_normalization.*synchronized=True"):
        normalized_loop(strategy, synchronized=False)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "weighted"), [(9, True), (8, False)])
def test_synchronized_batch_norm_is_exact_in_a_custom_loop(strategy, batch_size, weighted):
    options = {"batch_size": batch_size, "weighted": weighted}
    one = tfparallel.MirroredStrategy(["CPU:0"])
    one = normalized_loop(one, synchronized=False, **options)
    three = normalized_loop(strategy, synchronized=True, **options)
    for expected, received in zip(one, three, strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_shared_moments_and_unequal_weights_are_refused(strategy):
    # The weights came out 1.9 off: what flows back through the moments had no weights.
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)without a weight.*\[3 3 2\]"):
        normalized_loop(strategy, synchronized=True, batch_size=8, weighted=True)



# --- an optimizer that the strategy does not know -----------------------------------------------


def loop_of_optimizer(strategy, optimizer, is_reduced):
    """A step with an optimizer as it is, on weights of the strategy."""
    with strategy.scope():
        weight = keras.Variable(np.ones(3))

    def step():
        gradients = [tf.ones(3, tf.float64)]
        if is_reduced:
            gradients = tfparallel.reduce_gradients(gradients)
        optimizer.apply(gradients, [weight])

    return weight, lambda: strategy.run(step)


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("is_distributed", [False, True])
def test_an_optimizer_made_outside_the_scope_is_refused(strategy, is_distributed, is_built):
    # TensorFlow said "Mixing different tf.distribute.Strategy objects". Of one that was built, each
    # replica updated the same slots, in silence.
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if is_distributed:
        optimizer = tfparallel.distribute_optimizer(optimizer)
    weight, step = loop_of_optimizer(strategy, optimizer, is_distributed)
    if is_built:
        optimizer.build([weight])
    with pytest.raises(ValueError, match="created outside the scope.*Received.*Create it within"):
        step()


def test_slots_made_outside_the_scope_are_made_again_with_their_values(strategy):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    weight, step = loop_of_optimizer(strategy, optimizer, True)
    optimizer.build([weight])
    optimizer.variables[-1].assign(np.arange(3.0))
    with strategy.scope():
        tfparallel.distribute_optimizer(optimizer)
    step()  # Three replicas, a gradient of 1 each.
    momentum = 0.9 * np.arange(3) - 0.1 * 3
    np.testing.assert_allclose(optimizer.variables[-1].numpy(), momentum)
    np.testing.assert_allclose(weight.numpy(), 1 + momentum)
