"""A slice of a random tensor, drawn alone, equals that slice of the whole."""

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfparallel
from tests.comparison import seeded
from tfparallel.data.partition import row_ranges
from tfparallel.draws.replica_seeds import ReplicaSeedGenerator
from tfparallel.draws.row_draws import narrowed, uniform_of_rows
from tfparallel.extend import extend
from tfparallel.piece import Piece, working_on
from tfparallel.seams.keras import seed_generators_of

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def piece_of_rows(start, num_rows, num_global_rows, replica=0):
    return Piece(replica, 4, start, num_rows, num_global_rows)


def whole(shape, seed, dtype):
    return tf.random.stateless_uniform(shape, seed=seed, dtype=dtype).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(data=st.data())
def test_rows_equal_the_slice_of_the_whole(dtype, data):
    num_rows = data.draw(st.integers(1, 9))
    row_shape = data.draw(st.lists(st.integers(1, 5), max_size=2))
    start = data.draw(st.integers(0, num_rows - 1))
    size = data.draw(st.integers(1, num_rows - start))
    seed = data.draw(st.tuples(st.integers(0, 2**31 - 3), st.integers(0, 2**31 - 3)))
    expected = whole([num_rows, *row_shape], seed, dtype)[start : start + size]
    drawn = uniform_of_rows(
        [size, *row_shape], tf.as_dtype(dtype), tf.constant(seed, tf.int32),
        piece_of_rows(start, size, num_rows),
    )
    np.testing.assert_array_equal(drawn.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_row_far_into_the_counter(dtype):
    """Rows of 4,099 elements: each starts at another place within a step of the counter."""
    expected = whole([7, 4099], (3, 5), dtype)
    for start, size in row_ranges(7, 4):
        if size:
            drawn = uniform_of_rows(
                [size, 4099], tf.as_dtype(dtype), tf.constant([3, 5], tf.int32),
                piece_of_rows(start, size, 7),
            )
            np.testing.assert_array_equal(drawn.numpy(), expected[start : start + size])


def test_a_seed_beyond_32_bits_is_narrowed_as_keras_does():
    seed = keras.random.SeedGenerator(2**31 + 11)
    expected = keras.random.uniform((6, 3), dtype="float32", seed=seed)
    drawn = uniform_of_rows(
        [2, 3],
        tf.float32,
        narrowed(tf.constant([2**31 + 11, 0], tf.int64)),
        piece_of_rows(4, 2, 6),
    )
    np.testing.assert_array_equal(drawn, expected[4:])


class Draws(keras.layers.Layer):
    """Draws by a function of a shape and a seed."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.seed = draw, keras.random.SeedGenerator(2**40 + 11)

    def call(self, x, training=False):
        return x + self.draw(keras.ops.shape(x), self.seed)


def of_each_row(shape, seed):
    return keras.random.normal((shape[0], 1, 1), seed=seed)


def of_all_rows(shape, seed):
    return keras.ops.cast(keras.random.randint((1, *shape[1:]), 0, 99, seed=seed), "float32")


def around_each(shape, seed):
    means = keras.ops.reshape(keras.ops.arange(5.0), (1, 5, 1)) + keras.ops.ones((shape[0], 1, 1))
    return keras.random.normal(shape, means, seed=seed)


class DrawsInALoop(Draws):
    """Once for each row."""

    def call(self, x, training=False):
        return tf.map_fn(lambda row: row + keras.random.normal((5, 3), seed=self.seed), x)


class DroppingCell(keras.layers.Layer):
    """Draws for all rows at each step of a loop over time."""

    state_size = output_size = 3

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = keras.layers.Dropout(0.4, seed=3)

    def call(self, x, states, training=False):
        return self.drop(x, training=training) + states[0], [x]


class DrawsInItsGradient(Draws):
    def call(self, x, training=False):
        @tf.custom_gradient
        def noisy(x):
            return x * 1, lambda dy: dy + keras.random.normal(keras.ops.shape(x), seed=self.seed)

        return noisy(x)


class DrawsInABranch(Draws):
    """Time first, in a branch: the judge does not see where its rows are."""

    def call(self, x, training=False):
        swapped = tf.transpose(x, (1, 0, 2))
        noise = lambda: keras.random.normal(keras.ops.shape(swapped), seed=self.seed)  # noqa: E731
        noisy = tf.cond(tf.shape(x)[1] > 0, lambda: swapped + noise(), lambda: swapped)
        return tf.transpose(noisy, (1, 0, 2))


class DrawsInItsGradientByASeedOfItsCall(Draws):
    def call(self, x, training=False):
        seed = self.seed.next()

        @tf.custom_gradient
        def noisy(x):
            return x * 1, lambda dy: dy + tf.random.stateless_normal(tf.shape(dy), seed)

        return noisy(x)


class SharedNegatives(keras.layers.Layer):
    """Looks up the same random rows of its table for all examples."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(11)

    def build(self, shape):
        self.table = self.add_weight(shape=(9, 3), initializer="uniform")

    def call(self, ids):
        negatives = keras.random.randint((4,), 0, 9, seed=self.seed)
        rows = keras.ops.sum(keras.ops.take(self.table, ids, axis=0), 1)
        others = keras.ops.take(self.table, negatives, axis=0)
        return keras.ops.concatenate([rows, rows @ keras.ops.transpose(others)], -1)


class TimeFirst(keras.layers.GaussianNoise):
    def call(self, x, training=False):
        swapped = super().call(keras.ops.transpose(x, (1, 0, 2)), training=training)
        return keras.ops.transpose(swapped, (1, 0, 2))


class Folded(keras.layers.GaussianNoise):
    def call(self, x, training=False):
        flat = super().call(keras.ops.reshape(x, (-1, x.shape[-1])), training=training)
        return keras.ops.reshape(flat, keras.ops.shape(x))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.GaussianNoise(1.0, seed=5),
        lambda: keras.layers.GaussianDropout(0.4, seed=5),
        lambda: Draws(lambda shape, seed: keras.random.uniform(shape, -2.0, 3.0, seed=seed)),
        lambda: Draws(lambda shape, seed: keras.random.truncated_normal(shape, 1.0, seed=seed)),
        lambda: Draws(of_each_row),
        lambda: Draws(of_all_rows),
        lambda: Draws(around_each),
        lambda: Draws(lambda shape, seed: tf.random.stateless_normal(shape, seed.next())),
        lambda: TimeFirst(1.0, seed=5),
        lambda: Folded(1.0, seed=5),
        lambda: keras.layers.Dropout(0.4, seed=3),
        lambda: keras.layers.Dropout(0.4, noise_shape=(None, 1, 3), seed=3),
        lambda: keras.layers.Dropout(0.4, noise_shape=(1, 5, 3), seed=3),
        lambda: keras.layers.Dropout(0.4, noise_shape=(3,), seed=3),
        lambda: keras.layers.SpatialDropout1D(0.4, seed=3),
    ],
    ids=[
        *("noise", "noisy units", "uniform", "truncated", "row", "all", "means", "direct"),
        *("time first", "folded", "dropout", "dropped steps", "one mask", "short", "spatial"),
    ],
)
def test_draws_of_the_pieces_join_to_those_of_the_batch(layer):
    inputs = tf.reshape(tf.range(7.0 * 5 * 3), (7, 5, 3))
    expected = tf.function(layer())(inputs, training=True).numpy()
    rows = []
    for start, size in row_ranges(7, 3):
        part, piece = layer(), piece_of_rows(start, size, 7, start)
        extend(next(iter(seed_generators_of(part))), ReplicaSeedGenerator)

        @tf.function(input_signature=[tf.TensorSpec((None, 5, 3))])
        def call(x, part=part, piece=piece):
            with working_on(piece):
                return part(x, training=True)

        rows.append(call(inputs[start : start + size]).numpy())
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: Draws(lambda shape, seed: keras.random.gamma(shape, 2.0, seed=seed)), (5, 3)),
        (lambda: Draws(lambda shape, seed: keras.random.beta(shape, 2.0, 1.0, seed=seed)), (5, 3)),
        # The rows are on axis 1; axis 0, which is of unknown size too, looks like theirs.
        (lambda: TimeFirst(1.0, seed=5), (None, 3)),
        (lambda: DrawsInALoop(None), (5, 3)),
        (lambda: Draws(lambda shape, seed: tf.cast((seed.next() // 2)[0] ^ 5, "float32")), (5, 3)),
        (lambda: DrawsInABranch(None), (None, 3)),
        (lambda: DrawsInItsGradient(None), (5, 3)),
        (lambda: DrawsInItsGradientByASeedOfItsCall(None), (5, 3)),
    ],
    ids=[
        *("gamma", "beta", "time of any length first", "loop", "number", "branch", "gradient"),
        "gradient by a seed of the call",
    ],
)
def test_a_layer_whose_draws_cannot_be_divided_is_named(layer, shape):
    def drawn():
        model = tfparallel.data_parallel(
            lambda: keras.Sequential([keras.Input(shape), layer(), keras.layers.Dense(3)]),
            devices=["CPU:0", "CPU:1"],
        )
        model.compile("sgd", "mse")
        ones = tf.data.Dataset.from_tensors((tf.ones((4, 5, 3)), tf.zeros((4, 5, 3))))
        spec = tf.TensorSpec((None, *shape))
        ones = ones.map(lambda *xy: [tf.ensure_shape(tf.identity(part), spec.shape) for part in xy])
        of_any_size = tf.data.Dataset.from_generator(
            lambda: iter(ones), output_signature=(spec, spec)
        )
        model.fit(of_any_size, steps_per_epoch=1, shuffle=False, verbose=0)
        assert "other random values are drawn by" in model.layout.proof
        return model.history.history["loss"][0]

    keras.utils.set_random_seed(3)
    first = drawn()
    keras.utils.set_random_seed(3)
    assert drawn() == first


@pytest.mark.slow
def test_draws_in_a_loop_over_time_are_those_of_one_device(in_float64):
    x, y = np.random.default_rng(0).normal(size=(2, 7, 5, 3))

    def build():
        recurrent = keras.layers.RNN(DroppingCell(), return_sequences=True)
        return keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(3), recurrent])

    def loss(around):
        model = around(seeded(build))
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.history.history["loss"]

    one = loss(lambda model: model)
    three = loss(lambda model: tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1", "CPU:2"]))
    np.testing.assert_allclose(three, one, rtol=1e-12)


def test_an_eager_step_draws_other_numbers_on_each_replica_and_the_same_in_each_run():
    def draws():
        drawn = []
        for replica in range(3):
            noise = keras.layers.GaussianNoise(1.0, seed=5)
            extend(noise.seed_generator, ReplicaSeedGenerator)
            with working_on(piece_of_rows(2 * replica, 2, 6, replica)):
                drawn.append(noise(tf.zeros((2, 4)), training=True).numpy())
        return drawn

    first, again = draws(), draws()
    np.testing.assert_array_equal(first, again)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.all(first[one] != first[other])
    # Replica 0 draws what one device draws.
    alone = keras.layers.GaussianNoise(1.0, seed=5)(tf.zeros((2, 4)), training=True)
    np.testing.assert_array_equal(first[0], alone)


def test_keras_alone_draws_one_mask_on_every_replica():
    """The fault that this module answers; it fails on the day that Keras mends it."""
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=3)

    @tf.function
    def step():
        return strategy.run(lambda: dropout(tf.ones((4, 8)), training=True))

    first, second = strategy.experimental_local_results(step())
    np.testing.assert_array_equal(first, second)


