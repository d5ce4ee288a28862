"""Replicas that each keep a share of the weights train as one device does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tfparallel
from tests.comparison import seeded
from tests.replication.test_sharded_optimizer import ACCUMULATING, OPTIMIZERS, apart
from tests.tensor_bytes import tensor_bytes
from tfparallel.problems import PlacementError
from tfparallel.replication import sharding
from tfparallel.variables.sharded import ShardedVariable

SIZE = 65  # Which neither two nor three shares divide.


@pytest.fixture(autouse=True)
def all_weights_are_large(monkeypatch):
    monkeypatch.setattr(sharding, "_FEWEST", 20)


def build(**options):
    x = keras.Input((SIZE,))
    hidden = layers.Dense(11, "tanh", **options)(x)
    hidden = layers.Dense(7, "tanh", kernel_regularizer="l2")(layers.BatchNormalization()(hidden))
    hidden = layers.Dropout(0.3, seed=3)(hidden)
    return keras.Model(x, layers.Dense(3)(hidden))


def build_convolutions():
    x = keras.Input((SIZE,))
    hidden = layers.Conv1D(6, 3, activation="relu")(layers.Reshape((13, 5))(x))
    hidden = layers.GlobalAveragePooling1D()(layers.Conv1D(5, 3)(hidden))
    return keras.Model(x, layers.Dense(3)(hidden))


def build_attention():
    x = keras.Input((SIZE,))
    hidden = layers.Reshape((13, 5))(x)
    # Whose key bias has a gradient of zero, and so rounding for values.
    hidden += layers.MultiHeadAttention(2, 4, use_bias=False)(hidden, hidden)
    hidden = layers.Dense(8, "gelu")(layers.LayerNormalization()(hidden))
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(hidden)))


def build_recurrent():
    x = keras.Input((SIZE,))
    hidden = layers.LSTM(6, return_sequences=True)(layers.Reshape((13, 5))(x))
    return keras.Model(x, layers.Dense(3)(layers.LSTM(4)(hidden)))


def build_shared():
    """A layer that is called twice, and one that reads a weight of another's."""

    class Reads(layers.Layer):
        def __init__(self, other):
            super().__init__()
            self.other = other

        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(self.other.kernel))

    x, dense, last = keras.Input((SIZE,)), layers.Dense(SIZE, "tanh"), layers.Dense(3)
    hidden = dense(dense(x))
    output = last(hidden)
    return keras.Model(x, last(Reads(last)(output)))


def build_frozen():
    model = build()
    model.layers[1].trainable = False
    return model


def build_frozen_table(**options):
    """As one of words that were trained elsewhere, before layers that are trained."""
    x = keras.Input((SIZE,))
    words = keras.ops.cast(keras.ops.abs(x) * 3, "int32") % 9
    hidden = layers.Dense(6, "tanh")(layers.Embedding(9, 4, trainable=False)(words))
    hidden = layers.GlobalAveragePooling1D()(layers.Dense(6, trainable=False)(hidden))
    return keras.Model(x, layers.Dense(3)(hidden))


def build_tables():
    """Tables of which a batch reads rows, the same rows for all examples, and the whole."""
    x = keras.Input((SIZE,))
    words = keras.ops.cast(keras.ops.abs(x) * 3, "int32")
    table, kinds = layers.ReversibleEmbedding(21, 8), layers.Embedding(3, 8)(words % 3)
    hidden = [table(words), Positions(SIZE, 8)(x), layers.Embedding(20, 8)(words), kinds]
    hidden = layers.Add()(hidden)
    logits = table(layers.Dense(8)(layers.GlobalAveragePooling1D()(hidden)), reverse=True)
    return keras.Model(x, layers.Dense(3)(logits))


class Positions(layers.Layer):
    def __init__(self, number, size):
        super().__init__()
        self.table = layers.Embedding(number, size)

    def build(self, shape):
        self.table.build()

    def call(self, x):
        return self.table(keras.ops.arange(keras.ops.shape(x)[1]))[None]


