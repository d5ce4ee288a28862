"""A function that is traced with the first micro-batch, and called for all."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.data.partition import row_ranges
from tfparallel.piece import Piece, of_any_number
from tfparallel.pipeline.traced_once import TracedOnce
from tfparallel.tracing.provenance import made_of

NUM_MICRO_BATCHES = 3


def pieces_of(num_rows):
    ranges = row_ranges(num_rows, NUM_MICRO_BATCHES)
    return [
        Piece(m, NUM_MICRO_BATCHES, start, size, num_rows) for m, (start, size) in enumerate(ranges)
    ]


def called(function, x, weights=()):
    """What the function returns of each micro-batch's rows of `x`, in a step that is traced."""

    @tf.function(autograph=False)
    def step(x):
        pieces = pieces_of(x.shape[0])
        once = TracedOnce(function, pieces, weights)
        return [once([of_any_number(piece.rows(x))], piece) for piece in pieces]

    return step(tf.constant(x))


@pytest.mark.parametrize("num_rows", [6, 7])
def test_it_is_traced_once_and_told_of_each_micro_batch(num_rows):
    traced = []

    def function(tensors, piece):
        traced.append(piece.num_rows)
        num_rows = tf.convert_to_tensor(piece.num_rows)
        return [tensors[0] * 2.0, piece.replica, piece.start, num_rows], [0]

    x = np.arange(num_rows, dtype="float32")
    results = called(function, x)
    np.testing.assert_array_equal(np.concatenate([result[0] for result in results]), 2 * x)
    pieces = [tuple(int(each) for each in result[1:]) for result in results]
    assert pieces == [(piece.replica, piece.start, piece.num_rows) for piece in pieces_of(num_rows)]
    assert len(traced) == 1
    assert (traced[0] == 2) if num_rows == 6 else tf.is_tensor(traced[0])


def test_none_and_masks_pass_in_and_out():
    def function(tensors, piece):
        x, nothing = tensors
        assert nothing is None
        doubled = tf.identity(x)
        doubled._keras_mask = tf.logical_not(x._keras_mask)
        return [doubled, None], [0]

    @tf.function(autograph=False)
    def step(x):
        pieces = pieces_of(6)
        once = TracedOnce(function, pieces)
        masks = []
        for piece in pieces:
            rows = piece.rows(x)
            rows._keras_mask = rows > 2.0
            output, nothing = once([rows, None], piece)
            assert nothing is None
            masks.append(output._keras_mask)
        return tf.concat(masks, 0)

    np.testing.assert_array_equal(step(tf.range(6.0)), np.arange(6) <= 2)


def test_what_an_argument_was_made_of_is_known_inside():
    sources = []

    def function(tensors, piece):
        sources.extend(made_of(tensor) for tensor in tensors)
        return [tensors[0]], []

    @tf.function(autograph=False)
    def step(x):
        pieces = pieces_of(6)
        TracedOnce(function, pieces)([pieces[0].rows(x), tf.range(tf.shape(x)[1])], pieces[0])

    step(tf.ones((6, 2)))
    of_rows, constant = sources
    assert of_rows
    assert not constant


def test_what_is_no_target_has_no_gradient():
    kernel, other, gradients = tf.Variable(2.0), tf.Variable(3.0), []

    def function(tensors, piece):
        (x,) = tensors
        return [x * kernel, tf.math.log(x * other), tf.cast(x, tf.int32)], [0, 2]

    @tf.function(autograph=False)
    def step(x):
        pieces = pieces_of(6)
        once = TracedOnce(function, pieces)
        with tf.GradientTape() as tape:
            product, logarithm, _ = once([pieces[0].rows(x)], pieces[0])
        assert once.targets == {0}
        gradients.extend(tape.gradient([product, logarithm], [kernel, other]))
        return gradients[0]

    assert float(step(tf.range(6.0))) == 0.0 + 1.0  # No 0 · ∞ of the logarithm's.
    assert gradients[1] is None


