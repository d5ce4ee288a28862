"""Where the batches come from, how they are cut, and how the steps are executed."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from .. import data, refusals
from ..case import fit_arguments, observe
from ..programs import case, compiled, digits
from .layers import stack
from .metrics import conv_norm_net
from .optimizers import image_digits

GROUP = "Input and execution"


def batched(count=data.NUM_EXAMPLES):
    return tf.data.Dataset.from_tensor_slices(data.flat(count)).batch(17)


def unknown_size():
    def examples():
        yield from zip(*data.flat(), strict=True)

    signature = (tf.TensorSpec((64,), "float64"), tf.TensorSpec((), "int64"))
    dataset = tf.data.Dataset.from_generator(examples, output_signature=signature)
    return dataset.batch(17)


class Batches(keras.utils.PyDataset):
    """Six batches of 17 digits, the last of 2."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = data.flat()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        part = slice(17 * index, 17 * index + 17)
        return self.x[part], self.y[part]


def finite_batches(sizes):
    """A Python generator of batches of the given sizes, then nothing more."""
    x, y = data.flat()
    start = 0
    for size in sizes:
        yield x[start : start + size], y[start : start + size]
        start += size


def updates(model):
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def counted(form, case):
    model = form.model(case)
    history = model.fit(**fit_arguments(case, form))
    return observe(model, history.history, updates=updates(model))


def endless(sizes):
    while True:
        yield from finite_batches(sizes)


SIZES = [17, 10, 16, 3, 1, 12, 2, 9, 8, 7]

CASES = [
    case(GROUP, f"input: {feature}", f"input {name}", data=load, train=counted, fit=fit)
    for feature, name, load, fit in [
        ("arrays", "arrays", digits, {}),
        ("arrays", "arrays with steps_per_epoch", digits, {"steps_per_epoch": 3}),
        ("`tf.data`", "tf.data", lambda: {"x": batched()}, {}),
        (
            "`tf.data`",
            "tf.data repeated with steps_per_epoch",
            lambda: {"x": batched().repeat()},
            {"steps_per_epoch": 5},
        ),
        ("`tf.data` of unknown size", "tf.data of unknown size", lambda: {"x": unknown_size()}, {}),
        ("`PyDataset`", "PyDataset", lambda: {"x": Batches()}, {}),
        (
            "a finite Python generator loses no batch",
            "finite generator",
            lambda: {"x": finite_batches(SIZES)},
            {"epochs": 1},
        ),
        (
            "a finite Python generator loses no batch",
            "endless generator with steps_per_epoch",
            lambda: {"x": endless(SIZES)},
            {"epochs": 2, "steps_per_epoch": 10},
        ),
    ]
]


def shuffled(form, case):
    """One seed for Python, NumPy and TensorFlow just before fit; no seed in the shuffle."""
    model = form.model(case)
    keras.utils.set_random_seed(11)
    history = model.fit(**fit_arguments(case))
    return observe(model, history.history)


CASES += [
    case(
        GROUP,
        "unseeded shuffles after `keras.utils.set_random_seed`",
        f"unseeded shuffle of {name}",
        data=load,
        fit=fit,
        train=shuffled,
    )
    for name, load, fit in [
        ("arrays", digits, {"shuffle": True}),
        (
            "tf.data",
            lambda: {"x": tf.data.Dataset.from_tensor_slices(data.flat()).shuffle(50).batch(17)},
            {},
        ),
    ]
]


def sizes_case(name, sizes, build=None, load=data.flat, **fields):
    def batches():
        x, y = load()
        ends = np.cumsum(sizes)
        parts = [
            (x[end - size : end], y[end - size : end])
            for size, end in zip(sizes, ends, strict=True)
        ]

        def generate():
            yield from parts

        signature = (
            tf.TensorSpec((None, *x.shape[1:]), "float64"),
            tf.TensorSpec((None,), "int64"),
        )
        return {"x": tf.data.Dataset.from_generator(generate, output_signature=signature)}

    if build:
        fields["build"] = build
    return case(GROUP, fields.pop("feature"), name, data=batches, **fields)


