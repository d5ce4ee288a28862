"""Gradient accumulation: what the replicas add up is reduced once an update, not once a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

THREE = ["CPU:0", "CPU:1", "CPU:2"]
UNITS = 7  # No other tensor of the model has this size in its shape.


def sums_of_gradients(accumulation_steps):
    """The sums over replicas of the kernel's gradient: in the step itself, and in its branches."""
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(UNITS)]), devices=THREE
    )
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation_steps)
    model.compile(optimizer, "mse")
    x, y = np.ones((9, 3), "float32"), np.ones((9, UNITS), "float32")
    model.fit(x, y, batch_size=9, epochs=4, verbose=0)

    @tf.function
    def step(x, y):
        with model.strategy.program():
            return model.train_step((x, y))

    graph = step.get_concrete_function(tf.constant(x), tf.constant(y)).graph
    in_step = sum(
        op.type == "AddN" and len(op.inputs) >= len(THREE) and op.outputs[0].shape == (3, UNITS)
        for op in graph.get_operations()
    )
    return in_step, sum(
        count_sums(function.node_def)
        for function in graph.as_graph_def().library.function
        if "cond" in function.signature.name
    )


def count_sums(nodes):
    """How many nodes add up at least one term of shape (3, UNITS) for each replica."""
    count = 0
    for node in nodes:
        if node.op == "AddN" and node.attr["N"].i >= len(THREE):
            shapes = [shape for shape in node.attr["_output_shapes"].list.shape]
            sizes = [[dim.size for dim in shape.dim] for shape in shapes]
            count += not sizes or [3, UNITS] in sizes
    return count


@pytest.mark.slow
def test_without_accumulation_each_step_sums():
    in_step, _ = sums_of_gradients(None)
    assert in_step > 0


@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [2, 3])
def test_with_accumulation_the_sum_is_in_the_branch_of_the_update(accumulation_steps):
    in_step, in_branches = sums_of_gradients(accumulation_steps)
    assert in_step == 0
    assert in_branches > 0


@pytest.mark.slow
def test_the_step_leaves_the_terms_with_the_optimizer_that_takes_them(monkeypatch):
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(UNITS)]), devices=THREE
    )
    x, y = np.ones((9, 3), "float32"), np.ones((9, UNITS), "float32")
    first, second = (keras.optimizers.SGD(0.1, gradient_accumulation_steps=2) for _ in range(2))
    for optimizer in (first, second):
        model.compile(optimizer, "mse")
        seen = []

        def apply(*args, optimizer=optimizer, seen=seen, apply=optimizer.apply):
            seen.append({key: len(terms) for key, terms in optimizer.pending_sums().items()})
            return apply(*args)

        monkeypatch.setattr(optimizer, "apply", apply)
        model.fit(x, y, batch_size=9, epochs=2, verbose=0)
        assert seen == [{id(variable): len(THREE) for variable in model.trainable_variables}]
        assert not optimizer.pending_sums()
    assert first.pending_sums() is not second.pending_sums()


# --- built before training ---------------------------------------------------------------------


def build_small():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


@pytest.mark.parametrize("form", [tfparallel.data_parallel, tfparallel.tensor_parallel])
def test_an_optimizer_of_another_model_is_refused(form):
    # Keras's own "Unknown variable" came in the first step.
    optimizer = keras.optimizers.Adam()
    optimizer.build(build_small().trainable_variables)
    model = form(build_small, devices=THREE[:2])
    with pytest.raises(ValueError, match="'adam' was not built for all.*Received: 2 weights"):
        model.compile(optimizer, "mse")


def test_slots_of_whole_weights_are_shared_out():
    model = tfparallel.data_parallel(build_small, devices=THREE, shard="optimizer")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    momentum = np.arange(8.0).reshape(4, 2)
    optimizer.variables[-2].assign(momentum)
    model.compile(optimizer, "mse")
    saved = {}
    optimizer.save_own_variables(saved)
    np.testing.assert_array_equal(saved["2"], momentum)
    assert optimizer.variables[-2].shape == (2, 2)  # Of 4 rows each replica has at most 2.


class KeepsMore(keras.optimizers.SGD):
    """Has a variable from the beginning, which `build` does not make."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = self.add_variable((), name="calls")


def test_an_optimizer_that_makes_other_variables_again_is_refused():
    model = tfparallel.data_parallel(build_small, devices=THREE)
    optimizer = KeepsMore(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="Received: 5 variables, and 4 after it was built again"):
        model.compile(optimizer, "mse")
