"""Losses and metrics of divided sequences: computed where the positions are, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, metrics

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tests.suites import also_slow

pytestmark = pytest.mark.usefixtures("in_float64")

DEVICES = [f"CPU:{k}" for k in range(4)]
WIDTH, WORDS, LENGTH, ROWS = 6, 13, 7, 10
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
random = np.random.default_rng(0)
IDS = random.integers(1, WORDS, (ROWS, LENGTH))
IDS[::3, LENGTH // 2 :] = 0
IDS[1, 0] = 0
NEXT = random.integers(0, WORDS, (ROWS, LENGTH))
ONE_HOT = np.eye(WORDS)[NEXT]
BY_POSITION = random.uniform(0.2, 2, (ROWS, LENGTH))
BY_ROW = random.uniform(0.2, 2, (ROWS, 1))
SPARSE = losses.SparseCategoricalCrossentropy


def words(activation=None, mask_zero=False, length=LENGTH, **options):
    """Predicts words; hidden activations add a loss if asked to."""

    def build():
        ids = keras.Input((length,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, mask_zero=mask_zero, name="words")(ids)
        x = layers.Dense(WIDTH, "tanh", name="hidden", **options)(x)
        return keras.Model(ids, layers.Dense(WORDS, activation, name="head")(x))

    return build


def two_outputs():
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(ids)
    one, other = layers.Dense(WORDS, name="one")(x), layers.Dense(3, name="other")(x)
    return keras.Model(ids, [one, other])


def ends_with_a_sum():
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WORDS)(ids)
    return keras.Model(ids, 2.0 * (x + layers.Dense(WORDS, "tanh")(x)))


def divided(build, number, **options):
    axes = {axis: options.pop(axis) for axis in ("data", "pipeline") if axis in options}
    mesh = tfparallel.Mesh(sequence=number, **axes)
    devices = DEVICES[: mesh.size]
    return seeded(lambda: tfparallel.hybrid_parallel(build, mesh, devices, **options))


def train(model, compiled, y=NEXT, sample_weight=None, epochs=2):
    model.compile(keras.optimizers.Adam(0.01), **compiled)
    history = model.fit(IDS, y, 4, epochs, sample_weight=sample_weight, shuffle=False, verbose=0)
    predicted = model.predict(IDS, verbose=0)
    return history.history, [*state_of(model), *keras.tree.flatten(predicted)]


def devices_of_logits(model, y=NEXT, sample_weight=None, size=WORDS):
    """Returns the lengths and the devices of all logits that a step computes."""
    data = [None if each is None else tf.constant(each[:4]) for each in (IDS, y, sample_weight)]
    step = tf.function(lambda *data: model.train_step(data), autograph=False)
    graph = step.get_concrete_function(*data).graph
    waiting, seen = [*(each.op for each in graph.outputs), *graph.control_outputs], set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen.add(op.name)
            waiting += [*(each.op for each in op.inputs), *op.control_inputs]
    inputs = {each.op.name for each in graph.inputs}
    return {
        (out.shape[1], op.device[-5:])
        for op in graph.get_operations()
        if op.name in seen and op.name not in inputs and "Split" not in op.type
        for out in op.outputs
        if out.dtype.is_floating and out.shape.rank == 3 and out.shape[2] == size
    }


IN_PARTS = {(3, "CPU:0"), (4, "CPU:1")}
# Called in a test, since a loss or a metric has the dtype of its time.
KINDS = {
    "of logits": lambda: (words(), {"loss": SPARSE(from_logits=True), "metrics": ["accuracy"]}),
    "after a softmax": lambda: (
        words("softmax"), {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]},
    ),
    "weights by position": lambda: (
        words(),
        {
            "loss": SPARSE(from_logits=True),
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy", "sparse_categorical_crossentropy"],
        },
        NEXT,
        BY_POSITION,
    ),
    "weights by row": lambda: (
        words(), {"loss": SPARSE(from_logits=True), "weighted_metrics": ["accuracy"]}, NEXT, BY_ROW,
    ),
    "one-hot": lambda: (
        words(), {
            "loss": losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
            "metrics": ["accuracy"],
        }, ONE_HOT,
    ),
    "one-hot, after a softmax": lambda: (
        words("softmax"), {"loss": "categorical_crossentropy", "metrics": ["accuracy"]}, ONE_HOT,
    ),
    "padding": lambda: (
        words(mask_zero=True),
        {
            "loss": SPARSE(from_logits=True),
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy"],
        },
        NEXT,
        BY_POSITION,
    ),
    "padding, after a softmax": lambda: (
        words("softmax", mask_zero=True),
        {"loss": SPARSE(reduction="mean_with_sample_weight"), "metrics": ["accuracy"]},
        NEXT,
        BY_POSITION,
    ),
    "a sum": lambda: (words(), {"loss": SPARSE(from_logits=True, reduction="sum")}),
    "a class that does not count": lambda: (
        words(), {"loss": SPARSE(from_logits=True, ignore_class=2)},
    ),
    "added losses": lambda: (
        words(activity_regularizer="l2", kernel_regularizer="l2"),
        {"loss": SPARSE(from_logits=True)},
    ),
    "two outputs": lambda: (
        two_outputs,
        {
            "loss": [SPARSE(from_logits=True), "mse"],
            "loss_weights": [1.0, 0.3],
            "metrics": [["accuracy"], ["mae", "mse"]],
        },
        [NEXT, random.normal(size=(ROWS, LENGTH, 3))],
    ),
    "a sum at the end": lambda: (ends_with_a_sum, {"loss": SPARSE(from_logits=True)}),
    "a column of targets": lambda: (words(), {"loss": SPARSE(from_logits=True)}, NEXT[..., None]),
}  # fmt: skip


@pytest.mark.parametrize("kind", also_slow(KINDS, ["one-hot"]))
def test_losses_and_metrics_are_computed_where_the_positions_are(kind):
    build, *task = KINDS[kind]()
    model = divided(build, 2, num_micro_batches=2)
    assert_equal(train(model, *task), train(seeded(build), *task), **CLOSE)
    if kind != "two outputs":  # Its rows would have to be cut one by one.
        of_targets = {(LENGTH, "CPU:0")} if "one-hot" in kind else set()  # As they are fed.
        assert devices_of_logits(model, *task[1:]) - of_targets == IN_PARTS


def weighted():
    """The arguments of `train`, but for the model."""
    return KINDS["weights by position"]()[1:]


WAYS = {
    "gpipe": {"num_micro_batches": 3, "schedule": "gpipe"},
    "1f1b": {"num_micro_batches": 3},
    "data": {"data": 2},
    "data, in micro-batches": {"data": 2, "num_micro_batches": 2, "schedule": "gpipe"},
    "pipeline": {"pipeline": 2, "num_micro_batches": 2},
    "interleaved": {
        "pipeline": 2, "num_micro_batches": 2, "schedule": "interleaved", "chunks_per_device": 2,
        "allow_empty_stages": True, "layers_per_stage": [1, 1, 0, 1],
    },
    "recomputed": {"pipeline": 2, "num_micro_batches": 2, "recompute": "always"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_on_every_mesh_and_schedule(way):
    build = words(mask_zero=True)
    model = divided(build, 2, **WAYS[way])
    assert_equal(train(model, *weighted()), train(seeded(build), *weighted()), **CLOSE)
    lengths = {length for length, _ in devices_of_logits(model, *weighted()[1:])}
    assert lengths == {3, 4}


@pytest.mark.slow
def test_uneven_parts():
    build = words()
    assert_equal(train(divided(build, 3), *weighted()), train(seeded(build), *weighted()), **CLOSE)


@pytest.mark.slow
def test_batches_that_accumulate():
    weights = []
    for model, size in ((divided(words(), 2, sync="accumulate:2"), 4), (seeded(words()), 8)):
        model.compile("sgd", **weighted()[0])
        rows = {"sample_weight": BY_POSITION[:8], "shuffle": False, "verbose": 0}
        model.fit(IDS[:8], NEXT[:8], size, **rows)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_length_that_only_the_batch_knows(eager):
    """Of 7 positions on 4 devices each has some; of 2, two devices have none."""
    build = words(length=None)
    for length in (LENGTH, 2):

        def batches(length=length):
            rows = (IDS[:, :length], NEXT[:, :length], BY_POSITION[:, :length])
            return tf.data.Dataset.from_tensor_slices(rows).padded_batch(4, ([None],) * 3)

        results = []
        for model in (divided(build, 4), seeded(build)):
            model.compile(keras.optimizers.Adam(0.01), run_eagerly=eager, **weighted()[0])
            history = model.fit(batches(), epochs=3, verbose=0).history
            results.append((history, state_of(model)))
        assert_equal(*results, **CLOSE)


def test_a_loss_that_mixes_positions_reads_them_all():
    """Each position is compared with the next one, which another device may have."""

    def smooth(y, z):
        return tf.reduce_mean(tf.square(z - tf.roll(z, 1, 1)), -1) + SPARSE(
            from_logits=True, reduction="none"
        )(y, z)

    build = words()
    task = ({"loss": smooth, "metrics": ["accuracy"]},)
    model = divided(build, 2)
    assert_equal(train(model, *task), train(seeded(build), *task), **CLOSE)
    assert (LENGTH, "CPU:0") in devices_of_logits(model)


@pytest.mark.slow
def test_a_loss_that_looks_at_the_length_reads_them_all():
    def scaled(y, z):
        factor = 2.0 if z.shape[1] is None or z.shape[1] < LENGTH else 1.0
        return factor * tf.reduce_mean(tf.square(z), -1)

    build = words()
    task = ({"loss": scaled},)
    assert_equal(train(divided(build, 2), *task), train(seeded(build), *task), **CLOSE)


@pytest.mark.slow
def test_a_metric_that_mixes_positions_reads_them_all():
    """The loss is still that of the parts: the gradients begin there."""

    def largest(y, z):
        return tf.reduce_max(z, [1, 2])

    build = words()
    task = ({"loss": SPARSE(from_logits=True), "metrics": [largest]},)
    model = divided(build, 2)
    assert_equal(train(model, *task), train(seeded(build), *task), **CLOSE)
    assert (LENGTH, "CPU:1") not in devices_of_logits(model)


@pytest.mark.slow
def test_a_metric_of_counts():
    def build():
        ids = keras.Input((LENGTH,), dtype="int32")
        return keras.Model(ids, layers.Dense(1, "sigmoid")(layers.Embedding(WORDS, WIDTH)(ids)))

    def trained(model):
        counted = [metrics.AUC(name="area"), metrics.Precision(name="p"), "accuracy"]
        compiled = {"loss": "binary_crossentropy", "metrics": counted}
        return train(model, compiled, (NEXT % 2).astype(float)[..., None])

    assert_equal(trained(divided(build, 2)), trained(seeded(build)), **CLOSE)


@pytest.mark.slow
def test_mixed_precision():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")

    def build():
        ids = keras.Input((LENGTH,), dtype="int32")
        x = layers.Dense(WIDTH, "tanh")(layers.Embedding(WORDS, WIDTH)(ids))
        return keras.Model(ids, layers.Dense(WORDS, dtype="float32")(x))

    model = divided(build, 2)
    results = [train(each, *weighted(), epochs=1) for each in (model, seeded(build))]
    assert_equal(*results, rtol=1e-2, atol=1e-3)
    assert devices_of_logits(model, *weighted()[1:]) == IN_PARTS
