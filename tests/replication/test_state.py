"""What replicas wrote to their own copies becomes the batch's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.piece import Piece
from tfparallel.replication import state
from tfparallel.strategies import variables

# Four rows: one on the first replica, three on the second.
PIECES = [Piece(0, 2, 0, 1, 4), Piece(1, 2, 1, 3, 4)]


class Watching(keras.layers.Layer):
    """Has a state of each kind."""

    def __init__(self):
        super().__init__()
        self.average = self.add_weight(shape=(2,), initializer="ones", trainable=False)
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.seen = keras.metrics.Sum(name="seen")
        self.seed_generator = keras.random.SeedGenerator(5)


@pytest.fixture(name="layer")
def make_layer():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = Watching()
        layer.built = True
        return layer


def one_worker(terms):
    return [term[None] for term in terms]


def written(layer, write, own_pieces=PIECES, of_workers=one_worker, rows=(4,)):
    """Has each replica write, as `write(k)` does, and combines what they wrote."""
    call_state, scopes = state.CallState(layer), []
    for k in range(2):
        with state.ReplicaScope(k) as scope:
            write(k)
        scopes.append(scope)
    call_state.combine(scopes, own_pieces, of_workers, lambda: rows)


def copies(variable):
    return [np.asarray(copy).tolist() for copy in variables.copies(variable)]


def test_a_replica_writes_its_own_copy(layer):
    with state.ReplicaScope(1):
        layer.average.assign([5.0, 6.0])
    assert copies(layer.average) == [[1.0, 1.0], [5.0, 6.0]]


def test_floating_states_are_averaged_by_rows(layer):
    written(layer, lambda k: layer.average.assign([4.0 * k, 8.0]))
    assert copies(layer.average) == [[3.0, 8.0]] * 2  # (1 · 0 + 3 · 4) / 4


def test_integers_are_those_of_the_first(layer):
    written(layer, lambda k: layer.count.assign(7 + k))
    assert copies(layer.count) == [7, 7]


def test_a_metric_grows_by_what_all_replicas_add(layer):
    total = layer.seen.variables[0]
    for _ in range(2):  # What was there before counts once.
        written(layer, lambda k: total.assign(variables.copies(total)[k] + 10.0**k))
    assert copies(total)[0] == 22.0


def test_a_replica_without_rows_adds_nothing(layer):
    total, idle = layer.seen.variables[0], [Piece(0, 2, 0, 0, 1), Piece(1, 2, 0, 1, 1)]
    written(layer, lambda k: total.assign(10.0**k), idle)
    assert copies(total)[0] == 10.0


def test_seeds_are_left_as_they_are(layer):
    """They are equal on all replicas."""
    seed = layer.seed_generator.state
    written(layer, lambda _: seed.assign([1, 2]))
    assert copies(seed) == [[1, 2]] * 2


def test_workers_join_their_terms(layer):
    """Of two workers with the same two replicas each, half of the batch each."""
    whole = [Piece(0, 4, 0, 1, 8), Piece(1, 4, 1, 3, 8)]

    def of_both(terms):
        return [np.stack([term, term]) for term in terms]

    written(layer, lambda k: layer.average.assign([4.0 * k, 8.0]), whole, of_both, (4, 4))
    assert copies(layer.average) == [[3.0, 8.0]] * 2
    total = layer.seen.variables[0]
    written(layer, lambda k: total.assign(variables.copies(total)[k] + 10.0**k), whole, of_both)
    assert copies(total)[0] == 22.0


def test_workers_weigh_in_with_their_rows(layer):
    """The other one has twelve rows, and has written 7 and 8."""

    def with_another(terms):
        return [np.stack([term, [7.0, 8.0]]) for term in terms]

    written(
        layer, lambda k: layer.average.assign([4.0 * k, 8.0]), PIECES, with_another, rows=(4, 12)
    )
    assert copies(layer.average) == [[6.0, 8.0]] * 2  # (4 · 3 + 12 · 7) / 16


@pytest.mark.parametrize("value", [0.1, 0.9, 1e300, np.inf])
@pytest.mark.parametrize("first_rows", [1, 0])
def test_equal_states_stay_as_they_are(value, first_rows):
    """Story: three thirds of a count of 0.9 were 0.8999999999999999."""
    values = [value if first_rows else np.nan, value, value]
    average = state.averaged(tf.unstack(tf.constant(values, "float64")), [first_rows, 1, 1])
    assert average.numpy() == value


def test_without_any_rows_the_first_state_counts():
    assert state.averaged(tf.unstack(tf.constant([2.5, np.nan])), [0, 0]).numpy() == 2.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_average_is_of_the_type_of_the_state(dtype):
    values = tf.unstack(tf.constant([1.0, 3.0, 6.0], dtype))
    result = state.averaged(values, [100_000, 100_000, 400_000])
    assert result.dtype == dtype
    assert float(result) == pytest.approx(14 / 3, rel=1e-2 if dtype == "bfloat16" else 1e-3)