def test_tensorflow_takes_zeros_for_the_gradient_of_what_nobody_uses():
    """Why results are cut off: a gradient of `other` is None, and not 0 · ∞."""
    kernel, other, gradients = tf.Variable(2.0), tf.Variable(0.0), []
    function = tf.function(lambda x: (x * kernel, tf.math.log(x * other)), autograph=False)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            product, _ = function(x)
        gradients.append(tape.gradient(product, other))
        return gradients[0]

    step(tf.constant(1.0))
    assert gradients[0] is not None


@pytest.mark.parametrize("is_constant", [True, False])
def test_tensorflow_makes_another_function_for_each_call_with_constants(is_constant):
    """Why the index of a micro-batch is none: three calls draw the same numbers, and cost three."""
    draw = tf.function(
        lambda index: tf.random.uniform([4]) + tf.cast(index, tf.float32) * 0.0,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )

    @tf.function(autograph=False)
    def step():
        indices = [tf.constant(index) for index in range(3)]
        if not is_constant:
            indices = [tf.compat.v1.placeholder_with_default(index, []) for index in indices]
        return [draw(index) for index in indices]

    first, *others = step()
    assert [bool(tf.reduce_all(first == other)) for other in others] == [is_constant] * 2


@tf.function(autograph=False)
def looked_up_twice(table, tokens):
    return tf.gather(table, tokens) + tf.gather(table, tf.range(2))


@tf.custom_gradient
def handed_on(table):
    return tf.identity(table), lambda upstream: upstream


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, tokens: tf.gather(table, tokens) + tf.gather(table, tf.range(2)),
        lambda table, tokens: looked_up_twice(tf.convert_to_tensor(table), tokens),
        lambda table, tokens: tf.gather(tf.concat([table, 2 * table], 0), tokens),
        lambda table, tokens: tf.gather(handed_on(table), tokens) + tf.gather(table, tf.range(2)),
        lambda table, tokens: tf.gather(table, tokens) @ tf.transpose(table[:2]),
        lambda table, tokens: tf.py_function(tf.gather, [table, tokens], tf.float32),
        lambda table, tokens: tf.nn.dropout(tf.gather(table, tokens), 0.5),
    ],
    ids=["twice", "in a function", "joined", "handed on", "tied", "python", "a draw"],
)
def test_what_computes_something_else_in_a_function_is_traced_for_each(look_up):
    table, traced = tf.Variable(np.ones((5, 2), "float32")), []

    def function(tensors, piece):
        traced.append(piece.replica)
        return [look_up(table, tensors[0])], [0]

    called(function, np.zeros((6, 2), "int32"), [table])
    assert traced[-NUM_MICRO_BATCHES:] == list(range(NUM_MICRO_BATCHES))


@pytest.mark.parametrize(
    "call",
    [
        lambda kernel, x: tf.nn.relu(x @ kernel) @ kernel,
        lambda kernel, x: tf.gather(x @ kernel, [0, 0]),
        lambda kernel, x: tf.gather(kernel, tf.cast(x[:, 0], tf.int32) * 0),
        lambda kernel, x: tf.scan(lambda h, _: h @ kernel, tf.range(2), x),
    ],
    ids=["dense twice", "a gathered product", "one look-up", "a loop"],
)
def test_other_weights_are_in_a_function(call):
    kernel, traced = tf.Variable(np.eye(2, dtype="float32")), []

    def function(tensors, piece):
        traced.append(piece.replica)
        return [call(kernel, tensors[0])], [0]

    called(function, np.ones((6, 2), "float32"), [kernel])
    assert len(traced) == 1


def test_its_graph_is_given_free():
    graphs = []

    def function(tensors, piece):
        graphs.append(weakref.ref(tensors[0].graph))
        return [tensors[0] * 2.0], [0]

    called(function, np.arange(6.0))
    gc.collect()
    assert [graph() for graph in graphs] == [None]


# In a pipeline, against one device: the second stage begins with the layer 'second'.