CASES += [
    sizes_case(
        "first batch of 1",
        [1, 17, 5, 16, 2],
        feature="a first batch that the replicas do not divide",
    ),
    sizes_case(
        "fewer examples than replicas",
        [1, 2, 1, 3, 1],
        feature="fewer examples than replicas, with convolutions and batch normalization",
        build=conv_norm_net,
        load=data.images,
        # A batch of one has variance over its pixels alone.
        compile=compiled(lambda: keras.optimizers.SGD(0.01)),
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
    sizes_case(
        "fewer examples than replicas, recurrent",
        [1, 2, 1, 3, 1],
        feature="fewer examples than replicas, with convolutions and batch normalization",
        build=stack((8, 8), lambda: layers.LSTM(6), layers.BatchNormalization),
        load=data.rows,
        compile=compiled(lambda: keras.optimizers.SGD(0.01)),
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
]


def on_batches(form, case):
    """train_on_batch, test_on_batch and predict_on_batch on batches of every size."""
    model = form.model(case)
    x, y = data.images()
    outputs = {}
    for size in (7, 1, 16, 2, 3, 5, 17):
        outputs[f"train on {size}"] = list(
            model.train_on_batch(x[:size], y[:size], return_dict=True).values()
        )
        outputs[f"test on {size}"] = list(model.test_on_batch(x[-size:], y[-size:]))
        outputs[f"predict on {size}"] = model.predict_on_batch(x[:size])
    return observe(model, **outputs)


CASES += [
    case(
        GROUP,
        "`train_on_batch`, `test_on_batch`, `predict_on_batch`",
        "on_batch methods",
        build=conv_norm_net,
        compile=compiled(lambda: keras.optimizers.SGD(0.05), metrics=lambda: ["accuracy"]),
        data=image_digits,
        train=on_batches,
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
    case(
        GROUP,
        "`run_eagerly`",
        "run_eagerly",
        compile=compiled(run_eagerly=True, metrics=lambda: ["accuracy"]),
        # Two epochs: an eager step takes ten times as long.
        fit={"epochs": 2},
    ),
    case(
        GROUP,
        "`run_eagerly`",
        "run_eagerly with batch normalization and accumulation",
        build=conv_norm_net,
        data=image_digits,
        compile=compiled(
            lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), run_eagerly=True
        ),
        fit={"epochs": 2},
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
]


def with_epochs_seen(form, case):
    """Also counts how many times each callback method was called."""
    calls = {"batch": 0, "epoch": 0}

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            calls["batch"] += 1

        def on_epoch_end(self, epoch, logs=None):
            calls["epoch"] += 1

    model = form.model(case)
    history = model.fit(**fit_arguments(case), callbacks=[Count()])
    arguments = fit_arguments(case)
    return observe(
        model,
        history.history,
        updates=updates(model),
        calls=list(calls.values()),
        scores=model.evaluate(arguments["x"], arguments.get("y"), batch_size=17, verbose=0)
        if "y" in arguments
        else [],
    )


CASES += [
    case(
        GROUP,
        "`steps_per_execution`",
        f"steps_per_execution {name}",
        compile=compiled(steps_per_execution=count, metrics=lambda: ["accuracy"]),
        data=load,
        train=with_epochs_seen,
    )
    for name, count, load in [
        ("3 of 6 batches", 3, digits),
        ("4 of 6 batches", 4, digits),
        ("8 of 6 batches", 8, digits),
        ("4 of tf.data of unknown size", 4, lambda: {"x": unknown_size()}),
    ]
] + [
    case(
        GROUP,
        "`steps_per_execution` and `Dropout`",
        "steps_per_execution dropout",
        build=stack((64,), lambda: layers.Dense(12), lambda: layers.Dropout(0.3)),
        compile=compiled(steps_per_execution=2),
    )
]


def sparse_net():
    inputs = keras.Input((64,), sparse=True)
    x = layers.Dense(12, activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(10)(x))


def sparse_pixels():
    x, y = data.flat()
    return {"x": tf.sparse.from_dense(np.where(x > 0.5, x, 0.0)), "y": y}


def in_words():
    """Each digit's darkest columns, by name."""
    x, y = data.rows()
    order = np.argsort(x.sum(axis=1), axis=1)[:, -3:]
    return {"x": tf.constant(np.array(list("abcdefgh"), object)[order]), "y": y}


def words_net():
    inputs = keras.Input((3,), dtype="string")
    x = layers.StringLookup(vocabulary=list("abcdef"))(inputs)
    x = layers.Flatten()(layers.Embedding(8, 4)(x))
    return keras.Model(inputs, layers.Dense(10)(layers.Lambda(lambda t: 2 * t)(x)))


def sparse_words_net():
    inputs = keras.Input((3,), dtype="string")
    lookup = layers.StringLookup(vocabulary=list("abcdef"), output_mode="count", sparse=True)
    return keras.Model(inputs, layers.Dense(10)(layers.Dense(12)(lookup(inputs))))


def pixels_by_name():
    pixels = keras.Input((64,), name="pixels")
    x = layers.Dense(12, activation="tanh")(pixels)
    return keras.Model({"pixels": pixels}, layers.Dense(10)(x))


def with_superfluous_keys():
    """A scalar and a table in each batch, which the model does not read; None for weights."""

    def batch(x, y):
        return {"pixels": x, "scale": tf.constant(3.0), "table": tf.zeros((5, 2))}, y, None

    return {"x": batched().map(batch)}


def with_one_weight():
    return {"x": batched().map(lambda x, y: ({"pixels": x}, y, tf.constant(0.5, "float64")))}


CASES += [
    case(GROUP, feature, f"input tf.data with {name}", build=pixels_by_name, **fields)
    for feature, name, fields in [
        ("input: `tf.data`", "superfluous keys", {"data": with_superfluous_keys}),
        (
            "input: one sample weight for all rows of a batch",
            "one weight for all rows",
            {"data": with_one_weight, "refused": {"pipeline_parallel": "applies to all rows"}},
        ),
    ]
]

CASES += [
    case(GROUP, feature, name, build=build, data=load, compile=compiled(keras.optimizers.Adam))
    for feature, name, build, load in [
        ("sparse tensors", "sparse input", sparse_net, sparse_pixels),
        ("sparse tensors", "sparse layer", sparse_words_net, in_words),
        ("strings, lookups and `Lambda`", "strings", words_net, in_words),
    ]
]
