"""Layers on devices: the weights of one device, and everything where it should be."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.placement import report as report_lib
from tfparallel.placement.placed_model import PlacedModel
from tfparallel.placement.report import placement_report

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
NUM_EXAMPLES, NUM_CLASSES = 20, 3


def residual():
    """A skip connection over normalization, and dropout."""
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", name="first", kernel_regularizer="l2")(inputs)
    y = layers.BatchNormalization(name="normalize")(x)
    y = layers.Conv2D(4, 3, padding="same", activation="relu", name="second")(y)
    x = layers.Add(name="skip")([x, y])
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dropout(0.4, name="drop")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(x))


def sequential():
    names = ["one", "two", "three"]
    return keras.Sequential(
        [keras.Input((6, 6, 2)), layers.Flatten(name="flatten")]
        + [layers.Dense(5, activation="tanh", name=name) for name in names]
        + [layers.Dense(NUM_CLASSES, name="logits")]
    )


def nested_and_shared():
    """A model in a model, a layer that is called twice, activity regularization."""
    inputs = keras.Input((6, 6, 2))
    inner = keras.Sequential([layers.Flatten(), layers.Dense(4)], name="inner")
    shared = layers.Dense(4, activation="tanh", activity_regularizer="l1", name="shared")
    x = shared(shared(inner(inputs)))
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(x))


def recurrent_and_attention():
    """Loops, and masked sequences made of images."""
    inputs = keras.Input((6, 6, 2))
    x = layers.Reshape((12, 6), name="rows")(inputs)
    x = layers.MultiHeadAttention(2, 3, name="attend")(x, x)
    x = layers.LSTM(4, name="recur")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(x))


BUILDERS = [residual, sequential, nested_and_shared, recurrent_and_attention]


def data():
    generator = np.random.default_rng(0)
    return generator.normal(size=(NUM_EXAMPLES, 6, 6, 2)), np.arange(NUM_EXAMPLES) % NUM_CLASSES


def compile_model(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, **options), loss, metrics=["accuracy"])
    return model


def train(model):
    x, y = data()
    history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
    return history, state_of(model)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda f: f.__name__)
def test_it_trains_to_the_weights_of_one_device_all_of_it_in_place(build):
    expected = train(compile_model(seeded(build)))
    model = compile_model(tfparallel.model_parallel(lambda: seeded(build), DEVICES))
    assert list(dict.fromkeys(model.placement.values())) == DEVICES
    assert_equal(train(model), expected)
    report = placement_report(model, [array[:8] for array in data()], strict=True)
    assert {"variables", "slots", "forward", "backward", "update"} <= set(report.num_audited)
    assert min(report.num_audited.values()) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.1},
        {"global_clipnorm": 0.1},
        {"weight_decay": 0.1, "use_ema": True, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_an_optimizer_adds_is_in_place_too(options):
    expected = train(compile_model(seeded(residual), **options))
    model = tfparallel.model_parallel(lambda: seeded(residual), DEVICES)
    assert_equal(train(compile_model(model, **options)), expected)
    placement_report(model, [array[:8] for array in data()], strict=True)


def test_sparse_gradients_and_two_outputs():
    def build():
        tokens = keras.Input((4,), dtype="int64")
        x = layers.Embedding(7, 3, name="embed")(tokens)
        x = layers.Flatten(name="flatten")(x)
        return keras.Model(
            tokens, {"a": layers.Dense(2, name="a")(x), "b": layers.Dense(1, name="b")(x)}
        )

    def trained(model):
        model.compile("rmsprop", {"a": "mse", "b": "mae"})
        x = np.arange(40).reshape(10, 4) % 7
        y = {"a": np.ones((10, 2)), "b": np.zeros((10, 1))}
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return history, model.get_weights()

    device_map = {"embed": "CPU:1", "flatten": "CPU:1", "a": "CPU:0", "b": "CPU:2"}
    model = tfparallel.model_parallel(lambda: seeded(build), device_map=device_map)
    assert_equal(trained(model), trained(seeded(build)))


def test_a_trained_model_comes_along_and_is_saved_as_plain_keras(tmp_path):
    source = compile_model(seeded(residual))
    source.get_layer("first").trainable = False
    compile_model(source)
    train(source)
    model = tfparallel.model_parallel(source, DEVICES)
    assert not model.get_layer("first").trainable
    model.save(tmp_path / "placed.keras")
    loaded = keras.models.load_model(tmp_path / "placed.keras")
    assert not isinstance(loaded, PlacedModel) and "CPU" not in str(loaded.get_config())
    for weight, expected in zip(loaded.get_weights(), source.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert_equal(train(model), train(source))
    # Placed anew, on fewer devices. (Keras's files do not hold the state of dropout's seed.)
    assert_equal(train(tfparallel.model_parallel(loaded, DEVICES[:2])), train(loaded))


def test_devices_that_the_users_own_code_names_are_honoured():
    """The two hidden layers of the seed, each in a block of its own."""

    def build():
        inputs = keras.Input((6, 6, 2))
        x = layers.Flatten(name="flatten")(inputs)
        with tf.device("CPU:1"):
            x = layers.Dense(5, activation="relu", name="h1")(x)
        with tf.device("CPU:2"):
            x = layers.Dense(5, activation="relu", name="h2")(x)
            x = layers.Dense(NUM_CLASSES, name="logits")(x)
        return keras.Model(inputs, x)

    model = compile_model(tfparallel.model_parallel(lambda: seeded(build)))
    assert [model.placement[name] for name in ("h1", "h2", "logits")] == ["CPU:1", "CPU:2", "CPU:2"]
    assert_equal(train(model), train(compile_model(seeded(build))))
    placement_report(model, [array[:8] for array in data()], strict=True)


def test_the_cut_follows_the_numbers_asked_for():
    model = tfparallel.model_parallel(sequential, DEVICES[:2], layers_per_stage=[2, 3])
    assert list(model.placement.values()) == ["CPU:0"] * 2 + ["CPU:1"] * 3
    assert [v.value.device[-5:] for v in model.get_layer("two").variables] == ["CPU:1"] * 2


def test_several_steps_an_execution_and_eager_steps():
    for options in ({"steps_per_execution": 2}, {"run_eagerly": True}):
        results = []
        for model in (seeded(sequential), tfparallel.model_parallel(lambda: seeded(sequential),
                                                                    DEVICES)):  # fmt: skip
            model.compile("sgd", "mse", **options)
            model.fit(data()[0], np.ones((NUM_EXAMPLES, 3)), batch_size=8, shuffle=False, verbose=0)
            results.append(({}, model.get_weights()))
        assert_equal(*results)


def test_an_audit_sees_what_a_tape_does():
    """Canary: the day a tape places its operations, `gradients.py` is not needed."""

    class Taped(PlacedModel):
        train_step = keras.Model.train_step

    model = compile_model(tfparallel.model_parallel(residual, DEVICES))
    tfparallel.placement_report(model, [array[:8] for array in data()], strict=True)
    model.__class__ = type("Taped", (Taped, type(model)), {})
    report = tfparallel.placement_report(model, [array[:8] for array in data()])
    spec = [tf.TensorSpec([None, 6, 6, 2], tf.float64), tf.TensorSpec([None], tf.int64)]
    graph = tf.function(model.train_step).get_concrete_function(tuple(spec)).graph
    convolutions = [op for op in graph.get_operations() if op.type == "Conv2DBackpropFilter"]
    assert convolutions and not any(op.device for op in convolutions)
    assert "backward" not in report.num_audited


def test_a_report_is_a_table():
    model = compile_model(tfparallel.model_parallel(sequential, DEVICES[:2]))
    lines = str(placement_report(model)).splitlines()
    assert lines[0].split() == "layer device parameters slots outputs per example".split()
    assert lines[1].split() == ["flatten", "CPU:0", "0", "B", "0", "B", "576", "B"]
    assert "variables: 8 of 8 on their device" in lines


def test_what_tensors_took_on_a_gpu_stands_beside_what_the_host_held(monkeypatch):
    model = tfparallel.model_parallel(sequential, DEVICES[:2])
    monkeypatch.setattr(report_lib, "peak_bytes_of_gpus", lambda devices: {devices[1]: 7})
    first, second = report_lib.held_by_device(model)
    assert "peak_tensor_bytes" not in first and second["peak_tensor_bytes"] == 7
    assert first["peak_memory_bytes"] > 7 and second["peak_memory_bytes"] > 7


# --- What is refused --------------------------------------------------------------------------


class Subclassed(keras.Model):
    def call(self, x):
        return x


class OwnStep(keras.Model):
    def train_step(self, data):
        return {}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Subclassed, {"devices": DEVICES}, "functional or Sequential model.*Received: Subclassed"),
        (3, {"devices": DEVICES}, "Received: 3"),
        (lambda: 3, {"devices": DEVICES}, "must return a keras.Model"),
        (lambda: keras.Sequential([layers.Dense(1)]), {"devices": DEVICES}, "is not built"),
        (sequential, {"devices": ["CPU:0", "CPU:9"]}, "CPU:9 does not exist"),
        (sequential, {"devices": ["CPU:0", "CPU:0"]}, "CPU:0 is listed 2 times"),
        (
            lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1, name="only")]),
            {"devices": DEVICES},
            r"3 devices for 1 layers \(only\)",
        ),
        (
            sequential,
            {"devices": DEVICES, "layers_per_stage": [1, 1, 1]},
            r"all 5 layers.*Received: \[1, 1, 1\], a total of 3 on 3 devices",
        ),
        (sequential, {"layers_per_stage": [2, 3]}, "devices=None"),
        (
            sequential,
            {"device_map": {"flatten": "CPU:0", "four": "CPU:0"}},
            "without a device: one, two, three, logits; no such layer: four",
        ),
        (sequential, {"device_map": {}, "devices": DEVICES}, "combined with `devices`"),
        (sequential, {"devices": []}, "^Cannot use these devices: the list is empty[^\n]*$"),
        (
            sequential,
            {"devices": ["CPU:0", "CPU:9"], "layers_per_stage": [1, 1, 1]},
            r"CPU:9 does not exist.*\n.*each of the 2 devices.*a total of 3 on 3 devices",
        ),
        (
            lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1, name="only")]),
            {"devices": ["CPU:0", "CPU:9"], "balance": "feet"},
            r"CPU:9 does not exist.*\n.*2 devices for 1 layers.*\n.*balance='feet'",
        ),
        (
            sequential,
            {"device_map": {"flatten": "CPU:9", "four": "CPU:0"}, "devices": DEVICES},
            r"combined with `devices`.*\n.*no such layer: four.*\n.*CPU:9 does not exist",
        ),
    ],
)
def test_models_that_cannot_be_placed_raise(model, options, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.model_parallel(model, **options)


def test_a_step_of_the_users_own_is_refused():
    def build():
        inputs = keras.Input((2,))
        return OwnStep(inputs, layers.Dense(1)(layers.Dense(2)(inputs)))

    with pytest.raises(ValueError, match="uses a GradientTape"):
        tfparallel.model_parallel(build, DEVICES[:2])


def test_a_strategy_is_refused():
    with (
        tfparallel.MirroredStrategy(DEVICES[:2]).scope(),
        pytest.raises(ValueError, match="outside a strategy's scope"),
    ):
        tfparallel.model_parallel(sequential, DEVICES)


def test_a_report_needs_a_placed_model():
    with pytest.raises(ValueError, match="whose layers have no devices"):
        placement_report(sequential())
    with pytest.raises(ValueError, match="not compiled"):
        placement_report(tfparallel.model_parallel(sequential, DEVICES), data())


@keras.saving.register_keras_serializable(package="tests_placement")
class Encoder(keras.Model):
    """What no graph can be seen of."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.inner = layers.Dense(units, activation="tanh")
        self.drop = layers.Dropout(0.3)

    def build(self, input_shape):
        self.inner.build(input_shape)
        self.built = True

    def call(self, x, training=False):
        return self.drop(self.inner(x), training=training)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def stages():
    return [keras.Input((5,)), Encoder(7, name="one"), Encoder(6, name="two"), layers.Dense(3)]


