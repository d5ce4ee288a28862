"""Synchronized batch normalization: the global moments, stably, with one reduction a layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

THREE = ["CPU:0", "CPU:1", "CPU:2"]


def moments_only():
    """A batch normalization whose moving averages are the last batch's moments."""
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.0), keras.layers.Dense(1)]
    )


def moments_after_one_step(model, x):
    """The mean and the variance of the batch `x`, as the model saw them."""
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(x, np.zeros((len(x), 1)), batch_size=len(x), verbose=0)
    normalization = model.layers[0]
    return normalization.moving_mean.numpy(), normalization.moving_variance.numpy()


def far_from_zero(num_rows=20):
    return (1e4 + np.random.default_rng(1).normal(size=(num_rows, 3))).astype("float32")


@pytest.mark.slow
def test_a_large_mean_in_float32_is_stable():
    x = far_from_zero()
    exact = x.astype("float64")
    mean, variance = moments_after_one_step(
        tfparallel.data_parallel(moments_only, devices=THREE), x
    )
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6)
    # Deviations of 1 from a mean of 1e4 that is rounded to 1e-3: some 1e-3 of the variance.
    np.testing.assert_allclose(variance, exact.var(0), rtol=5e-3)


@pytest.mark.slow
def test_a_layer_with_synchronized_true_is_synchronized(in_float64):
    x = np.random.default_rng(2).normal(size=(6, 3))

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), *layers])

    models = [build(), tfparallel.data_parallel(build, devices=THREE)]
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, x[:, :1], batch_size=6, verbose=0)
    for one, several in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(one, several, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_the_gradient_under_a_mask_knows_keras_epsilon(in_float64):
    """Keras adds it to the number of valid steps; far from zero that shows in the gradient."""
    x = np.random.default_rng(4).normal(size=(7, 5, 2))
    x[:, 3:] = 0.0

    def build():
        keras.utils.set_random_seed(5)
        hidden = keras.layers.Dense(3, bias_initializer=keras.initializers.Constant(1e4))
        normalized = [hidden, keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5, 2)), keras.layers.Masking(), *normalized])

    models = [build(), tfparallel.data_parallel(build, devices=THREE)]
    for model in models:
        model.compile(keras.optimizers.SGD(1.0), "mse")
        model.fit(x, x[..., :1], batch_size=7, verbose=0)
    one, several = ([w for w in model.get_weights()] for model in models)
    start = build().get_weights()
    for before, expected, received in zip(start, one, several, strict=True):
        np.testing.assert_allclose(received - before, expected - before, rtol=1e-6, atol=1e-9)


def test_keras_synchronized_variance_of_a_large_mean_is_lost():
    """E[x²] − E[x]² in float32: it fails on the day that Keras takes another formula."""
    strategy = tf.distribute.MirroredStrategy(
        THREE[:2], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    x = far_from_zero()
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, synchronized=True)
        layer.build((None, 3))

    @tf.function
    def step(rows):
        return strategy.run(lambda part: layer(part, training=True), args=(rows,))

    dataset = tf.data.Dataset.from_tensors(x).unbatch().batch(len(x))
    for rows in strategy.experimental_distribute_dataset(dataset):
        step(rows)
    off = np.abs(layer.moving_variance.numpy() / x.astype("float64").var(0) - 1)
    assert off.max() > 0.5


@pytest.mark.parametrize(
    "num_rows", [1, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 3, 4)), 7]
)
def test_an_idle_replica_counts_for_nothing(num_rows, in_float64):
    x = 5 + np.random.default_rng(num_rows).normal(size=(num_rows, 3))
    mean, variance = moments_after_one_step(
        tfparallel.data_parallel(moments_only, devices=THREE), x
    )
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, x.var(0), rtol=1e-12, atol=1e-14)


def sequence_model():
    """Masked steps before batch normalization."""
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((4, 3)),
            keras.layers.Masking(0.0),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.TimeDistributed(keras.layers.Dense(2)),
        ]
    )


def image_model():
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )


def train(model, x, y):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=7, epochs=3, shuffle=False, verbose=0)
    return [(variable.path, variable.numpy()) for variable in model.variables]


@pytest.mark.slow
@pytest.mark.parametrize("shape_of", ["sequence", "image"])
def test_the_gradient_crosses_the_replicas(shape_of, in_float64):
    """16 examples in batches of 7: 2 + 2 + 3, then 0 + 1 + 1 with an idle replica."""
    generator = np.random.default_rng(4)
    if shape_of == "sequence":
        x, y = generator.normal(size=(16, 4, 3)), generator.normal(size=(16, 4, 2))
        x[generator.random((16, 4)) < 0.3] = 0.0
        build = sequence_model
    else:
        x, y = generator.normal(size=(16, 6, 6, 2)), generator.normal(size=(16, 4))
        build = image_model
    expected = train(build(), x, y)
    seen = train(tfparallel.data_parallel(build, devices=THREE), x, y)
    for (path, value), (_, expected_value) in zip(seen, expected, strict=True):
        # float64, sums in another order, nine steps.
        np.testing.assert_allclose(value, expected_value, rtol=1e-9, atol=1e-12, err_msg=path)


def forward_graph(num_layers, **arguments):
    """The graph of one call in training of a stack of batch normalizations."""

    def build():
        layers = [keras.layers.BatchNormalization() for _ in range(num_layers)]
        return keras.Sequential([keras.Input((3,)), *layers])

    model = tfparallel.data_parallel(build, devices=THREE, **arguments)
    keras.random.uniform(())  # Makes Keras's global seeds, outside the trace.

    @tf.function
    def forward(x):
        with model.strategy.program():
            return model(x, training=True)

    return forward.get_concrete_function(tf.TensorSpec((9, 3))).graph


@pytest.mark.parametrize("num_layers", [1, 3])
def test_one_exchange_a_layer(num_layers):
    # m_k and M_k, three channels each, and n_k.
    shapes = received(forward_graph(num_layers))
    assert sorted(shapes) == sorted([(3,), (3,), ()] * num_layers)


def test_no_exchange_in_the_forward_pass_of_own_moments():
    graph = forward_graph(1, synchronize_batch_norm=False)
    assert received(graph) == []
    # The two moving averages are averaged after it: that of a replica with that of those before.
    means = [each for each in graph.get_operations() if each.type == "SelectV2"]
    assert [each.outputs[0].shape.as_list() for each in means] == [[3]] * 4


def received(graph):
    """The shapes of what the first replica reads of the second one."""
    first, second = (f"/device:{name}" for name in THREE[:2])
    shapes = {
        (tensor.op.name, tensor.value_index): tuple(tensor.shape)
        for operation in graph.get_operations()
        if operation.device.endswith(first)
        for tensor in operation.inputs
        if tensor.op.device.endswith(second) and tensor.dtype == tf.float32
    }
    return [shape for shape in shapes.values() if None not in shape]