class Positions(layers.Layer):
    """A weight for each place, the same for all examples."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(1, *shape[1:]))

    def call(self, inputs):
        return self.table


class Scale(layers.Layer):
    """A constant that the layer has held since before any graph."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = tf.constant(np.arange(4.0)[None, None])

    def call(self, inputs):
        return self.scale


class Tied(layers.Layer):
    """Reads one table by tokens and by places: two kinds of sparse gradients."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(9, 4))

    def call(self, tokens):
        places = keras.ops.arange(keras.ops.shape(tokens)[1])
        return keras.ops.take(self.table, tokens, 0) + keras.ops.take(self.table, places, 0)


class Sines(layers.Layer):
    """Python computes them, and their gradient."""

    def call(self, inputs):
        sines = tf.py_function(tf.sin, [inputs], inputs.dtype)
        sines.set_shape(inputs.shape)
        return sines

    def compute_output_shape(self, shape):
        return shape


class Contrast(layers.Layer):
    """TensorFlow has no gradient of it."""

    def call(self, inputs):
        return tf.image.adjust_contrast(inputs[..., None], 2.0)[..., 0]

    def compute_output_shape(self, shape):
        return shape


class Swapped(layers.Layer):
    """Puts another axis first, and the examples behind it."""

    def call(self, inputs):
        return keras.ops.transpose(inputs, (1, 0, 2))

    def compute_output_shape(self, shape):
        return (shape[1], shape[0], shape[2])


class Spectrum(layers.Layer):
    """Complex numbers."""

    def call(self, inputs):
        return tf.signal.fft(tf.cast(inputs, tf.complex128))

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, "complex128")


class Real(layers.Layer):
    """The real parts."""

    def call(self, inputs):
        return tf.math.real(inputs)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, "float64")


class Angles(layers.Layer):
    """Of each place with itself: 0, where the arc cosine is infinitely steep."""

    def call(self, inputs):
        unit = inputs / tf.norm(inputs, axis=-1, keepdims=True)
        return tf.acos(tf.minimum(tf.reduce_sum(unit * tf.stop_gradient(unit), -1), 1.0))


class Stopped(layers.Layer):
    """Stops the gradient in a function of its own."""

    def call(self, inputs):
        return tf.function(tf.stop_gradient, autograph=False)(inputs)

    def compute_output_shape(self, shape):
        return shape


def ends(x, **others):
    used = layers.Dense(3, name="used")(x)
    return {"used": used, **others}


def dropped_constant(inputs):
    x, positions = layers.Dense(4)(inputs), Positions()(inputs)
    x = layers.Dense(4, name="second")(x)
    return ends(layers.Add()([x, layers.Dropout(0.5)(positions)]))


def held_constant(inputs):
    x, scale = layers.Dense(4)(inputs), Scale()(inputs)
    return ends(layers.Multiply()([layers.Dense(4, name="second")(x), scale]))


def another_axis_first(inputs):
    x = Swapped()(layers.Dense(4)(inputs))
    return ends(Swapped()(layers.Dense(4)(layers.Dropout(0.5, name="second")(x))))


def another_axis_first_inside(inputs):
    x = layers.Dense(4, name="second")(layers.Dense(4)(inputs))
    return ends(Swapped()(layers.Dropout(0.5)(Swapped()(x))))


def complex_numbers(inputs):
    x = Spectrum()(layers.Dense(4)(inputs))
    return ends(Real(name="second")(x))


def unused_head(inputs):
    x = layers.Dense(4, name="second")(layers.Dense(4)(inputs))
    return ends(x, unused=layers.Dense(3)(x))


def unused_steep_head(inputs):
    x = layers.Dense(4)(inputs)
    return ends(layers.Dense(4, name="second")(x), unused=Angles()(x))


def unused_head_of_what_is_stopped(inputs):
    x = layers.Dense(4)(inputs)
    y = layers.Dense(4, name="second")(x)
    return ends(layers.Add()([layers.Dense(4)(x), Stopped()(y)]), unused=y)


def computed_by_python(inputs):
    x = Sines()(layers.Dense(4)(inputs))
    return ends(Sines()(layers.Dense(4, name="second")(x)))


def without_a_gradient(inputs):
    return ends(layers.Dense(4, name="second")(layers.Dense(4)(Contrast()(inputs))))


def read_in_a_closure(inputs):
    first = layers.Dense(4, use_bias=False)
    x = layers.Dense(4, name="second")(first(inputs))
    return ends(layers.Lambda(lambda t: t @ first.kernel, output_shape=(3, 4))(x))


def read_twice(inputs):
    return ends(layers.Dense(4, name="second")(Tied()(inputs)))


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
# 2 and 3 rows a micro-batch, or 3.
@pytest.mark.parametrize(("schedule", "batch_size"), [("gpipe", 9), ("1f1b", 7)])
@pytest.mark.parametrize(
    "layers_of",
    [
        dropped_constant, held_constant, another_axis_first, another_axis_first_inside,
        complex_numbers, computed_by_python, without_a_gradient, read_in_a_closure, unused_head,
        unused_steep_head, unused_head_of_what_is_stopped, read_twice,
    ],
)  # fmt: skip
def test_a_pipeline_trains_to_the_weights_of_one_device(layers_of, schedule, batch_size):
    generator = np.random.default_rng(0)
    reads_tokens = layers_of is read_twice
    shape = (18, 3) if reads_tokens else (18, 3, 4)
    x = generator.integers(0, 9, shape) if reads_tokens else generator.normal(size=shape)

    def build():
        inputs = keras.Input(shape[1:], dtype="int32" if reads_tokens else "float64")
        return keras.Model(inputs, layers_of(inputs))

    single = seeded(build)
    names = [layer.name for layer in single.layers[1:]]
    pipelined = tfparallel.pipeline_parallel(
        lambda: seeded(build), ["CPU:0", "CPU:1"], NUM_MICRO_BATCHES, schedule=schedule,
        layers_per_stage=[names.index("second"), len(names) - names.index("second")],
    )  # fmt: skip
    targets, results = {"used": generator.normal(size=(18, 3, 3))}, []
    for model in (single, pipelined):
        decaying = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        model.compile(keras.optimizers.Adagrad(0.1) if reads_tokens else decaying, {"used": "mse"})
        fitted = model.fit(x, targets, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        results.append((fitted.history, state_of(model)))
    assert_equal(results[1], results[0], rtol=1e-10, atol=1e-12)


class Padded(layers.Layer):
    """Takes ragged rows, which no symbolic call of Keras's has."""

    def call(self, rows):
        return tf.reduce_sum(rows.to_tensor(), 1, keepdims=True)

    def compute_output_spec(self, rows):
        return keras.KerasTensor((None, 1), rows.dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_a_layer_that_keras_cannot_call_ahead_of_a_step():
    rows = tf.ragged.constant([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0], [8.0, 9.0]], tf.float64)

    def build():
        inputs = keras.Input((None,), ragged=True, dtype="float64")
        x = layers.Dense(2)(Padded()(inputs))
        return keras.Model(inputs, layers.Dense(1, name="second")(x))

    batches = tf.data.Dataset.from_tensors((rows, tf.ones((5, 1), tf.float64)))
    results = []
    for model in (
        seeded(build),
        tfparallel.pipeline_parallel(
            lambda: seeded(build), ["CPU:0", "CPU:1"], 2, layers_per_stage=[2, 1]
        ),
    ):
        model.compile("adam", "mse")
        fitted = model.fit(batches, epochs=2, verbose=0)
        results.append((fitted.history, state_of(model)))
    assert_equal(results[1], results[0])


