"""Replicas that each span several devices: the weights of one device, equal copies everywhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import comparison
from tests.comparison import seeded, state_of
from tfparallel.pipeline.batch_norm import grouped
from tfparallel.strategies.variables import copies as copies_of
from tfparallel.tracing.audit import device_of, short
from tfparallel.variables.split import parts_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
NUM_EXAMPLES, NUM_CLASSES = 23, 3
MESHES = {
    "2 x 2 x 1": tfparallel.Mesh(data=2, pipeline=2),
    "2 x 1 x 2": tfparallel.Mesh(data=2, tensor=2),
    "1 x 2 x 2": tfparallel.Mesh(pipeline=2, tensor=2),
}


def residual():
    """Dropout, a skip from the first stage to the last, regularizers of all kinds."""
    inputs = keras.Input((6,))
    x = layers.Dense(8, name="first", kernel_regularizer="l2")(inputs)
    y = layers.Dropout(0.3, name="drop")(x)
    y = layers.Dense(8, activation="relu", name="second", activity_regularizer="l1")(y)
    y = layers.Dense(8, name="third")(y)
    x = layers.LayerNormalization(name="normalize")(layers.Add(name="skip")([x, y]))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="out")(x))


def masked_text():
    """A mask that decides the divisor, sparse gradients, heads."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, name="embed")(inputs)
    x = layers.MultiHeadAttention(2, 3, name="attend")(x, x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="out")(x))


def normalized():
    inputs = keras.Input((6,))
    x = layers.Dense(8, use_bias=False, name="first")(inputs)
    x = layers.BatchNormalization(name="normalize", momentum=0.8)(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="out")(x))


def data(build):
    generator = np.random.default_rng(0)
    if build is masked_text:
        x = generator.integers(1, 9, size=(NUM_EXAMPLES, 7))
        x[np.arange(7) >= generator.integers(1, 8, size=(NUM_EXAMPLES, 1))] = 0
        return x.astype("int32"), generator.integers(0, NUM_CLASSES, size=x.shape)
    return generator.normal(size=(NUM_EXAMPLES, 6)), np.arange(NUM_EXAMPLES) % NUM_CLASSES


def compile_model(model, optimizer=None):
    optimizer = optimizer or keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return model


def train(model, build=residual, epochs=3, **options):
    """Batches of 10, 10 and 3: the last has fewer examples than there are pieces."""
    x, y = data(build)
    keras.utils.set_random_seed(5)
    options = {"batch_size": 10, "shuffle": False, "verbose": 0} | options
    history = model.fit(x, y, epochs=epochs, **options).history
    seen = model.evaluate(x, y, batch_size=10, verbose=0)
    return history | {"evaluated": seen, "predicted": model.predict(x, verbose=0)}, state_of(model)


def assert_equal(actual, expected):
    comparison.assert_equal(actual, expected, rtol=1e-10, atol=1e-12)


def assert_copies_are_equal(model):
    for variable in parts_of([*model.variables, *model.optimizer._variables]):
        first, *others = copies_of(variable)
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=variable.path)


def hybrid(build=residual, mesh="2 x 2 x 1", **options):
    options = {"balance": "memory", "num_micro_batches": 2} | options
    mesh = MESHES.get(mesh, mesh) if isinstance(mesh, str) else mesh
    return tfparallel.hybrid_parallel(lambda: seeded(build), mesh, DEVICES, **options)


@pytest.mark.parametrize(
    ("mesh", "schedule"), [*((mesh, "1f1b") for mesh in MESHES), ("2 x 2 x 1", "gpipe")]
)
def test_trains_to_the_weights_of_one_device(mesh, schedule):
    model = compile_model(hybrid(mesh=mesh, schedule=schedule))
    assert_equal(train(model), train(compile_model(seeded(residual))))
    assert_copies_are_equal(model)


@pytest.mark.parametrize("mesh", ["2 x 2 x 1", "2 x 1 x 2"])
def test_a_mask_decides_the_divisor_of_all_replicas(mesh):
    model = compile_model(hybrid(masked_text, mesh))
    expected = train(compile_model(seeded(masked_text)), masked_text)
    assert_equal(train(model, masked_text), expected)
    assert_copies_are_equal(model)


def test_replicas_of_one_device_each():
    mesh = tfparallel.Mesh(data=4)
    model = compile_model(hybrid(mesh=mesh))
    assert_equal(train(model), train(compile_model(seeded(residual))))


