"""What replicas wrote to their own copies becomes the batch's."""

import keras
import numpy as np
import pytest

import tfparallel
from tfparallel.data.rows_of_replica import Shard
from tfparallel.replication.state import CallState, ReplicaScope
from tfparallel.strategies import variables

# Four rows: one on the first replica, three on the second.
SHARDS = [Shard(0, 2, 0, 1, 4), Shard(1, 2, 1, 3, 4)]


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


def written(layer, write, own_shards=SHARDS, sum_over_workers=list):
    """Has each replica write, as `write(k)` does, and combines what they wrote."""
    state, scopes = CallState(layer), []
    for k in range(2):
        with ReplicaScope(k) as scope:
            write(k)
        scopes.append(scope)
    state.combine(scopes, own_shards, sum_over_workers)


def copies(variable):
    return [np.asarray(copy).tolist() for copy in variables.copies(variable)]


def test_a_replica_writes_its_own_copy(layer):
    with ReplicaScope(1):
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
    total, idle = layer.seen.variables[0], [Shard(0, 2, 0, 0, 1), Shard(1, 2, 0, 1, 1)]
    written(layer, lambda k: total.assign(10.0**k), idle)
    assert copies(total)[0] == 10.0


def test_seeds_are_left_as_they_are(layer):
    """They are equal on all replicas."""
    state = layer.seed_generator.state
    written(layer, lambda _: state.assign([1, 2]))
    assert copies(state) == [[1, 2]] * 2


def test_workers_sum_their_terms(layer):
    """Of two workers with the same two replicas each, half of the batch each."""
    whole = [Shard(0, 4, 0, 1, 8), Shard(1, 4, 1, 3, 8)]
    written(
        layer,
        lambda k: layer.average.assign([4.0 * k, 8.0]),
        whole,
        lambda terms: [2 * term for term in terms],
    )
    assert copies(layer.average) == [[3.0, 8.0]] * 2