def of_a_function(build):
    return tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])


def of_a_scope(build):
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return build()


def of_stages(build):
    return tfparallel.pipeline_parallel(build, ["CPU:0", "CPU:1"], 3, balance="memory")


def of_a_mesh(build):
    mesh = tfparallel.Mesh(data=2, pipeline=2)
    return tfparallel.hybrid_parallel(build, mesh, num_micro_batches=2, balance="memory")


@pytest.mark.parametrize(
    "form",
    [
        of_a_function,
        of_a_scope,
        pytest.param(of_stages, marks=pytest.mark.slow),
        pytest.param(of_a_mesh, marks=pytest.mark.slow),
    ],
)
def test_dropout_layers_made_outside_draw_the_masks_of_one_device(form, in_float64):
    """Their seed had one copy, which the first replica counted up before the second read it."""
    x = np.random.default_rng(0).normal(size=(7, 4, 3))

    def trained(under):
        keras.utils.set_random_seed(3)
        dropped = [keras.layers.SpatialDropout1D(0.4, seed=5), keras.layers.Dropout(0.4, seed=6)]

        def build():
            hidden = [dropped[0], keras.layers.Flatten(), dropped[1], keras.layers.Dense(2)]
            return keras.Sequential([keras.Input((4, 3)), *hidden])

        model = under(build)
        with model.distribute_strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, x[:, 0, :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for weight, expected in zip(trained(form), trained(lambda build: build()), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-12, atol=1e-14)


class DrawsByGlobalSeed(keras.layers.Layer):
    def call(self, x):
        return 0 * x + keras.random.normal(keras.ops.shape(x))


class DrawsByGenerator(keras.layers.Layer):
    """By TensorFlow's generator, which asks which replica it is in."""

    def build(self, shape):
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x):
        return 0 * x + self.generator.normal(tf.shape(x), dtype=x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("layer", [DrawsByGlobalSeed, DrawsByGenerator])
def test_replicas_draw_other_numbers_by_a_seed_of_all(layer, eagerly):
    def predicted():
        keras.utils.set_random_seed(3)
        model = tfparallel.data_parallel(
            lambda: keras.Sequential([keras.Input((2,)), layer()]), devices=["CPU:0", "CPU:1"]
        )
        model.compile(run_eagerly=eagerly)
        return model.predict(np.ones((8, 2)), batch_size=8, verbose=0)

    first = predicted()
    assert len(np.unique(first)) == first.size
    np.testing.assert_array_equal(predicted(), first)
    assert type(keras.random.SeedGenerator()) is keras.random.SeedGenerator


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_rows_of_a_table_at_random_indices_are_looked_up_once(num_replicas, in_float64):
    """Story: each replica's slices were counted, and Keras's Adam squared them one by one."""
    ids = np.random.default_rng(0).integers(0, 9, (11, 2))

    def build():
        inputs = keras.Input((2,), dtype="int32")
        return keras.Model(inputs, keras.layers.Dense(2)(SharedNegatives()(inputs)))

    def trained(model):
        model.compile(keras.optimizers.Adam(0.05), "mse")
        model.fit(ids, np.ones((11, 2)), batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    devices = [f"CPU:{index}" for index in range(num_replicas)]
    expected = trained(seeded(build))
    actual = trained(seeded(lambda: tfparallel.data_parallel(build, devices=devices)))
    for weight, same in zip(actual, expected, strict=True):
        np.testing.assert_allclose(weight, same, rtol=1e-9, atol=1e-12)
