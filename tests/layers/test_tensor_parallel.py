"""Layers in parts: the weights of one device, each part where it should be."""

import collections
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import comparison
from tests.comparison import seeded, state_of
from tfparallel.layers import softmax_loss
from tfparallel.layers.composite import Group
from tfparallel.layers.parts import Parts
from tfparallel.layers.softmax_loss import cross_entropy
from tfparallel.layers.split_plan import plan
from tfparallel.tracing.audit import device_of, short
from tfparallel.variables.split import SplitVariable, parts_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
NUM_EXAMPLES, NUM_CLASSES = 20, 7


def pairs():
    """Two pairs with what works feature by feature in between, and units that 3 do not divide."""
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(7, name="a", kernel_constraint=keras.constraints.MaxNorm(0.5))(x)
    x = layers.BatchNormalization(name="normalize")(x)
    x = layers.PReLU(name="rectify")(x)
    x = layers.Dropout(0.4, name="drop")(x)
    x = layers.Dense(5, activation="tanh", name="b", kernel_regularizer="l2")(x)
    x = layers.Dense(4, activation="gelu", use_bias=False, name="c")(x)
    x = layers.Dense(5, use_bias=False, name="d")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="e")(x))


def convolutions():
    """Channels in parts through pooling, padding and a depthwise convolution; a skip connection."""
    x = inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(x)
    y = layers.Conv2D(5, 3, padding="same", name="a", use_bias=False)(x)
    y = layers.BatchNormalization(name="normalize")(y)
    y = layers.ReLU(6.0, name="rectify")(y)
    y = layers.ZeroPadding2D(name="pad")(y)
    y = layers.DepthwiseConv2D(3, depth_multiplier=2, name="deep", activation="relu")(y)
    y = layers.Conv2D(4, 1, name="b")(y)
    x = layers.Add(name="skip")([x, y])
    x = layers.Conv2D(8, 3, strides=2, name="c")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(8, activation="relu", name="d")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="e")(x))


def attention():
    """Heads that 2 and 3 devices do not divide, dropout on the scores, a mask, a nested model."""
    inputs = keras.Input((6, 6, 2))
    x = layers.Reshape((12, 6), name="rows")(inputs)
    x = layers.Masking(0.0, name="mask")(x)
    x = layers.MultiHeadAttention(5, 3, dropout=0.3, name="attend")(x, x, use_causal_mask=True)
    x = layers.GroupQueryAttention(3, 4, 2, name="grouped")(x, x)
    inner = keras.Sequential(
        [keras.Input((12, 6)), layers.Dense(9, activation="relu"), layers.Dense(6)], name="inner"
    )
    x = layers.Add(name="skip")([x, inner(x)])
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="e")(x))


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_EXAMPLES, 6, 6, 2))
    x[::3, 4:] = 0  # For the mask.
    return x, np.arange(NUM_EXAMPLES) % NUM_CLASSES


def compile_model(model, optimizer=keras.optimizers.Adam, **options):
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(optimizer(0.01, **options), loss, metrics=["accuracy"])
    return model


def train(model, **options):
    x, y = data()
    options = {"epochs": 2, "batch_size": 8} | options
    history = model.fit(x, y, shuffle=False, verbose=0, **options).history
    return history, state_of(model)


def assert_equal(actual, expected):
    # A bias before batch normalization, or of an attention key, has no true gradient: noise.
    comparison.assert_equal(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("build", "num_devices"), [(pairs, 3), (convolutions, 2), (attention, 2)]
)
def test_it_trains_to_the_weights_of_one_device(build, num_devices):
    expected = train(compile_model(seeded(build)))
    model = tfparallel.tensor_parallel(lambda: seeded(build), DEVICES[:num_devices])
    for variable in model.variables:
        if isinstance(variable, SplitVariable):
            devices = [short(part.value.device) for part in variable.parts]
            assert devices == DEVICES[:num_devices]
    assert_equal(train(compile_model(model)), expected)


def masked_skip():
    """Attention takes the mask off what it reads, so that the loss of the sum has none."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, name="embed")(inputs)
    x = layers.Add(name="skip")([x, layers.MultiHeadAttention(2, 2, name="attend")(x, x)])
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="logits")(x))


def test_the_mask_is_taken_off_where_keras_takes_it_off():
    """Story: off each device's copy, so that the loss was masked, as on one device it is not."""
    tokens = np.random.default_rng(0).integers(1, 9, (8, 5)) * (np.arange(5) < 3)
    results = []
    for model in (seeded(masked_skip), tfparallel.tensor_parallel(lambda: seeded(masked_skip), 2)):
        model.compile("sgd", "mse")
        y = np.ones((8, 5, NUM_CLASSES))
        history = model.fit(tokens, y, epochs=2, shuffle=False, verbose=0).history
        results.append((history, state_of(model)))
    assert_equal(results[1], results[0])


