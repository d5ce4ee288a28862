"""Random numbers in replicas: those that one device draws for the same rows.

Keras counts its draws in a variable of which every replica holds a copy, so under `tf.distribute`
all replicas draw the same mask. Here

* a dropout mask is drawn by the global index of the examples: each replica draws only those
  elements of the one-device mask that belong to its rows;
* any other draw is divided by its shape (`row_draws.py`).
"""

import contextlib
import copy
import functools
import math
import random
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfparallel.data import provenance
from tfparallel.data import rows_of_replica as shards
from tfparallel.extend import extend
from tfparallel.judge.propagation import is_judging, note
from tfparallel.replication.row_draws import DividedSeeds
from tfparallel.seams.keras import (
    GLOBAL_SEED_GENERATOR,
    get_global,
    make_global_seed_generator,
    noise_shape_of,
    set_global,
)

_PHILOX_WORDS = 4  # 32-bit numbers per step of the counter (Salmon et al., SC 2011).
_FOLD = 0x9E3779B1  # Odd, so that r ↦ r·_FOLD is one-to-one modulo 2³².


class ReplicaSeedGenerator(DividedSeeds):
    """Extends `keras.random.SeedGenerator`: a replica draws the values of its own rows."""

    def next(self, ordered=True):
        """Returns the next seed; in a replica, one that draws its rows of the whole batch."""
        seed, shard = super().next(ordered), shards.current()
        if shard is None:
            return self._divided(seed, seed) if is_judging() else seed
        of_batch = seed if shard.stream == 0 else seed + _folded(0, shard.stream, seed.dtype)
        is_first = isinstance(shard.replica, int) and shard.replica == 0
        folded = 0 if is_first else _folded(shard.replica, 0, seed.dtype)
        return self._divided(of_batch, of_batch + folded)

    def next_global(self):
        """Returns the next seed as on one device, for the replica's batch."""
        seed, shard = super().next(), shards.current()
        if shard is None or shard.stream == 0:
            return seed
        return seed + _folded(0, shard.stream, seed.dtype)


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
        with drawing_by(by_replica(copy.copy(global_seed_generator()))):
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


class IndexedDropout:
    """Extends `keras.layers.Dropout` and its spatial variants to use the global batch's mask."""

    def call(self, inputs, training=False):
        """Drops the same units as one device, on this replica's rows."""
        shard = shards.current()
        inputs = tf.convert_to_tensor(inputs)  # A layer may drop parts of a weight.
        note(self, inputs)
        if shard is None or not training or not 0 < self.rate < 1:
            return super().call(inputs, training=training)
        shape, seed = self._mask_shape(inputs), self.seed_generator.next_global()
        uniform = self.uniform(inputs, shape, seed, shard)
        keep = uniform >= tf.constant(self.rate, inputs.dtype)
        scale = tf.constant(1 / (1 - self.rate), inputs.dtype)
        return tf.where(keep, inputs * scale, tf.zeros([], inputs.dtype))

    def uniform(self, inputs: tf.Tensor, shape, seed, shard: shards.Shard) -> tf.Tensor:
        """The random numbers of one device that belong to this replica's rows.

        Args:
            inputs: A tensor with the rows on the same axis as the tensor to drop from.
            shape: The shape of the numbers.
            seed: The seed of the whole batch.
            shard: The replica's part of the batch.
        """
        axis = self._row_axis_of(inputs, shard)
        if axis is None or (self.noise_shape or (None,) * len(shape))[axis] == 1:
            # One mask for all examples: for a tensor without rows, or by its noise shape.
            return uniform_of_rows(shape, inputs.dtype, seed, shard._replace(start=0, num_rows=1))
        if axis == 0:
            return uniform_of_rows(shape, inputs.dtype, seed, shard)
        # A replica's rows are not contiguous, so the numbers of all rows are drawn.
        num_rows = shard.num_drawn_rows
        num_rows = shard.num_global_rows if num_rows is None else num_rows
        everything = [*shape[:axis], num_rows, *shape[axis + 1 :]]
        whole = shard._replace(start=0, num_rows=1)
        values = uniform_of_rows(everything, inputs.dtype, seed, whole)
        begin = tf.one_hot(axis, len(shape), shard.first_row_used, dtype=tf.int32)
        return tf.slice(values, begin, tf.stack(shape))

    def _row_axis_of(self, inputs, shard) -> int | None:
        """The axis of the rows; for an eager tensor, the one that the judge found."""
        axes = getattr(self, "_row_axes", {0})
        if tf.is_symbolic_tensor(inputs):
            return _row_axis(inputs, shard)
        if len(axes) > 1:
            raise ValueError(
                f"Layer '{self.name}' is called on tensors whose batch axes differ or are missing, "
                "and an eager step cannot tell them apart. A traced step is required. Received: "
                f"run_eagerly=True, axes {axes}. Compile with run_eagerly=False, or use a separate "
                "dropout layer for each tensor."
            )
        return next(iter(axes))

    def _mask_shape(self, inputs):
        """The shape of the mask of this replica's rows."""
        noise_shape = noise_shape_of(self, inputs)
        shape = keras.ops.shape(inputs)
        return [shape[axis] if size is None else size for axis, size in enumerate(noise_shape)]


