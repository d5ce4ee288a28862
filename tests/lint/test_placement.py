"""What a step would move between a host and its GPUs, seen on a machine without one."""

import collections
import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.lint import edges
from tests.lint.edges import GPUS, HOST
from tests.lint.sizes import Sizes
from tfparallel import piece as pieces
from tfparallel.draws import row_draws
from tfparallel.layers import softmax_loss
from tfparallel.replication import inputs
from tfparallel.step import row_counts

pytestmark = pytest.mark.slow

ROWS = 14


def classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.LayerNormalization(),
            layers.Dropout(0.5),
            layers.Dense(2),
        ]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )


def attention():
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 8)(ids)
    x = x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    return keras.Model(ids, layers.Dense(3)(layers.LayerNormalization()(x)))


def strings():
    words = keras.Input((1,), dtype="string")
    x = layers.StringLookup(vocabulary=list("abc"))(words)
    return keras.Model(words, layers.Dense(3)(layers.Flatten()(layers.Embedding(5, 4)(x))))


NETWORKS = {
    "mlp": (mlp, np.ones((ROWS, 6), "float32"), np.ones((ROWS, 2), "float32"), lambda: "mse"),
    "cnn": (cnn, np.ones((ROWS, 8, 8, 3), "float32"), np.ones(ROWS, "int64"), classes),
    "attention": (attention, np.ones((ROWS, 6), "int32"), np.ones((ROWS, 6), "int64"), classes),
    "weights": (
        mlp,
        np.ones((ROWS, 6), "float32"),
        np.ones((ROWS, 2), "float32"),
        lambda: "mse",
        np.ones(ROWS, "float32"),
    ),
    "strings": (strings, np.array([["a"]] * ROWS), np.ones(ROWS, "int64"), classes),
}

FORMS = {
    "data": lambda model: tfparallel.data_parallel(model, devices=GPUS),
    "model": lambda model: tfparallel.model_parallel(model, devices=GPUS),
    "tensor": lambda model: tfparallel.tensor_parallel(model, devices=GPUS),
    "pipeline": lambda model: tfparallel.pipeline_parallel(
        model, devices=GPUS, num_micro_batches=2, batch_normalization="deferred"
    ),
    "hybrid": lambda model: tfparallel.hybrid_parallel(
        model, tfparallel.Mesh(data=2), GPUS, batch_normalization="deferred"
    ),
}


@functools.cache
def traced(network, form=None):
    build, x, y, loss, *weights = NETWORKS[network]

    def make():
        model = build() if form is None else FORMS[form](build())
        model.compile("adam", loss(), metrics=["mae" if y.dtype == "float32" else "accuracy"])
        return model

    keras.backend.clear_session()
    with pytest.MonkeyPatch.context() as patch:
        # The devices are CPUs, where labels that are no classes raise as they do on one.
        patch.setattr(softmax_loss, "_raises_for_bad_labels", lambda device: False)
        return edges.traced(make, x, y, *weights)


PAIRS = list(itertools.product(FORMS, NETWORKS))


@pytest.mark.parametrize(("form", "network"), PAIRS)
def test_the_layers_are_seen(form, network):
    """A product of matrices is in a part of the step that the lint reads, and no part is left."""
    step = traced(network, form)
    assert any(kind.endswith("MatMul") for kind in step.kinds())
    assert step.not_entered == []


def waits(step):
    """What a GPU has made and the host wants: the host waits for the GPU."""
    return [edge for edge in step.edges() if edge.wanted_in == HOST]


# Where the host waits, in Keras's layers and TensorFlow's gradients, on one GPU as on several.
# Nothing of this project's makes it wait.
SEED = ("Cast", "StatelessRandomGetKeyCounter")  # Keras counts a layer's draws beside the layer.
SHAPE_OF_MEAN = ("DynamicStitch", "Reshape")  # TensorFlow's gradient of a mean: of what shape.
ARGMAX = ("BitwiseAnd", "Less")  # Keras's accuracy looks for -0.0, in int32, which the host has.
IDS = ("SelectV2", "Size")  # How many ids an embedding's gradient is of.
IDS_OF_A_STAGE = ("SelectV2", "_Retval")  # The same, from a function to that of its gradient.
SHAPES_OF_DENSE = ("GatherV2", "ConcatV2"), ("Prod", "Pack")  # `tf.tensordot`, of three axes.
SHAPE_OF_LABELS = ("All", "Assert")  # TensorFlow's cross-entropy holds it against the logits'.
UNKNOWN_WORD = ("_Arg", "LookupTableFindV2")  # The number that a table has for one.