OPTIMIZERS = {
    "moving averages of weights": lambda: keras.optimizers.AdamW(
        0.01, use_ema=True, ema_momentum=0.5
    ),
    "accumulation": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2
    ),
    "scaled losses": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**10, dynamic_growth_steps=2
    ),
    "clipping by each weight": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_replica_runs_the_whole_optimizer(name):
    make, mesh = OPTIMIZERS[name], "2 x 1 x 2" if "each" in name else "2 x 2 x 1"
    model = compile_model(hybrid(mesh=mesh), make())
    assert_equal(train(model), train(compile_model(seeded(residual), make())))
    assert_copies_are_equal(model)


def test_swapped_averages_and_rates_of_a_callback_reach_all_copies():
    def callbacks():
        return [
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        ]

    make = OPTIMIZERS["moving averages of weights"]
    model = compile_model(hybrid(), make())
    actual = train(model, callbacks=callbacks())
    assert_equal(actual, train(compile_model(seeded(residual), make()), callbacks=callbacks()))
    assert_copies_are_equal(model)


def test_what_is_written_in_any_way_reaches_all_copies(tmp_path):
    model = compile_model(hybrid())
    kernel = model.get_layer("out").kernel
    first, second = copies_of(kernel)
    written = {
        "assign": lambda: kernel.assign(np.full(kernel.shape, 1.0)),
        "assign_add": lambda: kernel.assign_add(np.full(kernel.shape, 1.0)),
        "of the value": lambda: kernel.value.assign(np.full(kernel.shape, 3.0)),
        "set_weights": lambda: model.set_weights([w * 0 + 4.0 for w in model.get_weights()]),
    }
    for value, (name, write) in enumerate(written.items(), start=1):
        write()
        for copy in (first, second):
            np.testing.assert_array_equal(copy, value, err_msg=name)
    kernel.value[1:].assign(np.zeros([kernel.shape[0] - 1, kernel.shape[1]]))
    kernel.value.scatter_nd_update([[0, 0]], [7.0])
    np.testing.assert_array_equal(first, second)
    assert np.sum(first) == 7.0 + 4.0 * (kernel.shape[1] - 1)
    kernel.assign(np.full(kernel.shape, 4.0))
    saved = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    kernel.assign(np.zeros(kernel.shape))
    tf.train.Checkpoint(model=model).read(saved)
    for copy in (first, second):
        np.testing.assert_array_equal(copy, 4.0)


def test_the_file_is_plain_keras_and_whole(tmp_path):
    model = compile_model(hybrid(mesh="2 x 1 x 2"))
    train(model, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not hasattr(loaded, "layout")
    x, _ = data(residual)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert_equal(({}, loaded.get_weights()), ({}, model.get_weights()))
    again = tfparallel.hybrid_parallel(loaded, MESHES["2 x 2 x 1"], balance="memory")
    assert_equal(train(again, epochs=1), train(loaded, epochs=1))


def test_groups_of_deferred_batch_normalization_are_the_pieces():
    model = compile_model(hybrid(normalized, batch_normalization="deferred"))
    build = grouped(lambda: seeded(normalized), 2 * 2)
    assert_equal(train(model), train(compile_model(build())))
    assert_copies_are_equal(model)


def test_everything_of_a_replica_is_on_its_devices():
    mesh = tfparallel.Mesh(data=2, tensor=2)
    model = compile_model(hybrid(mesh=mesh))
    model.make_train_function()  # Which makes the optimizer's state.
    for variable in parts_of(model.trainable_variables):
        first, second = (short(copy.device) for copy in copies_of(variable))
        assert (first, second) in [("CPU:0", "CPU:2"), ("CPU:1", "CPU:3")]
    for slot in model.optimizer._momentums:
        first, second = (short(copy.device) for copy in copies_of(slot))
        assert (first, second) in [("CPU:0", "CPU:2"), ("CPU:1", "CPU:3")]


def test_products_of_a_part_are_on_its_device_backward_too():
    model = compile_model(hybrid(mesh="2 x 1 x 2"))
    x, y = (tf.constant(each[:10]) for each in data(residual))
    model.make_train_function()
    step = tf.function(model.train_step, autograph=False)
    graph = step.get_concrete_function((x, y)).graph
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    by_device = {name: 0 for name in DEVICES}
    for op in products:
        by_device[short(device_of(op))] += 1
    # Of three layers in parts: forward, and backward by weights and, but for the first, by inputs.
    assert min(by_device.values()) >= 2 * 3, by_device
    assert max(by_device.values()) < 2 * min(by_device.values()), by_device


def test_a_loss_that_compares_examples_sees_all_rows():
    def compares(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_pred, 0)))

    def compiled(model):
        model.compile(keras.optimizers.SGD(0.1), compares)
        return model

    model = compiled(hybrid(schedule="gpipe"))
    assert_equal(train(model), train(compiled(seeded(residual))))
    assert model.why_joined