def _row_axis(inputs: tf.Tensor, shard: shards.Shard) -> int | None:
    """The axis of a tensor that holds the examples; None if there is none.

    If batches of a graph may have any size, it is the axis of unknown size. Axis 0 may hold a
    multiple of the rows, with other axes folded into it.

    Raises:
        ValueError: If the tensor depends on the rows, and several axes may hold them.
    """
    if tf.is_symbolic_tensor(inputs) and not provenance.made_of(inputs):
        return None
    if inputs.shape[0] is None:
        return 0
    unknown = [axis for axis, size in enumerate(inputs.shape) if size is None]
    if len(unknown) == 1:
        return unknown[0]
    raise ValueError(
        "A dropout mask is drawn for the whole batch, but the batch axis of this tensor is "
        f"unknown. It must be axis 0. Received: shape {tuple(inputs.shape)}. Transpose the tensor "
        "before the dropout layer."
    )


def uniform_of_rows(shape, dtype, seed, shard: shards.Shard) -> tf.Tensor:
    """Draws this replica's rows of the uniform tensor that one device draws for the batch.

    Philox numbers are a function of (key, counter), and element i of a tensor comes from counter
    i // w, with w elements per step; so a slice of a tensor can be drawn alone.

    Args:
        shape: Sizes of this replica's part; axis 0 holds `shard.num_rows_used` rows, or a multiple.
        dtype: Floating-point type.
        seed: Seed of the whole tensor, shape `(2,)`.
        shard: The replica's part of the batch.

    Returns:
        Tensor of `shape` with values in [0, 1).
    """
    width = _PHILOX_WORDS // 2 if dtype == tf.float64 else _PHILOX_WORDS
    # Row counts stay in 32 bits, which TensorFlow keeps on the host: a GPU would wait for 64 bits.
    before = shard.start * (shape[0] // shard.num_rows_used)
    row_size = math.prod(shape[1:]) if all(isinstance(size, int) for size in shape[1:]) else None
    if not row_size:
        return _uniform_of_any_size(shape, dtype, seed, before, width)
    step = _long(before // width) * row_size + _long(before % width) * row_size // width
    if row_size % width == 0:
        return _drawn(shape, dtype, seed, step)
    skipped = before % width * (row_size % width) % width
    num_more = -(-width // row_size)  # Enough additional rows to skip part of a step.
    flat = tf.reshape(_drawn([shape[0] + num_more, row_size], dtype, seed, step), [-1])
    return tf.reshape(flat[skipped : skipped - num_more * row_size], shape)


def _uniform_of_any_size(shape, dtype, seed, before, width):
    """Draws the same rows if the size of a row is known only when the step runs."""
    row_size = tf.reduce_prod(_long(tf.stack(shape[1:])))
    first = _long(before) * row_size
    skipped = first % width
    num_elements = _long(shape[0]) * row_size
    flat = _drawn([num_elements + skipped], dtype, seed, first // width)
    return tf.reshape(flat[skipped:], shape)


def _drawn(shape, dtype, seed, step):
    """Draws a tensor from a given step of the counter on."""
    # Keras narrows its seeds like this before a draw.
    seed = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter = counter + tf.cast(tf.stack([step, tf.zeros_like(step)]), counter.dtype)
    return tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.stack(shape),
        key=key,
        counter=counter,
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=dtype,
    )


def _long(number):
    return tf.cast(number, tf.int64)