class Places(layers.Layer):
    """0, 1, 2 …: the places of tokens."""

    def call(self, inputs):
        return keras.ops.arange(keras.ops.shape(inputs)[1], dtype="int32")[None]

    def compute_output_spec(self, inputs):
        return keras.KerasTensor((1, inputs.shape[1]), "int32")


class Sum(layers.Layer):
    """Of what has rows and what has none."""

    def call(self, rows, constant):
        return rows + constant


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_read_a_table_in_different_ways(schedule):
    """By tokens in the first, by places in the second: slices of either are added in their way."""
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 9, (18, 5)), generator.normal(size=(18, 5, 2))

    def build():
        inputs, table = keras.Input((5,), dtype="int32"), layers.Embedding(9, 4)
        second = layers.Dense(4, name="second")(table(inputs))
        return keras.Model(inputs, layers.Dense(2)(Sum()(second, table(Places()(second)))))

    results = []
    for model in (
        seeded(build),
        tfparallel.pipeline_parallel(
            lambda: seeded(build), ["CPU:0", "CPU:1"], NUM_MICRO_BATCHES, schedule=schedule,
            layers_per_stage=[1, 4],
        ),
    ):  # fmt: skip
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        fitted = model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0)
        results.append((fitted.history, state_of(model)))
    assert_equal(results[1], results[0], rtol=1e-10, atol=1e-12)