WAITS = {
    "mlp": {SEED: 1, SHAPE_OF_MEAN: 1},
    "weights": {SEED: 1, SHAPE_OF_MEAN: 1},
    "cnn": {ARGMAX: 1},
    "attention": {
        SEED: 1,
        ARGMAX: 1,
        IDS: 1,
        SHAPES_OF_DENSE[0]: 1,
        SHAPES_OF_DENSE[1]: 2,
        SHAPE_OF_LABELS: 1,
    },
    "strings": {ARGMAX: 1, UNKNOWN_WORD: 1},
}


def more_waits(wait_edges, network, num_times=1):
    """The edges that a network does not have on one GPU, so many times."""
    counted = collections.Counter((edge.op, edge.consumer) for edge in wait_edges)
    counted[IDS] += counted.pop(IDS_OF_A_STAGE, 0)
    allowed = {kind: num_times * count for kind, count in WAITS[network].items()}
    return counted - collections.Counter(allowed)


@pytest.mark.parametrize("network", NETWORKS)
def test_where_the_host_waits_for_one_gpu_is_known(network):
    counts = collections.Counter((edge.op, edge.consumer) for edge in waits(traced(network)))
    assert counts == WAITS[network]


@pytest.mark.parametrize(("form", "network"), PAIRS)
def test_the_host_waits_no_more_for_several_gpus(form, network):
    wait_edges = waits(traced(network, form))
    if form in ("data", "tensor"):  # Each does what one would do.
        for gpu in GPUS:
            of_gpu = [edge for edge in wait_edges if edge.made_in == gpu]
            assert not more_waits(of_gpu, network), of_gpu
    elif form == "model":
        assert not more_waits(wait_edges, network), wait_edges
    else:
        # Each micro-batch does; and the divisor of the loss asks for a shape once more.
        more = more_waits(wait_edges, network, num_times=2)
        assert more <= collections.Counter({SHAPE_OF_LABELS: 1}), wait_edges


# What the host sends back, having been asked for it by a layer of Keras's or by a gradient.
SENT_BACK = {
    ("Less", "SelectV2"): "whether an id is below zero: Keras's embedding, of int32",
    ("AddV2", "SelectV2"): "that id, counted from the end",
    ("Less", "LogicalAnd"): "whether a value is -0.0: Keras's accuracy",
    ("Reshape", "UnsortedSegmentSum"): "which rows of an embedding have a gradient",
    ("ConcatV2", "UnsortedSegmentSum"): "the same of all replicas, or of all micro-batches",
    ("DynamicPartition", "SelectV2"): "ids, by the part that holds their rows of an embedding",
    ("DynamicPartition", "Less"): "likewise",
    ("DynamicPartition", "GatherV2"): "where each of them was",
}
LARGE_BATCH = 14_000  # So that sizes, seeds and counts are nothing beside it.
SCALARS = 1024  # Bytes: tens of these, of at most 16.


def rows_and_sent(step, network, form):
    """Of each GPU the bytes of its own rows, and what the host sends it."""
    _, x, y, _, *weights = NETWORKS[network]
    inputs = LARGE_BATCH * (8 if x.dtype.kind == "U" else x[0].nbytes)  # Of a string, its number.
    targets = LARGE_BATCH * sum(each[0].nbytes for each in (y, *weights))
    whole = inputs + targets
    rows = {
        "data": (whole / 2, whole / 2),
        "hybrid": (whole / 2, whole / 2),
        "model": (inputs, targets),
        "pipeline": (inputs, targets),
        "tensor": (whole, inputs),
    }[form]
    sizes, sent = Sizes(step, LARGE_BATCH), dict.fromkeys(GPUS, 0)
    for edge in step.edges():
        if edge.made_in == HOST and (edge.op, edge.consumer) not in SENT_BACK:
            sent[edge.wanted_in] += sizes.num_bytes(edge)
    return list(zip(rows, sent.values(), strict=True))


@pytest.mark.parametrize(("form", "network"), PAIRS)
def test_a_gpu_is_sent_its_own_rows_in_bytes(form, network):
    for rows, sent in rows_and_sent(traced(network, form), network, form):
        assert sent <= 1.05 * rows + SCALARS
        # Parts of an embedding, in front of all the rest, are sent what `SENT_BACK` lists.
        assert sent >= 0.95 * rows or form == "tensor" and network in ("attention", "strings")