def test_a_mask_removed_from_the_whole_is_removed_from_its_parts():
    """Another layer that reads the parts finds no mask either."""
    with tf.device("CPU:0"):
        parts = Parts([tf.ones((2, 3, 1))] * 2, -1, DEVICES[:2], mask=tf.ones((2, 3), tf.bool))
    assert parts.cast("float32")._keras_mask is not None
    parts.whole()._keras_mask = None
    assert parts._keras_mask is None and parts.cast("float32")._keras_mask is None


def test_what_is_split():
    def split(build, num_devices):
        return tfparallel.tensor_parallel(build, DEVICES[:num_devices]).split

    features = ["normalize", "rectify", "drop"]
    assert split(pairs, 2) == {
        "a": "column", **dict.fromkeys(features, "features"), "b": "row",
        "c": "column", "d": "row", "e": "column, gathered",
    }  # fmt: skip
    assert split(convolutions, 2) == {
        "stem": "column, gathered",
        "a": "column",
        **dict.fromkeys(["normalize", "rectify", "pad", "deep"], "features"),
        "b": "row",
        "c": "column",
        "pool": "features",
        "d": "row",
        "e": "column, gathered",
    }
    # Two groups of heads are too few for three devices.
    kinds = split(attention, 3)
    assert kinds["attend"] == "heads" and "grouped" not in kinds
    assert [kind for name, kind in kinds.items() if name.startswith("dense")] == ["column", "row"]