def stepwise(model, x, y):
    return [model.train_on_batch(x, y) for _ in range(3)]


def in_a_function_of_the_user(model, x, y):
    step = tf.function(model.train_step, autograph=False)
    batch = tf.nest.map_structure(tf.constant, (x, y))
    return [float(step(batch)["loss"]) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("steps", [stepwise, in_a_function_of_the_user])
def test_a_step_that_must_trace_each_is_begun_anew(steps):
    """Of a head without a loss; `fit` calls its step again, and others do as well."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(7, 3, 4)), {"used": generator.normal(size=(7, 3, 3))}

    def build():
        inputs = keras.Input((3, 4))
        return keras.Model(inputs, unused_head(inputs))

    results = []
    for model in (
        seeded(build),
        tfparallel.pipeline_parallel(
            lambda: seeded(build), ["CPU:0", "CPU:1"], NUM_MICRO_BATCHES, layers_per_stage=[1, 3]
        ),
    ):
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), {"used": "mse"})
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        results.append(({"loss": steps(model, x, y)}, state_of(model)))
    assert_equal(results[1], results[0], rtol=1e-10, atol=1e-12)


class Keeping(layers.Layer):
    """Keeps what it was given."""

    def call(self, inputs):
        self.stored = inputs
        return inputs * 1.0


def test_a_tensor_that_another_stage_keeps_is_refused():
    def build():
        inputs, keeping = keras.Input((4,)), Keeping()
        x = layers.Dense(4)(keeping(inputs))
        x = layers.Lambda(lambda t: t + keeping.stored, output_shape=(4,))(x)
        return keras.Model(inputs, layers.Dense(1)(x))

    model = tfparallel.pipeline_parallel(build, ["CPU:0", "CPU:1"], 2, layers_per_stage=[2, 2])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="stores a tensor, and another stage or the loss reads it"):
        model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize(
    "place",
    [
        lambda build: tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"]),
        lambda build: tfparallel.pipeline_parallel(build, ["CPU:0", "CPU:1"], 2),
    ],
    ids=["data_parallel", "pipeline_parallel"],
)
def test_float8_is_refused(place):
    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Dense(1)])
        model.quantize("float8")
        return model

    with pytest.raises(ValueError, match="float8 layer scales by the largest values"):
        model = place(build)
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)


class Noise(layers.Layer):
    """Draws from Keras's global seed generator."""

    def call(self, inputs):
        return inputs + keras.random.uniform(keras.ops.shape(inputs))


@pytest.mark.slow
def test_a_layer_may_draw_from_the_global_seed_where_rows_are_not_looked_at():
    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(1)(Noise()(layers.Dense(4)(inputs))))

    keras.backend.clear_session()  # Of the generator, too.
    model = tfparallel.pipeline_parallel(
        build, ["CPU:0", "CPU:1"], 2, layers_per_stage=[2, 1], check_rows=False
    )
    model.compile("sgd", "mse")
    history = model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
    assert np.isfinite(history.history["loss"]).all()