class OwnStep(keras.Model):
    """Its step clips the gradients itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def build_own():
    model = build_tables()
    return OwnStep(model.inputs, model.outputs)


def data(number=29):
    random = np.random.default_rng(0)
    return random.normal(size=(number, SIZE)), random.normal(size=(number, 3))


def on_replicas(number, function=build, **options):
    devices = [f"CPU:{index}" for index in range(number)]
    return tfparallel.data_parallel(
        lambda: seeded(function), devices=devices, shard="parameters", **options
    )


def trained(model, optimizer=None, epochs=3, callbacks=(), **options):
    optimizer = optimizer or optimizers.Adam(0.05)
    model.compile(optimizer, "mse", **options)
    if not hasattr(model, "strategy"):  # Keras builds it in each step, which begins anew.
        optimizer.build(model.trainable_variables)
    x, y = data()
    model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


def sharded(model):
    return [weight for weight in model.weights if isinstance(weight, ShardedVariable)]


MODELS = {
    "a weight that a call writes": lambda: keras.Sequential(
        [keras.Input((SIZE,)), layers.SpectralNormalization(layers.Dense(7)), layers.Dense(4)]
        + [layers.Dense(3)]
    ),
    "convolutions": build_convolutions,
    "attention": build_attention,
    "recurrent": build_recurrent,
    "weights read twice": build_shared,
    "frozen": build_frozen,
    "tables": build_tables,
    "a step of its own": build_own,
    "a constraint": lambda: build(kernel_constraint=keras.constraints.UnitNorm(axis=0)),
}


def test_it_trains_as_one_device_does(in_float64):
    model, one = trained(on_replicas(3)), trained(seeded(build))
    assert len(sharded(model)) == 3 and apart(model, one) < 1e-9
    x, y = data()
    assert model.evaluate(x, y, verbose=0) == pytest.approx(one.evaluate(x, y, verbose=0), 1e-9)
    np.testing.assert_allclose(model.predict(x, verbose=0), one.predict(x, verbose=0), 1e-9)


def test_tables_of_which_a_batch_reads_rows_are_shared_out(in_float64):
    model = trained(on_replicas(3, build_tables))
    assert {weight.shape[0] for weight in sharded(model)} >= {20, 21, SIZE}
    assert apart(model, trained(seeded(build_tables))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_frozen_table_has_no_gradient(in_float64, run_eagerly):
    """Story: a step stopped where it looked for it, which Keras took for the end of the data."""
    model = trained(on_replicas(2, build_frozen_table), run_eagerly=run_eagerly)
    one = seeded(build_frozen_table)
    before = one.get_weights()
    assert len(sharded(model)) == 3 and apart(model, trained(one)) < 1e-9
    moved = [np.abs(a - b).max() > 0 for a, b in zip(before, one.get_weights(), strict=True)]
    assert moved == [False, True, True, False, False, True, True]


@pytest.mark.slow
def test_a_sparse_input_reads_rows_of_a_share(in_float64):
    def function():
        x = keras.Input((SIZE,), sparse=True)
        return keras.Model(x, layers.Dense(3)(layers.Dense(9, "tanh")(x)))

    def fitted(model):
        model.compile(optimizers.Adam(0.05), "mse")
        model.fit(rows, epochs=2, verbose=0)
        return model

    x, y = data()
    x[np.abs(x) < 1] = 0
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    rows = rows.map(lambda x, y: (tf.sparse.from_dense(x), y))
    model = fitted(on_replicas(3, function))
    assert len(sharded(model)) == 2 and apart(model, fitted(seeded(function))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("function", [build, build_tables])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(in_float64, name, function):
    if (name, function) == ("RMSprop", build_tables):
        pytest.skip("Keras's own reads rows that are not there (centered=True)")
    if (name, function) == ("a loss scale, clipped", build_tables):
        pytest.skip("Keras's own cannot divide the gradient of a table by a scale")
    one = trained(seeded(function), OPTIMIZERS[name]())
    assert apart(trained(on_replicas(3, function), OPTIMIZERS[name]()), one) < 1e-9


def test_decay_leaves_out_a_weight_that_was_whole_when_it_was_named(in_float64):
    """Story: once sharded, the weight had another key than the one that the optimizer had noted."""
    models = []
    for is_sharded in (False, True):
        model, optimizer = seeded(build), optimizers.AdamW(0.05, weight_decay=0.3)
        optimizer.exclude_from_weight_decay([model.layers[1].kernel])
        model.compile(optimizer, "mse")
        if is_sharded:
            options = {"devices": ["CPU:0", "CPU:1"], "shard": "parameters"}
            model = tfparallel.data_parallel(model, **options)
        model.fit(*data(), batch_size=8, epochs=1, shuffle=False, verbose=0)
        models.append(model)
    assert apart(*models) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("function", [build, build_tables])
@pytest.mark.parametrize("name", ACCUMULATING)
def test_gradients_are_accumulated_in_shares(in_float64, name, function, number):
    """Those of tables to dense ones, as Keras does."""
    if (name, function) == ("a loss scale", build_tables):
        pytest.skip("Keras's own cannot divide the gradient of a table by a scale")
    one, model = seeded(function), on_replicas(number, function)
    trained(one, ACCUMULATING[name]())
    assert apart(trained(model, ACCUMULATING[name]()), one) < 1e-9
    assert sharded(model)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models(in_float64, name, number):
    model = on_replicas(number, MODELS[name])
    assert sharded(model)
    assert apart(trained(model), trained(seeded(MODELS[name]))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("function", [build, build_tables])
def test_options_of_keras(in_float64, options, function):
    model = trained(on_replicas(2, function), **options)
    one = trained(seeded(function), **options)
    assert apart(model, one) < 1e-9  # What XLA draws is XLA's own.


@pytest.mark.slow
def test_half_precision():
    """Weights travel in the type that layers compute in, gradients are summed in float32."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        whole = tfparallel.data_parallel(lambda: seeded(build_convolutions), devices=2)
        trained(whole, optimizers.SGD(0.01))
        model = trained(on_replicas(2, build_convolutions), optimizers.SGD(0.01))
    finally:
        keras.config.set_dtype_policy("float32")
    assert sharded(model) and apart(model, whole) < 1e-6