def test_the_lint_sees_all_rows_sent_to_a_replica(monkeypatch):
    """The first, from which the other one has its own."""
    cut_on_gpus(monkeypatch)
    (rows, sent), _ = rows_and_sent(traced.__wrapped__("mlp", "data"), "mlp", "data")
    assert sent > 1.9 * rows


def test_the_lint_sees_all_rows_sent_to_each_replica(monkeypatch):
    monkeypatch.setattr(pieces.Piece, "rows_used", all_rows)
    rows_and_sends = rows_and_sent(traced.__wrapped__("mlp", "data"), "mlp", "data")
    assert all(sent > 1.5 * rows for rows, sent in rows_and_sends)


def all_rows(piece, tensor):
    with tf.device(GPUS[piece.replica]):
        return tensor[piece.start : piece.start + piece.num_rows]


def cut_on_gpus(monkeypatch):
    for module in (pieces, inputs, row_counts):
        monkeypatch.setattr(module, "where_it_is", lambda tensor: contextlib.nullcontext())


# A text for an error message is a constant of the host; the rest has kernels for CPUs alone, so
# that TensorFlow puts it there.
OF_THE_HOST = {"Const", "LookupTableFindV2", "StridedSlice"}
# Beside these: a check has a message; a function, as a stage of a pipeline is, and what it is
# called with. For all of them TensorFlow keeps strings in the host's memory.
STRINGS = OF_THE_HOST | {"Assert", "StatefulPartitionedCall", "_Arg"}


@pytest.mark.parametrize(("form", "network"), PAIRS)
def test_what_has_no_kernel_for_gpus_is_known(form, network):
    assert set(traced(network, form).without_kernel()) <= OF_THE_HOST


@pytest.mark.parametrize(("form", "network"), PAIRS)
def test_no_string_reaches_a_gpu(form, network):
    assert set(traced(network, form).with_strings()) <= STRINGS


@keras.saving.register_keras_serializable("tests")
class Passes(layers.Layer):
    """Hands on what a function of the tests, by its name, makes of its input."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return globals()[self.function](x)

    def get_config(self):
        return super().get_config() | {"function": self.function}


def handed_on(x):
    return tf.identity(x)


def without_gpu_kernel(x):
    return x + tf.cast(tf.raw_ops.Mod(x=tf.cast(x, "int64"), y=tf.constant(2, "int64")), x.dtype)


def with_layer(network, function):
    """Traces a network on two replicas, a layer of this kind in its first place."""
    build, x, *batch = NETWORKS[network]

    def planted():
        dtype = "string" if x.dtype.kind == "U" else x.dtype
        first = keras.Input(x.shape[1:], dtype=dtype)
        return keras.Model(first, build()(Passes(function.__name__)(first)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, network, (planted, x, *batch))
        return traced.__wrapped__(network, "data")


def test_the_lint_sees_a_string_on_a_gpu():
    step = with_layer("strings", handed_on)
    assert set(step.with_strings()) - STRINGS == {"Identity"}


def test_the_lint_sees_what_has_no_kernel_for_gpus():
    step = with_layer("mlp", without_gpu_kernel)
    assert set(step.without_kernel()) - OF_THE_HOST == {"Mod"}


def sent_rows(step):
    """What of the batch goes to a GPU: the operation that makes it, and the GPU."""
    return [
        (edge.op, edge.source, edge.wanted_in)
        for edge in step.edges()
        if edge.made_in == HOST and edge.op in ("IteratorGetNext", "StridedSlice")
        if edge.dtype.is_floating or edge.dtype == tf.int64
    ]


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_a_replica_is_sent_its_own_rows_alone(network):
    sent = sent_rows(traced(network, "data"))
    assert {op for op, _, _ in sent} == {"StridedSlice"}
    sources = [source for _, source, _ in sent]
    assert len(set(sources)) == len(sources) == 4  # Of x and y, each to one.
    assert sorted(gpu for _, _, gpu in sent) == [GPUS[0]] * 2 + [GPUS[1]] * 2


def test_the_lint_sees_rows_on_a_wrong_gpu(monkeypatch):
    cut_on_gpus(monkeypatch)
    assert "IteratorGetNext" in {op for op, _, _ in sent_rows(traced.__wrapped__("mlp", "data"))}


def test_the_lint_sees_sizes_on_a_gpu(monkeypatch):
    """How a dropout mask was drawn: with the sizes of all rows in 64 bits, on the device."""
    monkeypatch.setattr(row_draws.math, "prod", lambda sizes: None)
    wait_edges = waits(traced.__wrapped__("mlp", "data"))
    assert more_waits([edge for edge in wait_edges if edge.made_in == GPUS[1]], "mlp")
