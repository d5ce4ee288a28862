"""What a layer holds beside its variables: what is the same, what is handed on."""

import dataclasses
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.cloning.attributes import CannotCarry, carry_attributes, same


def times(factor):
    return lambda x: x * factor


class Holder(keras.layers.Layer):
    """A layer with attributes that its config does not have."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("value", "other", "is_same"),
    [
        (1, 1, True),
        (1, 2, False),
        (None, 1, False),
        (float("nan"), float("nan"), False),
        ([1, "a"], (1, "a"), True),
        ({"a": [1]}, {"a": [2]}, False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0]), np.array([1.0], "float32"), False),
        (tf.constant([1, 2]), tf.constant([1, 3]), False),
        (tf.constant([1.5], tf.bfloat16), tf.constant([1.5], tf.bfloat16), True),
        (keras.regularizers.L2(0.1), keras.regularizers.L2(0.1), True),
        (keras.regularizers.L2(0.1), keras.regularizers.L2(0.2), False),
        (keras.regularizers.L2(0.1), None, False),
        (times(2), times(2), True),  # One code, one number.
        (times(2), times(3), False),
        (functools.partial(max, 1), functools.partial(max, 1), True),
        (functools.partial(max, 1), functools.partial(max, 2), False),
    ],
)
def test_which_values_are_the_same(value, other, is_same):
    assert same(value, other) is is_same


def test_values_are_carried():
    source = Holder(number=2, words=["a"], table={"b": np.ones(2)}, act=times(3), none=None)
    target = Holder(number=1, words=[], table={}, act=times(2), none=5)
    carry_attributes(source, target)
    assert (target.number, target.words, target.none) == (2, ["a"], None)
    np.testing.assert_array_equal(target.table["b"], np.ones(2))
    assert target.act(1) == 3


class Limits(keras.constraints.Constraint):
    """Of which Keras's own `get_config` says nothing."""

    def __init__(self, limit):
        self.limit = limit


@dataclasses.dataclass
class Noise:
    deviation: float


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return self.factor * x


@pytest.mark.parametrize(
    "make",
    [
        Limits, Noise, lambda n: types.SimpleNamespace(beta=n), keras.losses.Huber,
        lambda n: Scaler(n).apply,
    ],
    ids=["constraint", "dataclass", "namespace", "loss", "method of another"],
)  # fmt: skip
def test_objects_of_values_are_shared_where_they_differ(make):
    """Story: where `get_config` left it out, the clone kept its constructor's default."""
    value, other = make(2.0), make(1.0)
    source, target = Holder(setting=value), Holder(setting=other)
    assert not same(value, other)
    carry_attributes(source, target)
    assert target.setting == value


def test_a_record_is_copied_and_not_shared():
    source, target = Holder(setting=Noise([1.0])), Holder(setting=Noise([2.0]))
    carry_attributes(source, target)
    assert target.setting == source.setting
    assert (
        target.setting is not source.setting
        and target.setting.deviation is not source.setting.deviation
    )


@dataclasses.dataclass
class Node:
    """Of a tree: what is in it refers to it."""

    parent: "Node | None" = None
    children: list = dataclasses.field(default_factory=list)


def test_a_tree_stays_its_own():
    source, target = Holder(tree=Node()), Holder(tree=Node())
    for layer in (source, target):
        layer.tree.children.append(Node(layer.tree))
    tree = target.tree
    carry_attributes(source, target)
    assert target.tree is tree


def test_a_method_of_what_holds_a_layer_stays_its_own():
    """Story: the clone was given the source's, which computed with the source's weights."""
    source, target = Holder(), Holder()
    for layer in (source, target):
        layer.act = Scaler(keras.layers.Dense(2)).apply
    method = target.act
    carry_attributes(source, target)
    assert target.act is method


def test_a_record_that_refers_to_itself_stays_its_own():
    source, target = Holder(setting=Noise(1.0)), Holder(setting=Noise(2.0))
    for layer in (source, target):
        layer.setting.deviation = layer.setting
    record = target.setting
    carry_attributes(source, target)
    assert target.setting is record


def test_tensors_are_shared_and_variables_assigned():
    source = Holder(mean=tf.constant([2.0]), count=tf.Variable([3.0]))
    target = Holder(mean=tf.constant([1.0]), count=tf.Variable([0.0]))
    count = target.count
    carry_attributes(source, target)
    assert float(target.mean[0]) == 2.0
    assert target.count is count
    assert float(count[0]) == 3.0


def test_what_a_layer_closes_over_stays_its_own():
    source, target = Holder(factor=2), Holder(factor=1)
    for layer in (source, target):
        layer.act = functools.partial(lambda layer, x: x * layer.factor, layer)
    with pytest.raises(CannotCarry, match="`act` is .*, which belongs to the original layer"):
        carry_attributes(source, target)


SHARED = keras.layers.Identity(name="held")


def of_a_bound_method():
    call = SHARED.call
    return lambda x: call(x)


@pytest.mark.parametrize(
    "act", [lambda x: SHARED(x), of_a_bound_method(), lambda x, call=SHARED.call: call(x)]
)
def test_a_function_that_computes_with_a_layer_belongs_to_it(act):
    """One that is closed over, or a name of its module."""
    with pytest.raises(CannotCarry, match="`act` is .*, which belongs to the original layer"):
        carry_attributes(Holder(act=act), Holder(act=None))


def test_a_method_that_was_replaced_is_refused():
    """Story: the clone was given the function, which computed with the weights of the layer."""
    source = Holder()
    source.call = lambda x: x * 2
    with pytest.raises(CannotCarry, match="its method `call` was replaced by <function"):
        carry_attributes(source, Holder())


def test_a_variable_that_the_copy_does_not_have():
    with pytest.raises(CannotCarry, match="`count` is a `tf.Variable` that the clone does not"):
        carry_attributes(Holder(count=tf.Variable(1.0)), Holder())