def test_a_replica_holds_its_share():
    model = on_replicas(4)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    for weight in sharded(model):
        sizes = [copy.shape.num_elements() for copy in weight.pieces]
        assert sum(sizes) < np.prod(weight.shape) + 4 * weight.shape[-1] and len(set(sizes)) == 1
        np.testing.assert_array_equal(weight.numpy(), weight.value)
    slots = [v for v in model.optimizer.variables if hasattr(v, "_sharded")]
    assert len(slots) == 2 * len(model.trainable_variables)


WIDTH, NUMBER, MIB = 512, 12, 2**20


def build_deep():
    """Twelve weights of 1 MiB."""
    hidden = [layers.Dense(WIDTH, "relu") for _ in range(NUMBER)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(3)])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [[], range(1, NUMBER)], ids=["none frozen", "most frozen"])
def test_few_weights_are_whole_at_a_time(frozen):
    """On each of two replicas; of gradients and gathered weights some are whole."""
    model = on_replicas(2, build_deep)
    for index in frozen:
        model.layers[index].trainable = False
    model.compile(optimizers.SGD(0.01), "mse", jit_compile=False)
    x, y = np.ones((4, WIDTH), "float32"), np.ones((4, 3), "float32")
    model.train_on_batch(x, y)
    before = tensor_bytes("current")
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.train_on_batch(x, y)
    # Kept until the backward pass, it would be 24. On a busy machine more are gathered ahead.
    assert (tensor_bytes("peak") - before) / MIB < 1.5 * NUMBER


class CountsMemory(keras.callbacks.Callback):
    """Counts what is held at once while callbacks behind it are called, where one begins."""

    def __init__(self):
        super().__init__()
        self.at_once = []

    def begin(self, *_):
        self.before = tensor_bytes("current")
        tf.config.experimental.reset_memory_stats("CPU:0")

    def end(self, *_):
        self.at_once.append((tensor_bytes("peak") - self.before) / MIB)

    on_train_begin = on_epoch_end = begin


def test_a_checkpoint_is_written_and_read_weight_by_weight(tmp_path):
    """Weights and two slots, of 36 MiB, are joined; as arrays they are TensorFlow's memory."""
    x, y = np.ones((4, WIDTH), "float32"), np.ones((4, 3), "float32")
    for _ in range(2):
        counts, model = CountsMemory(), on_replicas(2, build_deep)
        model.compile(optimizers.Adam(0.01), "mse", jit_compile=False)
        model.train_on_batch(x, y)  # Slots of zeros are held once by all that are equal.
        ends = keras.callbacks.LambdaCallback(on_train_begin=counts.end, on_epoch_end=counts.end)
        checkpoint = tfparallel.callbacks.Checkpoint(tmp_path)
        model.fit(x, y, epochs=2, initial_epoch=1, verbose=0, callbacks=[counts, checkpoint, ends])
        assert len(counts.at_once) == 2 - (checkpoint.resumed is not None)
        assert max(counts.at_once) < 6
    assert checkpoint.resumed


def test_values_are_those_of_the_plain_model(in_float64):
    """Weights that wait for their replicas, one that its function assigns, and such as it draws."""

    def loaded():
        model = build()
        model.layers[-1].set_weights([np.ones((7, 3)), np.zeros(3)])
        return model

    def drawn():
        # From one generator, small weights between large ones.
        x = keras.Input((9,))
        hidden = layers.Dense(2, kernel_initializer=draw)(x)
        return keras.Model(x, layers.Dense(30, kernel_initializer=draw)(hidden))

    def draw(shape, dtype=None):
        return np.random.normal(size=shape)

    for function in (build, loaded, drawn):
        model, one = on_replicas(3, function), seeded(function)
        assert sharded(model) and apart(model, one) == 0