@pytest.mark.parametrize("as_list", [False, True], ids=["function", "list"])
def test_a_list_of_subclassed_stages(as_list):
    x, y = np.random.default_rng(0).normal(size=(20, 5)), np.arange(20) % 3
    trained = []
    for build in (
        lambda: keras.Sequential(stages()),
        lambda: tfparallel.model_parallel(stages() if as_list else stages, devices=DEVICES),
    ):
        keras.utils.set_random_seed(7)
        model = build()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        trained.append(model)
    plain, placed = trained
    assert list(placed.placement.values()) == DEVICES
    for one, other in zip(plain.get_weights(), placed.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-12)
    assert placement_report(placed, (x[:8], y[:8]), strict=True).elsewhere == []


def test_a_subclassed_model_is_told_what_to_give():
    with pytest.raises(ValueError, match="give a list of its stages"):
        tfparallel.model_parallel(lambda: Encoder(4), devices=DEVICES[:2])


def three_large():
    names = ["one", "two", "three"]
    return keras.Sequential(
        [keras.Input((512,)), *(layers.Dense(512, name=name) for name in names)]
    )


def step_graph(model):
    spec = tf.TensorSpec((3, 512), "float64")
    return tf.function(model.train_step).get_concrete_function((spec, spec)).graph


def ancestors(op):
    names, waiting = set(), [op]
    while waiting:
        op = waiting.pop()
        if op.name not in names:
            names.add(op.name)
            waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return names


