"""Of which kind the readings of a sparse gradient are, as its graph tells."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.collectives.indexed_slices import ONCE, ROWS, readings, with_values

NUM_PLACES = 3


def by_tokens(table, tokens):
    return tf.gather(table, tokens)


def by_places(table, tokens):
    return tf.gather(table, tf.range(NUM_PLACES)) + 0.0 * tf.cast(tokens, tf.float32)[..., None]


def in_both_ways(table, tokens):
    return by_tokens(table, tokens) + by_places(table, tokens)


def as_it_is(slices):
    return slices


def of_a_replica(slices):
    """As of a replica that may have no rows."""
    return with_values(slices, lambda values: tf.math.multiply_no_nan(values, 1.0))


def kinds_of(look_up, change=as_it_is):
    table, kinds = tf.Variable(np.ones((5, 2), "float32")), []

    @tf.function(autograph=False)
    def step(tokens):
        with tf.GradientTape() as tape:
            looked_up = look_up(table, tokens)
        slices = change(tape.gradient(looked_up, table))
        kinds.extend(reading.kind for reading in readings(slices))

    step.get_concrete_function(tf.TensorSpec([None, NUM_PLACES], tf.int32))
    return kinds


@pytest.mark.parametrize(
    ("look_up", "kinds"),
    [(by_tokens, [ROWS]), (by_places, [ONCE]), (in_both_ways, [ROWS, ONCE])],
)
@pytest.mark.parametrize("change", [as_it_is, of_a_replica])
def test_the_operations_behind_the_indices_tell(look_up, kinds, change):
    assert sorted(kinds_of(look_up, change)) == sorted(kinds)


@pytest.mark.parametrize(("look_up", "kind"), [(by_tokens, ROWS), (by_places, ONCE)])
def test_a_function_of_the_layers_own_is_looked_into(look_up, kind):
    assert kinds_of(tf.function(look_up, autograph=False)) == [kind]


@pytest.mark.parametrize("change", [as_it_is, of_a_replica])
def test_two_kinds_within_a_function_are_refused(change):
    """It hands them on as one gradient, of which no part can be told from another."""
    with pytest.raises(ValueError, match="indexed in both ways"):
        kinds_of(tf.function(in_both_ways, autograph=False), change)