@pytest.mark.slow
def test_files_are_of_plain_keras_and_are_read_anywhere(in_float64, tmp_path):
    whole = trained(seeded(build), epochs=2)
    first = trained(on_replicas(2), epochs=1)
    first.save(tmp_path / "first.keras")
    plain = keras.saving.load_model(tmp_path / "first.keras")
    first.save_weights(tmp_path / "first.weights.h5")
    read = on_replicas(4)
    read.load_weights(tmp_path / "first.weights.h5")
    assert apart(plain, first) == apart(read, first) == 0
    x, y = data()
    built = tfparallel.data_parallel(plain, devices=["CPU:0", "CPU:1"], shard="parameters")
    for model in (first, plain, built):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    # Dropout draws on where it was, which a file does not hold.
    assert apart(first, whole) < 1e-9 and apart(built, plain) < 1e-9
    written = tfparallel.callbacks.Checkpoint(tmp_path / "checkpoint")
    trained(on_replicas(3), epochs=1, callbacks=[written])
    for model in (on_replicas(4), tfparallel.data_parallel(lambda: seeded(build), devices=2)):
        resumed = tfparallel.callbacks.Checkpoint(tmp_path / "checkpoint")
        assert apart(trained(model, epochs=2, callbacks=[resumed]), whole) < 1e-9


def test_no_function_of_the_layers_own_reads_a_weight():
    class Traced(layers.Dense):
        @tf.function
        def call(self, x):
            return tf.matmul(x, self.kernel)

    def function():
        return keras.Sequential([keras.Input((SIZE,)), Traced(3)])

    # Within what Keras and TensorFlow make of it.
    with pytest.raises(Exception, match="read in a `tf.function` of the layer"):
        trained(on_replicas(2, function))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["a layer", "all"])
def test_weights_frozen_by_the_function_train_once_unfrozen(in_float64, frozen):
    """Story: small weights, which are made when they are frozen, never trained."""

    def function():
        model = build()
        (model if frozen == "all" else model.layers[1]).trainable = False
        return model

    def unfrozen(model):
        trained(model, epochs=1)
        model.trainable = True
        return trained(model, optimizers.SGD(0.1), epochs=1)

    assert apart(unfrozen(on_replicas(2, function)), unfrozen(seeded(function))) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_tables_are_frozen_in_turn(in_float64, run_eagerly):
    """Story: a step looked for the slices of a frozen table, and ended as if the data had.

    Nothing was trained. And an eager step joined the slices of one table as those of the other.
    """

    def function():
        x = keras.Input((SIZE,))
        words = keras.ops.cast(keras.ops.abs(x) * 3, "int32")
        hidden = layers.Add()([layers.Embedding(20, 8)(words), Positions(SIZE, 8)(x)])
        return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))

    def in_turn(model):
        tables = [each for each in model.layers if isinstance(each, layers.Embedding | Positions)]
        for frozen, other in (tables, tables[::-1]):
            frozen.trainable, other.trainable = False, True
            trained(model, epochs=1, run_eagerly=run_eagerly)
        return model

    assert apart(in_turn(on_replicas(2, function)), in_turn(seeded(function))) < 1e-9


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_gradient_that_is_given_to_a_share_itself_is_refused(run_eagerly):
    """TensorFlow takes the share for the variable of the function, and nobody would sum it."""

    class Scaled(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(SIZE)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            @tf.custom_gradient
            def function(x):
                def backward(upstream, variables):
                    return upstream, [tf.ones(v.shape, v.dtype) for v in variables]

                return self.dense(x), backward

            return function(x)

    def once():
        return keras.Sequential([keras.Input((SIZE,)), Scaled(), layers.Dense(3)])

    with pytest.raises(PlacementError, match="read inside a function under `tf.custom_gradient`"):
        trained(on_replicas(2, once, check_rows=False), run_eagerly=run_eagerly)


def test_no_call_writes_a_share():
    class Decays(layers.Dense):
        def call(self, x):
            self.kernel.assign(self.kernel * 0.9)
            return super().call(x)

    def function():
        return keras.Sequential([keras.Input((SIZE,)), Decays(3)])

    with pytest.raises(PlacementError, match="an assignment to 'sequential.*/kernel'"):
        trained(on_replicas(2, function))


def test_a_loop_of_ones_own_is_told():
    model = on_replicas(2)
    with pytest.raises(PlacementError, match="in `strategy.run`, or in a backward pass"):
        model.strategy.run(lambda: model(tf.ones((2, SIZE))))


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"sync": "local_sgd:2"}, "shard='parameters', sync='local_sgd:2'"),
        ({"shard": "gradient"}, "shard='gradient'"),
    ],
)
def test_invalid_options_raise(options, received):
    arguments = {"shard": "parameters", "devices": ["CPU:0", "CPU:1"]} | options
    with pytest.raises(ValueError, match=f"Received: {received}"):
        tfparallel.data_parallel(build, **arguments)