def test_a_layer_whose_call_was_replaced_is_left_in_place():
    """Story: the function was given parts, which only ours can read."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(6, name="a"), layers.Dense(6, name="b")]
    )
    layer = model.get_layer("b")
    call = layer.call
    layer.call = lambda x: 2.0 * call(x)
    assert plan(Group(model, graph=model), 2) == {"a": "column, gathered"}


def two_layers():
    """A hidden layer in parts, and logits that nobody but the loss reads."""
    inputs = keras.Input((6, 6, 2))
    x = layers.Flatten(name="flatten")(inputs)
    x = layers.Dense(8, activation="tanh", name="a", kernel_constraint="unit_norm")(x)
    x = layers.Dense(6, name="b")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax", name="e")(x))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (keras.optimizers.Adam, {"clipnorm": 0.01}),
        (keras.optimizers.SGD, {"global_clipnorm": 0.1, "momentum": 0.9}),
        (keras.optimizers.RMSprop, {"clipvalue": 0.01, "centered": True}),
        (
            keras.optimizers.AdamW,
            {"weight_decay": 0.1, "use_ema": True, "ema_overwrite_frequency": 2},
        ),
        (keras.optimizers.Nadam, {"gradient_accumulation_steps": 2, "epsilon": 1e-3}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
def test_what_an_optimizer_does_is_that_of_the_whole_weight(optimizer, options):
    expected = train(compile_model(seeded(two_layers), optimizer, **options))
    model = tfparallel.tensor_parallel(lambda: seeded(two_layers), DEVICES[:2])
    compile_model(model, optimizer, **options)
    for slot in parts_of(model.optimizer.variables):
        if hasattr(slot, "_group"):
            assert short(slot.value.device) in DEVICES[:2]
    assert_equal(train(model), expected)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("by_name", [True, False])
def test_what_weight_decay_leaves_out_is_left_out(by_name, is_late):
    """Also what is left out once the model is compiled, whose optimizer has its slots by then."""
    results = []
    plain = seeded(two_layers)
    parts = tfparallel.tensor_parallel(lambda: seeded(two_layers), DEVICES[:2])
    for model in (plain, parts):
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        kernel = model.get_layer("a").kernel
        left_out = {"var_names": ["a/", "b/bias"]} if by_name else {"var_list": [kernel]}
        if is_late:
            model.compile(optimizer, "sparse_categorical_crossentropy")
        optimizer.exclude_from_weight_decay(**left_out)
        if not is_late:
            model.compile(optimizer, "sparse_categorical_crossentropy")
        results.append(train(model, epochs=1))
    assert_equal(*results)


@pytest.mark.parametrize("optimizer", ["Lamb", "Adafactor", "Muon"])
def test_an_optimizer_that_looks_at_whole_weights_is_refused(optimizer):
    model = tfparallel.tensor_parallel(two_layers, DEVICES[:2])
    with pytest.raises(ValueError, match="update each element independently .*Adam, .*Received"):
        model.compile(getattr(keras.optimizers, optimizer)(), "mse")


def test_sparse_gradients_stay_sparse():
    def build():
        tokens = keras.Input((4,), dtype="int64")
        x = layers.Embedding(7, 3, mask_zero=True, name="embed")(tokens)
        x = layers.LSTM(4, name="recur")(x)
        return keras.Model(tokens, layers.Dense(2, name="e")(x))

    def trained(model):
        model.compile(keras.optimizers.Adam(0.1, clipnorm=0.01), "mse")
        # The last ids come first: the rows must come back in the order of the ids.
        x = (40 - np.arange(40).reshape(10, 4)) ** 2 % 7
        return {}, [*model.fit(x, np.ones((10, 2)), batch_size=4, epochs=2, verbose=0,
                               shuffle=False).history["loss"], *model.get_weights()]  # fmt: skip

    model = tfparallel.tensor_parallel(lambda: seeded(build), DEVICES)
    assert model.split["embed"] == "vocabulary"
    assert_equal(trained(model), trained(seeded(build)))
    with pytest.raises(tf.errors.InvalidArgumentError):
        model(np.full((1, 4), 7))


def traced(model, *specs):
    specs = [tf.TensorSpec((None, *shape), dtype) for shape, dtype in specs]
    model._symbolic_build(data_batch=tuple(tf.zeros((1, *s.shape[1:]), s.dtype) for s in specs))
    return tf.function(model.train_step).get_concrete_function(tuple(specs)).graph


def reductions(graph):
    """Sums of terms from several devices, and the layers that they are under."""
    names = []
    for op in graph.get_operations():
        devices = {short(device_of(tensor.op)) for tensor in op.inputs}
        if op.type in ("AddN", "AddV2") and len(devices - {""}) > 1:
            names.append(op.name)
    return names


def test_a_pair_has_one_reduction_forward_and_one_backward():
    def build():
        x = inputs = keras.Input((8,))
        x = layers.LayerNormalization(name="first")(x)  # So that a gradient must come back.
        x = layers.Dense(8, activation="relu", name="a")(x)
        x = layers.Dropout(0.5, name="drop")(x)
        x = layers.Dense(8, name="b")(x)
        return keras.Model(inputs, layers.LayerNormalization(name="last")(x))

    model = tfparallel.tensor_parallel(build, DEVICES[:2])
    model.compile("sgd", "mse")
    graph = traced(model, ((8,), "float64"), ((8,), "float64"))
    names = reductions(graph)
    assert len(names) == 2, names
    assert sum("b" in name.split("/") or "b_1" in name.split("/") for name in names) == 1
    assert sum(name.startswith("gradients/") for name in names) == 1
    products = collections.Counter(
        short(device_of(op)) for op in graph.get_operations() if op.type == "MatMul"
    )
    # Of each layer: forward, and the gradients of its input and its kernel.
    assert products == {"CPU:0": 6, "CPU:1": 6}


def test_attention_has_one_reduction_forward_and_one_backward():
    def build():
        x = inputs = keras.Input((5, 6))
        x = layers.LayerNormalization(name="first")(x)
        x = layers.MultiHeadAttention(4, 3, name="attend")(x, x)
        return keras.Model(inputs, layers.LayerNormalization(name="last")(x))

    model = tfparallel.tensor_parallel(build, DEVICES[:2])
    model.compile("sgd", "mse")
    assert len(reductions(traced(model, ((5, 6), "float64"), ((5, 6), "float64")))) == 2


def test_a_softmax_loss_needs_no_whole_logits():
    def build():
        inputs = keras.Input((6,))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax")(inputs))

    def compiled(model):
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
        return model

    model = compiled(tfparallel.tensor_parallel(lambda: seeded(build), DEVICES[:2]))
    graph = traced(model, ((6,), "float64"), ((), "int64"))
    # What the step's result and its writes wait for; Keras hands y_pred to metrics, of which
    # there is none here.
    needed, waiting = set(), [*(t.op for t in graph.outputs), *graph.control_outputs]
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [*(t.op for t in op.inputs), *op.control_inputs]
    kinds = {op.type for op in graph.get_operations() if op.name in needed}
    assert "ConcatV2" not in kinds and "Softmax" not in kinds and "Exp" in kinds
    x, y = np.random.default_rng(0).normal(size=(9, 6)), np.arange(9) % NUM_CLASSES
    losses = [m.fit(x, y, verbose=0, epochs=3).history["loss"] for m in (
        model, compiled(seeded(build)))]  # fmt: skip
    np.testing.assert_allclose(*losses, rtol=1e-12)
    with pytest.raises(tf.errors.InvalidArgumentError, match="out of range"):
        model.fit(x, y + 3, verbose=0)


def test_a_trained_model_comes_along_and_is_saved_as_plain_keras(tmp_path):
    source = compile_model(seeded(two_layers))
    train(source)
    model = tfparallel.tensor_parallel(source, DEVICES[:2])
    model.save(tmp_path / "split.keras")
    model.save_weights(tmp_path / "split.weights.h5")
    with zipfile.ZipFile(tmp_path / "split.keras") as archive:
        names = archive.extract("model.weights.h5", tmp_path)
    with h5py.File(names) as file:
        assert sorted(file["layers/dense"]) == ["vars"]
    loaded = keras.models.load_model(tmp_path / "split.keras")
    assert type(loaded.get_layer("a")) is layers.Dense
    again = tfparallel.tensor_parallel(two_layers, DEVICES)
    again.load_weights(tmp_path / "split.weights.h5")
    for value, other, weight in zip(
        loaded.get_weights(), again.get_weights(), source.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(value, weight)
        np.testing.assert_array_equal(other, weight)
    expected = train(source)
    # On other devices, from the file: slots came along too.
    assert_equal(train(tfparallel.tensor_parallel(loaded, DEVICES)), expected)
    assert_equal(train(model), expected)


def test_an_input_split_by_features_meets_a_row_parallel_layer():
    def build():
        inputs = [keras.Input((n,), name=f"part{n}") for n in (3, 4)]
        x = layers.Concatenate(name="join")(inputs)
        x = layers.Dense(5, activation="relu", name="a")(x)
        return keras.Model(inputs, layers.Dense(1, name="e")(x))

    x = np.random.default_rng(0).normal(size=(10, 7))
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    dataset = tfparallel.data.by_feature(dataset, 2, weights=[3, 4])
    trained = []
    for make in (build, lambda: tfparallel.tensor_parallel(build, DEVICES[:2])):
        model = seeded(make)
        model.compile("sgd", "mse")
        trained.append(({}, [*model.fit(dataset, verbose=0).history["loss"], *model.get_weights()]))
    assert model.split == {"join": "joined", "a": "row"}
    assert [tuple(part.shape) for part in model.get_layer("a").kernel.parts] == [(3, 5), (4, 5)]
    assert_equal(*trained)


def test_a_layer_reads_rows_where_that_is_asked_for():
    by_rows = tfparallel.tensor_parallel(two_layers, DEVICES[:2], split={"a": "row"})
    assert by_rows.split == {"a": "row", "b": "column", "e": "row"}
    # Behind a softmax, which looks at all features, and beside another reader.
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="softmax", name="a")(inputs)
    y = layers.Dense(4, name="b")(x)
    y = layers.Dense(4, name="c")(y) + layers.Dense(4, name="d")(y)
    plain = keras.Model(inputs, y)
    model = tfparallel.tensor_parallel(plain, DEVICES[:2], split={"b": "row", "c": "row"})
    assert model.split["a"] == "column, gathered"
    x = np.random.default_rng(0).normal(size=(5, 6))
    np.testing.assert_allclose(
        model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-12
    )


def test_operations_that_are_no_layers_read_whole_tensors():
    def build():
        inputs = keras.Input((6, 6, 2))
        y = layers.Conv2D(4, 3, name="a")(inputs)
        x = layers.Dense(6, name="b")(layers.Flatten(name="flatten")(y * 2.0))
        y = layers.Dense(6, name="c")(x)
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="e")(keras.ops.tanh(x) + y))

    plain = seeded(build)
    for convolutions in ("channels", "height"):
        model = tfparallel.tensor_parallel(plain, DEVICES[:2], convolutions=convolutions)
        assert model.split.get("a") == {"channels": "column, gathered"}.get(convolutions)
        assert model.split["b"] == "column, gathered"
        np.testing.assert_allclose(
            model.predict(data()[0], verbose=0), plain.predict(data()[0], verbose=0), rtol=1e-12
        )


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("activation", [None, "softmax", "relu", "sigmoid"])
def test_a_softmax_loss_of_any_output_is_that_of_plain_keras(activation, from_logits):
    x, y = np.random.default_rng(0).normal(size=(9, 6)), np.arange(9) % NUM_CLASSES
    losses = []
    plain = seeded(
        lambda: keras.Sequential([keras.Input((6,)), layers.Dense(NUM_CLASSES, activation)])
    )
    for model in (plain, tfparallel.tensor_parallel(plain, DEVICES[:2])):
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits))
        losses.append(model.evaluate(x, y, verbose=0))
    np.testing.assert_allclose(*losses, rtol=1e-12)


def test_several_steps_an_execution_and_eager_steps():
    for options in ({"steps_per_execution": 2}, {"run_eagerly": True}):
        results = []
        for make in (two_layers, lambda: tfparallel.tensor_parallel(two_layers, DEVICES[:2])):
            model = seeded(make)
            model.compile("sgd", "sparse_categorical_crossentropy", **options)
            results.append(train(model, epochs=1))
        assert_equal(*results)


def test_a_label_that_is_no_class(monkeypatch):
    """On a CPU the whole softmax raises; on a GPU it gives NaN, since nobody waits for it."""
    logits = Parts([tf.zeros([4, 2]), tf.zeros([4, 3])], -1, ["CPU:1", "CPU:2"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="A label is out of range"):
        cross_entropy(tf.constant([0, 1, 5, 4]), logits, tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="A label is negative"):
        cross_entropy(tf.constant([0, -1, 2, 4]), logits, tf.float32)
    monkeypatch.setattr(softmax_loss, "_raises_for_bad_labels", lambda device: False)
    losses = cross_entropy(tf.constant([0, -1, 5, 4]), logits, tf.float32).numpy()
    np.testing.assert_allclose(losses, [np.log(5), np.nan, np.nan, np.log(5)], rtol=1e-6)


def test_keras_refuses_a_tensor_in_parts():
    """Canary: the day it does not, no layer need be told that it may."""
    layer = layers.Dense(2)
    layer.build((None, 4))
    parts = Parts([tf.zeros((3, 2)), tf.zeros((3, 2))], -1, DEVICES[:2])
    with pytest.raises(ValueError, match="Only input tensors may be passed"):
        layer(parts)


# --- What is refused --------------------------------------------------------------------------


class Subclassed(keras.Model):
    def call(self, x):
        return x


class OwnStep(keras.Model):
    def train_step(self, data):
        return {}


def own_step():
    inputs = keras.Input((2,))
    return OwnStep(inputs, layers.Dense(4)(inputs))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Subclassed, {}, "functional or Sequential model.*Received: Subclassed"),
        (own_step, {}, "uses a GradientTape"),
        (3, {}, "Received: 3"),
        (two_layers, {"devices": ["CPU:0"]}, r"at least two devices. Received: .*'CPU:0'"),
        (two_layers, {"devices": ["CPU:0", "CPU:9"]}, "CPU:9 does not exist"),
        (
            two_layers,
            {
                "devices": ["CPU:9"],
                "convolutions": "width",
                "split": {"z": "row", "a": "heads", "flatten": "row"},
            },
            r"CPU:9 does not exist.*\n.*at least two devices.*\n.*convolutions='width'.*\n"
            r".*no such layer: z.*\n.*'flatten' of class Flatten.*\n.*'a' of class Dense",
        ),
        (two_layers, {"split": {"z": "row"}}, "no such layer: z. The layers are a, b, e, flatten"),
        (
            two_layers,
            {"split": {"a": "heads"}},
            "'a' of class Dense cannot be split by 'heads'. It can be column or row",
        ),
        (two_layers, {"split": {"flatten": "row"}}, "can only be left in place"),
        (
            attention,
            {"split": {"grouped": "heads"}},
            "'grouped' with 2 key and value heads, for 3 devices. .* over at most 2 devices",
        ),
        (
            lambda: keras.Sequential(
                [keras.Input((2,)), layers.Embedding(2, 3, name="few"), layers.Dense(9)]
            ),
            {"split": {"few": "vocabulary"}},
            "'few' with 2 vocabulary entries, for 3 devices",
        ),
        (
            lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1, name="only")]),
            {},
            r"Nothing in model .* over 3 devices.*Dense or Conv2D with 3.*only \(Dense\)",
        ),
        (
            lambda: keras.Sequential(
                [keras.Input((2,)), layers.Dense(9, activity_regularizer="l1", name="only")]
            ),
            {"split": {"only": "column"}},
            "no activity regularizer",
        ),
    ],
)
def test_models_that_cannot_be_split_raise(model, options, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.tensor_parallel(model, **({"devices": DEVICES} | options))


def test_a_strategy_is_refused():
    with (
        tfparallel.MirroredStrategy(DEVICES[:2]).scope(),
        pytest.raises(ValueError, match="outside a strategy's scope"),
    ):
        tfparallel.tensor_parallel(two_layers, DEVICES)
    model = tfparallel.tensor_parallel(two_layers, DEVICES)
    with pytest.raises(ValueError, match="model_parallel` returned is required"):
        tfparallel.placement_report(model)
