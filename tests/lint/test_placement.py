"""What a step would move between a host and its GPUs, seen on a machine without one."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.lint import edges
from tests.lint.edges import GPUS, HOST
from tfparallel.data import shard
from tfparallel.layers import softmax_loss
from tfparallel.replication import inputs, random
from tfparallel.step import where_rows_meet

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
    "strings": (strings, np.array([["a"]] * ROWS), np.ones(ROWS, "int64"), classes),
}

FORMS = {
    "data": lambda model: tfparallel.data_parallel(model, devices=GPUS),
    "model": lambda model: tfparallel.model_parallel(model, devices=GPUS),
    "tensor": lambda model: tfparallel.tensor_parallel(model, devices=GPUS),
    "pipeline": lambda model: tfparallel.pipeline_parallel(
        model, devices=GPUS, num_micro_batches=2, batch_normalization="deferred"
    ),
}


@functools.cache
def traced(network, form=None):
    build, x, y, loss = NETWORKS[network]

    def make():
        model = build() if form is None else FORMS[form](build())
        model.compile("adam", loss(), metrics=["mae" if network == "mlp" else "accuracy"])
        return model

    keras.backend.clear_session()
    with pytest.MonkeyPatch.context() as patch:
        # The devices are CPUs, where labels that are no classes raise as they do on one.
        patch.setattr(softmax_loss, "_raises_for_bad_labels", lambda device: False)
        return edges.traced(make, x, y)


def waits(step):
    """What a GPU has made and the host wants: the host waits for the GPU."""
    return [edge for edge in step.edges() if edge.wanted_in == HOST]


# By form: how often a device does what one does alone, and what the form adds, of one network.
BUDGETS = {
    ("data", "attention"): (2, 0),
    ("model", "attention"): (1, 0),
    ("pipeline", "attention"): (1, 0),
    ("tensor", "attention"): (2, 0),
    ("data", "mlp"): (2, 0),
    ("data", "cnn"): (2, 0),
    ("data", "strings"): (2, 0),
    ("pipeline", "strings"): (1, 0),
}


@pytest.mark.parametrize(("form", "network"), BUDGETS)
def test_the_host_waits_for_no_more_than_of_one_gpu(form, network):
    factor, more = BUDGETS[form, network]
    allowed = factor * len(waits(traced(network))) + more
    assert len(found := waits(traced(network, form))) <= allowed, found


# A text for an error message is a constant of the host; the rest has kernels for CPUs alone.
OF_THE_HOST = {"Const", "LookupTableFindV2", "StridedSlice"}


@pytest.mark.parametrize(("form", "network"), BUDGETS)
def test_what_has_no_kernel_for_gpus_is_known(form, network):
    assert set(traced(network, form).without_kernel()) <= OF_THE_HOST


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
    for module in (shard, where_rows_meet):
        monkeypatch.setattr(module, "where_it_is", lambda tensor: contextlib.nullcontext())
    assert inputs.shards is shard
    assert "IteratorGetNext" in {op for op, _, _ in sent_rows(traced.__wrapped__("mlp", "data"))}


def test_the_lint_sees_sizes_on_a_gpu(monkeypatch):
    """How a dropout mask was drawn: with the sizes of all rows in 64 bits, on the device."""
    monkeypatch.setattr(random.math, "prod", lambda sizes: None)
    allowed = 2 * len(waits(traced("mlp")))
    assert len(waits(traced.__wrapped__("mlp", "data"))) > allowed