def test_a_model_that_is_compiled_brings_its_optimizer_along():
    source = compile_model(seeded(residual))
    train(source, epochs=1)
    model = tfparallel.hybrid_parallel(source, MESHES["2 x 2 x 1"], DEVICES, balance="memory")
    assert_equal(train(model), train(source))


def test_the_layout_tells_what_is_where():
    assert str(hybrid(layers_per_stage=[3, 4]).layout) == (
        "hybrid parallel: data=2, pipeline=2, 2 micro-batches by 1f1b\n"
        "  replica 0  stage 0  CPU:0  first, drop, second\n"
        "  replica 0  stage 1  CPU:1  third, skip, normalize, out\n"
        "  replica 1  stage 0  CPU:2  first, drop, second\n"
        "  replica 1  stage 1  CPU:3  third, skip, normalize, out\n"
        "  gradients: summed on the devices of replica 0"
    )


WRONG = {
    "devices": (
        {"mesh": tfparallel.Mesh(data=2), "layers_per_stage": [3]},
        "A mesh of data=2 has 2 devices. Received: 4",
    ),
    "an axis": ({"mesh": {"datas": 2}}, "axes 'data', 'pipeline', 'tensor' and 'sequence'"),
    "a text": ({"mesh": "data=2"}, r"Pass `tfparallel.Mesh.parse\('data=2'\)`"),
    "a size": ({"mesh": {"data": 0}}, "whole number of devices"),
    "a schedule": ({"schedule": "2f2b"}, "`schedule` must be one of"),
    "a layer to split": (
        {"mesh": "2 x 1 x 2", "split": {"nowhere": "column"}},
        "no such layer: nowhere",
    ),
    "batch normalization": ({"build": normalized}, "takes the statistics of the whole batch"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_in_words(options, said):
    with pytest.raises(ValueError, match=said):
        hybrid(**options)


class Traced(layers.Layer):
    """Calls a `tf.function`, which keeps the variables of its first trace."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.product = tf.function(lambda x: tf.tanh(x @ self.kernel.value), autograph=False)

    def call(self, x):
        return self.product(x)


class MeanOfRows(layers.Layer):
    """Mixes rows, but not in training."""

    def call(self, x, training=False):
        return x if training else x - keras.ops.mean(x, 0)


class Counts(layers.Layer):
    """Changes a state in inference alone."""

    def build(self, shape):
        self.number = self.add_weight(shape=(), initializer="zeros", trainable=False, name="number")

    def call(self, x, training=False):
        if not training:
            self.number.assign_add(1.0)
        return x


def _identity(name):
    return layers.Activation("linear", name=name)


def between(layer):
    def build():
        return keras.Sequential([
            keras.Input((6,)), layers.Dense(4, name="first"), layer(name="between"),
            layers.Dense(NUM_CLASSES, activation="softmax", name="out"),
        ])  # fmt: skip

    return build


@pytest.mark.parametrize("layer", [Traced, MeanOfRows, Counts])
def test_a_layer_of_the_users_own(layer, capfd):
    build = between(layer)
    model = compile_model(hybrid(build))
    assert_equal(train(model), train(compile_model(seeded(build))))
    said = "is evaluated only on the first replica" in capfd.readouterr().err
    assert said == (layer is not Traced)


def test_a_step_is_traced_once_for_all_replicas():
    calls = []

    class Noted(layers.Layer):
        def call(self, x, training=False):
            calls.append(training)
            return x

    times = []
    for mesh in ({"data": 2, "pipeline": 2}, {"data": 1, "pipeline": 2}):
        devices = DEVICES[: 2 * mesh["data"]]
        model = compile_model(
            tfparallel.hybrid_parallel(between(Noted), mesh, devices, balance="memory")
        )
        calls.clear()
        model.train_on_batch(*data(residual))
        times.append(len(calls))
    assert times[0] == times[1]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_another_placement_holds_is_read(run_eagerly):
    """Of which there are not as many copies as there are replicas here, or of other replicas."""
    teachers = [
        tfparallel.data_parallel(lambda: seeded(between(_identity)), devices=DEVICES[:3]),
        hybrid(between(_identity)),
        seeded(between(_identity)),
    ]

    def student(teacher):
        class Taught(layers.Layer):
            def call(self, x):
                return x + tf.reduce_mean(teacher.get_layer("first").kernel)

        return between(Taught)

    def trained(model):
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=run_eagerly)
        fitted = model.fit(*data(residual), batch_size=10, shuffle=False, verbose=0)
        return fitted.history, state_of(model)

    expected = trained(seeded(student(teachers[-1])))
    for teacher in teachers[:-1]:
        for mesh in ({"data": 4}, {"data": 2, "pipeline": 2}):
            build = lambda: seeded(student(teacher))  # noqa: B023, E731
            model = tfparallel.hybrid_parallel(build, mesh, DEVICES, balance="memory")
            assert_equal(trained(model), expected)
        for number in (2, 3):
            model = tfparallel.data_parallel(
                lambda: seeded(student(teacher)), devices=DEVICES[:number]  # noqa: B023
            )
            assert_equal(trained(model), expected)


class Counted(layers.Layer):
    """Has a metric, which sees the rows of each piece."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean(name="of_rows")

    def call(self, x):
        self.mean.update_state(x)
        return x


@pytest.mark.parametrize("mesh", ["2 x 2 x 1", "2 x 1 x 2"])
def test_a_metric_in_a_layer_counts_the_rows_of_all_replicas(mesh):
    states = []
    for make in (lambda build: hybrid(build, mesh), seeded):
        model = make(between(Counted))
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(*data(residual), batch_size=10, shuffle=False, verbose=0)
        (layer,) = (each for each in model.layers if each.name == "between")
        states.append([float(v) for v in layer.mean.variables])
        for variable in layer.mean.variables:
            assert len({float(copy) for copy in copies_of(variable)}) == 1
    np.testing.assert_allclose(*states, rtol=1e-12)
    assert states[0][1] == NUM_EXAMPLES


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """Keeps a state of its own."""

    def __init__(self):
        self.rate = tf.Variable(0.2, dtype="float64")

    def __call__(self, step):
        return self.rate.assign(self.rate * 0.5)


def test_a_schedule_of_the_users_own_is_asked_once_a_step():
    make = lambda: keras.optimizers.SGD(Halving())  # noqa: E731
    model = compile_model(hybrid(), make())
    assert_equal(train(model), train(compile_model(seeded(residual), make())))
    assert_copies_are_equal(model)


def test_a_loop_of_the_users_own():
    def looped(model):
        optimizer, (x, y) = keras.optimizers.Adam(0.01), data(residual)
        model.compile(optimizer)
        for _ in range(3):
            with tf.GradientTape() as tape:
                outputs = model(x, training=False)
                losses = keras.losses.sparse_categorical_crossentropy(y, outputs)
                loss = keras.ops.mean(losses)
            weights = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {}, model.get_weights()

    model = hybrid(mesh="2 x 1 x 2")
    assert_equal(looped(model), looped(seeded(residual)))
    assert_copies_are_equal(model)


def test_factors_that_come_later_have_copies_too():
    def adapted(model):
        compile_model(model, keras.optimizers.Adam(0.01))
        keras.utils.set_random_seed(9)
        model.get_layer("out").enable_lora(2)
        return train(compile_model(model, keras.optimizers.Adam(0.01)))

    model = hybrid()
    actual, expected = adapted(model), adapted(seeded(residual))
    comparison.assert_equal(actual, expected, rtol=1e-5, atol=1e-6)  # Keras's factors are float32.
    assert_copies_are_equal(model)


def test_a_variable_that_keras_does_not_know_is_refused_in_inference():
    class CountsByItself(layers.Layer):
        def build(self, shape):
            self.number = tf.Variable(0.0, trainable=False)

        def call(self, x):
            self.number.assign_add(1.0)
            return x

    model = compile_model(hybrid(between(CountsByItself), check_rows=False))
    x, y = data(residual)
    with pytest.raises(RuntimeError, match="once in each replica.*AssignAddVariableOp"):
        model.predict(x, verbose=0)


def test_a_batch_has_an_example_for_each_piece():
    model = compile_model(hybrid())
    x, y = data(residual)
    with pytest.raises(ValueError, match="batches of 3 for 2 replicas x 2 micro-batches"):
        model.fit(x, y, batch_size=3, verbose=0)


@pytest.mark.parametrize(
    "build_parallel",
    [
        lambda build: tfparallel.pipeline_parallel(build, devices=2, num_micro_batches=2),
        lambda build: tfparallel.hybrid_parallel(build, mesh={"data": 2, "pipeline": 2}),
    ],
    ids=["pipeline", "hybrid"],
)
def test_a_batch_without_rows_adds_no_loss(build_parallel):
    """Its share of the losses that layers add is 0 of 0 rows."""
    spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))

    def build():
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(4, activity_regularizer="l2"), layers.Dense(1)]
        )

    def losses(make):
        model = seeded(lambda: make(build))
        model.compile("sgd", "mse")
        batches = [(np.ones((rows, 4)), np.ones((rows, 1))) for rows in (6, 0)]
        of_any = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
        return model.fit(of_any, verbose=0).history["loss"], model.evaluate(of_any, verbose=0)

    np.testing.assert_allclose(losses(build_parallel)[0], losses(lambda make: make())[0], rtol=1e-5)
    np.testing.assert_allclose(losses(build_parallel)[1], losses(lambda make: make())[1], rtol=1e-5)