class DroppingCell(layers.Layer):
    """Draws anew at each time step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.state_size = self.output_size = 4
        self.dropout = layers.Dropout(0.5)

    def call(self, inputs, states, training=None):
        output = self.dropout(inputs + states[0], training=training)
        return output, [output]


def test_a_draw_in_a_loop_is_refused():
    def build():
        inputs = keras.Input((3, 4))
        return keras.Model(inputs, layers.Dense(1)(layers.RNN(DroppingCell())(inputs)))

    model = tfparallel.pipeline_parallel(build, ["CPU:0", "CPU:1"], 2, layers_per_stage=[1, 1])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="draws new random values each time a loop or a branch"):
        model.fit(np.ones((4, 3, 4)), np.ones((4, 1)), verbose=0)


class DropsInFunction(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    @tf.function
    def call(self, x, training=None):
        return self.dropout(x, training=training)


class AlwaysDropsInFunction(DropsInFunction):
    """Keras traces its function when the model is built, and nobody traces it again."""

    @tf.function
    def call(self, x):
        return self.dropout(x, training=True)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("layer", [DropsInFunction, AlwaysDropsInFunction])
def test_a_draw_in_a_function_of_a_layers_own_is_refused(layer, run_eagerly):
    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(1)(layer()(inputs)))

    model = tfparallel.pipeline_parallel(build, ["CPU:0", "CPU:1"], 2, layers_per_stage=[1, 1])
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match="draws inside a `tf.function` of the layer"):
        model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pipeline", "hybrid"])
@pytest.mark.parametrize("how", ["alone", "function", "loop"])
def test_micro_batches_draw_other_numbers_by_a_seed_of_tensorflows(how, form):
    """Also in a function, which TensorFlow replaces when it is asked for its gradient."""
    devices, seen = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"], []

    def drawn(x):
        return x + tf.random.normal(tf.shape(x), seed=5)

    def call(x):
        if how == "loop":
            return tf.while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, drawn(x)), (0, x))[1]
        return tf.function(drawn)(x) if how == "function" else drawn(x)

    def build():
        inputs = keras.Input((2,))
        x = layers.Dense(2, kernel_initializer="zeros")(inputs)
        x = layers.Lambda(call, output_shape=(2,))(x)
        return keras.Model(inputs, layers.Rescaling(1.0)(x))

    def loss(y_true, y_pred):
        tf.py_function(lambda x: seen.append(x.numpy()), [y_pred], [])
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    if form == "hybrid":
        mesh = tfparallel.Mesh(data=2, pipeline=2)
        model = tfparallel.hybrid_parallel(build, mesh, devices=devices, num_micro_batches=2)
    else:
        model = tfparallel.pipeline_parallel(build, devices[:2], 4)
    model.compile("sgd", loss)
    model.fit(np.zeros((8, 2)), np.zeros((8, 2)), batch_size=8, verbose=0)
    numbers = np.stack([drawn_once for drawn_once in seen if len(drawn_once) == 2][-4:])
    assert numbers.shape == (4, 2, 2) and len(np.unique(numbers)) == numbers.size


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("row_splits_dtype", ["int32", "int64"])
def test_ragged_rows_of_either_type(row_splits_dtype):
    rows = tf.ragged.constant(
        [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0], [8.0, 9.0]],
        dtype=tf.float64, row_splits_dtype=getattr(tf, row_splits_dtype),
    )  # fmt: skip

    def build():
        inputs = keras.Input((None,), ragged=True, dtype="float64")
        x = layers.Lambda(lambda r: tf.reduce_sum(r, 1, keepdims=True), output_shape=(1,))(inputs)
        return keras.Model(inputs, layers.Dense(1, name="second")(layers.Dense(2)(x)))

    batches = tf.data.Dataset.from_tensors((rows, tf.ones((5, 1), tf.float64)))
    results = []
    for model in (
        seeded(build),
        tfparallel.pipeline_parallel(lambda: seeded(build), ["CPU:0", "CPU:1"], 2),
    ):
        model.compile("adam", "mse")
        fitted = model.fit(batches, epochs=2, verbose=0)
        results.append((fitted.history, state_of(model)))
    assert_equal(results[1], results[0])
