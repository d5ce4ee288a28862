"""How TensorFlow prepares the graph of a step on several CPU devices."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.eager import context

import tfparallel
from tfparallel.seams.tensorflow import functions_prepared_as
from tfparallel.step import graph_preparation

TWO = ["CPU:0", "CPU:1"]
FORMS = {
    "data": lambda: tfparallel.data_parallel(build_model, devices=TWO),
    "model": lambda: tfparallel.model_parallel(build_model, TWO),
    "pipeline": lambda: tfparallel.pipeline_parallel(build_model, TWO, num_micro_batches=2),
    "tensor": lambda: tfparallel.tensor_parallel(build_model, TWO),
    "hybrid": lambda: tfparallel.hybrid_parallel(build_model, {"data": 2}, devices=TWO),
}


def rewrite_options():
    """By what TensorFlow prepares a function that is called here."""
    serialized = context.context().function_call_options.config_proto_serialized
    return ConfigProto.FromString(serialized).graph_options.rewrite_options


def build_model():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, activation="relu", name="filter")(inputs)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="dense")(x))


def traced_with(model):
    """By what a step is prepared: it is traced, the loss with it, when it is called."""
    seen = []

    def loss(targets, outputs):
        seen.append(rewrite_options())
        return tf.reduce_mean(tf.square(outputs - targets), axis=-1)

    model.compile("sgd", loss)
    model.fit(np.ones((8, 8, 8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_several_cpus_is_prepared_in_one_round(form):
    before = rewrite_options()
    options = traced_with(FORMS[form]())[-1]
    assert options.meta_optimizer_iterations == RewriterConfig.ONE
    assert options.memory_optimization == RewriterConfig.NO_MEM_OPT
    assert rewrite_options() == before  # Other functions are prepared as ever.


def test_a_step_of_one_device_is_prepared_as_plain_kerass():
    model = tfparallel.data_parallel(build_model, devices=["CPU:0"])
    assert traced_with(model)[-1] == rewrite_options()


def test_what_the_user_has_set_stays():
    options_before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"layout_optimizer": True, "remapping": False})
    try:
        options = traced_with(FORMS["data"]())[-1]
    finally:
        tf.config.optimizer.set_experimental_options(
            options_before | {"layout_optimizer": True, "remapping": True}
        )
    assert options.layout_optimizer == RewriterConfig.ON
    assert options.remapping == RewriterConfig.OFF


def test_tensorflow_makes_the_same_graph_without_passes_that_are_not_for_cpus():
    """The canary: of these passes the operations of a step do not depend."""
    model = build_model()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def operations(change):
        context.context().enable_graph_collection()
        try:
            with functions_prepared_as(change):
                tf.function(step, autograph=False)(tf.ones((4, 8, 8, 3)), tf.ones((4, 2)))
            graphs = context.context().export_run_metadata().function_graphs
        finally:
            context.context().disable_graph_collection()
        return collections.Counter(
            node.op for graph in graphs for node in graph.post_optimization_graph.node
        )

    def without_passes(config):
        graph_preparation.for_cpus(config)
        config.graph_options.rewrite_options.meta_optimizer_iterations = 0  # As ever: two rounds.

    assert operations(without_passes) == operations(lambda config: None)