def large_products(graph):
    """The operations that make a gradient as large as a weight, first layer first."""
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    return [op for op in products[::-1] if op.outputs[0].shape == (512, 512)]


def large_writes(graph):
    """The operations that write a weight or a slot, first layer first."""
    return [
        op
        for op in graph.get_operations()
        if op.type.startswith("Assign") and op.inputs[1].shape == (512, 512)
    ][::-1]


TWO_AND_ONE = {"devices": DEVICES[:2], "layers_per_stage": [2, 1]}


@pytest.mark.parametrize("clipping", [{}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}])
def test_large_updates_in_order_give_the_same_weights(clipping):
    x = np.random.default_rng(0).normal(size=(6, 512))
    trained = []
    for make in (three_large, lambda: tfparallel.model_parallel(three_large, **TWO_AND_ONE)):
        keras.utils.set_random_seed(7)
        model = make()
        model.compile(keras.optimizers.Adam(**clipping), "mse")
        model.fit(x, x, batch_size=3, verbose=0)
        trained.append(model)
    plain, placed = trained
    for one, other in zip(plain.get_weights(), placed.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-14)


def test_a_large_gradient_is_made_when_the_last_large_update_has_ended():
    """Or all gradients are there at once, and what Adam makes on its way for each of them."""
    placed = tfparallel.model_parallel(three_large, **TWO_AND_ONE)
    placed.compile(keras.optimizers.SGD(), "mse")
    graph = step_graph(placed)
    one, two, three = large_products(graph)
    write_one, write_two, write_three = large_writes(graph)
    assert write_two.name in ancestors(one) and two.name in ancestors(write_two)
    # Layer "three" is alone on its device.
    assert write_three.name not in ancestors(two) | ancestors(write_two)
    assert one.name in ancestors(write_one)


