"""The seeds of random layers in replicas, and Keras's global seed.

Keras counts its draws in a variable of which every replica holds a copy, so under `tf.distribute`
all replicas draw the same mask. Here a replica draws the values of its own rows (`row_draws.py`).
"""

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfparallel.draws.row_draws import DividedSeeds
from tfparallel.extend import extend
from tfparallel.judge.rules.draws import GLOBAL_SEED
from tfparallel.piece import current
from tfparallel.seams.keras import (
    GLOBAL_SEED_GENERATOR,
    get_global,
    make_global_seed_generator,
    set_global,
)

_FOLD = 0x9E3779B1  # Odd, so that r ↦ r·_FOLD is one-to-one modulo 2³².


class ReplicaSeedGenerator(DividedSeeds):
    """Extends `keras.random.SeedGenerator`: a replica draws the values of its own rows."""

    def next(self, ordered=True):
        """Returns the next seed; in a replica, one that draws its rows of the whole batch."""
        seed, piece = super().next(ordered), current()
        if piece is None:
            return seed if tf.executing_eagerly() else self._divided(seed, seed)
        of_batch = seed if piece.stream == 0 else seed + _folded(0, piece.stream, seed.dtype)
        is_first = isinstance(piece.replica, int) and piece.replica == 0
        folded = 0 if is_first else _folded(piece.replica, 0, seed.dtype)
        return self._divided(of_batch, of_batch + folded)


def by_replica(generator: keras.random.SeedGenerator) -> keras.random.SeedGenerator:
    """Extends a generator to draw different numbers on each replica."""
    return extend(generator, ReplicaSeedGenerator)


def global_seed_generator() -> keras.random.SeedGenerator:
    """Keras's global seed generator, created if there is none yet."""
    if get_global(GLOBAL_SEED_GENERATOR) is None:
        python_state = random.getstate()  # An unseeded generator takes its seed from Python's.
        with tf.init_scope():  # Its variable must outlive the step that is being traced.
            make_global_seed_generator()
        random.setstate(python_state)
    return get_global(GLOBAL_SEED_GENERATOR)


def in_pieces(
    global_seed: keras.random.SeedGenerator, mixin: type[DividedSeeds]
) -> keras.random.SeedGenerator:
    """Returns a copy of Keras's global generator, extended; the original stays as it is."""
    return extend(copy.copy(global_seed), mixin, _source=GLOBAL_SEED)


@contextlib.contextmanager
def drawing_by(generator: keras.random.SeedGenerator) -> Iterator[None]:
    """Makes a generator Keras's global one in this thread, within the block."""
    before = get_global(GLOBAL_SEED_GENERATOR)
    set_global(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        set_global(GLOBAL_SEED_GENERATOR, before)


def drawing_by_row(call: Callable) -> Callable:
    """Wraps a call that the judge traces: Keras's global seed draws as in a piece of the batch."""

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        with drawing_by(in_pieces(global_seed_generator(), ReplicaSeedGenerator)):
            return call(*args, **kwargs)

    return wrapped


def hold_state(generator: keras.random.SeedGenerator, strategy) -> None:
    """Gives each replica a copy of a generator's state, if a layer was created outside the scope.

    With a single state, the second replica would read what the first wrote, and draw the next mask.
    """
    state = generator.state
    if getattr(state.value, "distribute_strategy", None) is strategy:
        return
    with tf.init_scope(), strategy.scope(), keras.name_scope(generator.name):
        generator.state = keras.Variable(
            tf.convert_to_tensor(state.value).numpy(),
            dtype=state.dtype,
            trainable=False,
            aggregation="none",
            name=state.name,
        )


def _folded(replica, stream, dtype):
    words = [tf.cast(number, tf.int64) * _FOLD % 2**31 for number in (replica, stream)]
    return tf.cast(tf.stack(words), dtype)