def test_a_norm_of_all_gradients_waits_for_all_of_them():
    placed = tfparallel.model_parallel(three_large, **TWO_AND_ONE)
    placed.compile(keras.optimizers.SGD(global_clipnorm=1.0), "mse")
    graph = step_graph(placed)
    write_one, write_two, _ = large_writes(graph)
    for write in (write_one, write_two):
        assert {op.name for op in large_products(graph)} <= ancestors(write)
    assert write_two.name in ancestors(write_one)


def free(build, before_fit):
    """The weights after two epochs of plain Keras."""
    model = seeded(build)
    model.compile(keras.optimizers.ScheduleFreeAdamW(0.1), "mse")
    if before_fit:
        model.optimizer.build(model.trainable_variables)
    x = np.random.default_rng(0).normal(size=(12, 4))
    model.fit(x, np.sin(x[:, :2]), batch_size=4, shuffle=False, verbose=0, epochs=2)
    return model.get_weights()


def test_keras_sets_a_momentum_back_at_every_step():
    """`ScheduleFreeAdamW.build` inside the traced step: it fails on the day that Keras mends it.

    Then the parity case of ScheduleFreeAdamW needs no program of its own for one device, and the
    notes in README, docs/upstream.md and tests/parity/table.py can go.
    """

    def build():
        return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)])

    traced, built = free(build, before_fit=False), free(build, before_fit=True)
    assert max(np.max(np.abs(a - b)) for a, b in zip(traced, built, strict=True)) > 0.1


def settings_changed(model):
    model.optimizer.momentum = 0.9
    model.optimizer.use_ema = True
    model.optimizer.gradient_accumulation_steps = 2


def weights_set(model):
    model.set_weights([np.full_like(value, 0.1 * i) for i, value in enumerate(model.get_weights())])


@pytest.mark.parametrize(
    ("optimizer", "change"),
    [
        (lambda: keras.optimizers.SGD(0.05), settings_changed),
        (lambda: keras.optimizers.ScheduleFreeAdamW(0.05), weights_set),
    ],
    ids=["settings", "weights"],
)
@pytest.mark.parametrize("form", ["model", "tensor", "pipeline"])
def test_what_changes_behind_compile_is_what_the_optimizer_begins_with(form, optimizer, change):
    """Story: the slots were those of `compile`; plain Keras makes them in the first step."""

    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
        )

    def trained(model):
        # In a graph plain Keras makes the momentum of a `ScheduleFreeAdamW` anew in each step.
        model.compile(optimizer(), "mse", run_eagerly=change is weights_set)
        change(model)
        x = np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4)
        model.fit(x, x[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    builders = {
        "model": tfparallel.model_parallel,
        "tensor": tfparallel.tensor_parallel,
        "pipeline": functools.partial(tfparallel.pipeline_parallel, num_micro_batches=2),
    }
    actual = trained(builders[form](build, DEVICES[:2]))
    for value, expected in zip(actual, trained(build()), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-9)
