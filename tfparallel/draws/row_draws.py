"""Random numbers of a piece of the batch: those that one device draws for the same rows.

A `Seed` tells TensorFlow's draws to come here (`tf.experimental.dispatch_for_api`). A draw whose
shape holds the number of rows is made for the whole batch, and a piece keeps its own rows; any
other draw is that of one device. So a layer that draws through a `keras.random.SeedGenerator`, such
as `GaussianNoise`, `LSTM(dropout=…)`, `RandomFlip` or your own, trains as on one device.

Of some draws it is not known which of their rows belong to which example: those in a backward pass,
those in a loop or a branch unless the judge sees their rows there, and distributions other than
those below. The judge names their layers, whose pieces then fold their index into the seed:
reproducible, but not what one device draws.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.judge.rules.draws import as_number, by_row
from tfparallel.piece import Piece, current
from tfparallel.seams.keras import is_in_call
from tfparallel.tracing import provenance

_PHILOX_WORDS = 4  # 32-bit numbers per step of the counter (Salmon et al., SC 2011).
_UNKNOWN, _NONE = -2, -1  # Axes of a `Seed`.


class Seed(tf.experimental.ExtensionType):
    """The seed of a draw. As a number, or in a function that is not below, it is this piece's own.

    Attributes:
        of_batch: The seed that one device draws with, of shape `(2,)`.
        of_piece: A seed with the piece's index folded in, for draws that cannot be divided.
        source: The name by which the judge knows the generator.
        knows_rows: Whether draws in a backward pass, too, are made among the rows of the call.
        axis: For an eager step, whose shapes are plain numbers: the axis of the draw that holds the
            rows, or -1 for none.
    """

    of_batch: tf.Tensor
    of_piece: tf.Tensor
    source: str
    knows_rows: bool = False
    axis: int = _UNKNOWN

    @property
    def dtype(self) -> tf.DType:
        """The type of both."""
        return self.of_batch.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of both."""
        return self.of_batch.shape

    def both(self, function: Callable[[tf.Tensor], tf.Tensor]) -> "Seed":
        """Returns a seed from a function of this one."""
        seeds = function(self.of_batch), function(self.of_piece)
        return Seed(*seeds, self.source, self.knows_rows, self.axis)

    def number(self) -> tf.Tensor:
        """The seed as a number, which differs between pieces; the judge names the layer."""
        with as_number():
            return tf.identity(self.of_piece)

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(tf.unstack(self.number()))


def _of_number(name):
    def called(seed, *others):
        return getattr(seed.number(), name)(*others)

    return called


# A seed that a layer computes with is a number, as a tensor.
for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(Seed, _name, _of_number(_name))


class DividedSeeds:
    """Extends `keras.random.SeedGenerator` to draw values that belong to rows.

    The judge sets the attributes when it has seen the draws of a call.

    Attributes:
        _draws_by_row: False if a draw cannot be divided into rows.
        _row_axes: The axes that hold the rows in the draws; None for a draw without rows.
    """

    _draws_by_row = True
    _row_axes: frozenset[int | None] = frozenset()
    _source = ""  # The name of the generator for the judge; its `id` by default.

    def _divided(self, of_batch: tf.Tensor, of_piece: tf.Tensor) -> Seed | tf.Tensor:
        """Returns the seed with which a piece draws, from those of Keras's, in 64 bits."""
        axis = _UNKNOWN
        if tf.executing_eagerly() and len(self._row_axes) == 1:
            (row_axis,) = self._row_axes
            axis = _NONE if row_axis is None else row_axis
        if not self._draws_by_row or (tf.executing_eagerly() and axis == _UNKNOWN):
            return of_piece
        return Seed(of_batch, of_piece, self._source or str(id(self)), axis=axis)


def for_both_passes(seed: tf.Tensor | Seed) -> tf.Tensor | Seed:
    """Returns a seed whose draws in the backward pass are made among the rows of the call."""
    if not isinstance(seed, Seed):
        return seed
    return Seed(seed.of_batch, seed.of_piece, seed.source, True, seed.axis)


def narrowed(seed: tf.Tensor | Seed) -> tf.Tensor | Seed:
    """Returns a seed in 32 bits, as `keras.random` narrows it before a draw."""
    return tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)


def _as_tensor(seed, dtype=None, name=None, as_ref=False):
    del as_ref
    return tf.cast(seed.number(), dtype or seed.dtype, name)


tf.register_tensor_conversion_function(Seed, _as_tensor)


@tf.experimental.dispatch_for_api(tf.math.floormod, {"x": Seed})
def _floormod(x, y, name=None):
    return x.both(lambda seed: tf.math.floormod(seed, y, name))


@tf.experimental.dispatch_for_api(tf.cast, {"x": Seed})
def _cast(x, dtype, name=None):
    return x.both(lambda seed: tf.cast(seed, dtype, name))


@tf.experimental.dispatch_for_api(tf.random.stateless_uniform, {"seed": Seed})
def _uniform(shape, seed, minval=0, maxval=None, dtype=tf.float32, name=None, alg="auto_select"):
    dtype = tf.as_dtype(dtype)
    if dtype.is_integer:
        return _drawn(
            seed,
            shape,
            lambda sizes, numbers: tf.random.stateless_uniform(
                sizes, numbers, minval, maxval, dtype, name, alg
            ),
        )
    values = _drawn(
        seed,
        shape,
        lambda sizes, numbers: tf.random.stateless_uniform(sizes, numbers, dtype=dtype, alg=alg),
        lambda sizes, piece: uniform_of_rows(sizes, dtype, seed.of_batch, piece),
    )
    low = tf.convert_to_tensor(minval, dtype)
    high = tf.convert_to_tensor(1 if maxval is None else maxval, dtype)
    return tf.add(values * (high - low), low, name)


@tf.experimental.dispatch_for_api(tf.random.stateless_normal, {"seed": Seed})
def _normal(shape, seed, mean=0.0, stddev=1.0, dtype=tf.float32, name=None, alg="auto_select"):
    return _scaled(tf.random.stateless_normal, shape, seed, mean, stddev, dtype, name, alg)


@tf.experimental.dispatch_for_api(tf.random.stateless_truncated_normal, {"seed": Seed})
def _truncated_normal(
    shape, seed, mean=0.0, stddev=1.0, dtype=tf.float32, name=None, alg="auto_select"
):
    draw = tf.random.stateless_truncated_normal
    return _scaled(draw, shape, seed, mean, stddev, dtype, name, alg)


def _scaled(draw, shape, seed, mean, stddev, dtype, name, alg):
    """Draws standard values, and scales them here: the piece knows its own means only."""
    values = _drawn(seed, shape, lambda sizes, numbers: draw(sizes, numbers, dtype=dtype, alg=alg))
    return tf.add(values * tf.convert_to_tensor(stddev, dtype), mean, name)


@tf.experimental.dispatch_for_api(tf.nn.experimental.stateless_dropout, {"seed": Seed})
def _dropout(x, rate, seed, rng_alg=None, noise_shape=None, name=None):
    x = tf.convert_to_tensor(x)
    shape = sizes = keras.ops.shape(x)
    if noise_shape is not None:
        shape = noise_shape  # Of fewer axes, perhaps: the mask is broadcast.
    if isinstance(shape, tuple | list) and len(shape) == len(sizes):
        shape = [of if size is None else size for size, of in zip(shape, sizes, strict=True)]
    uniform = _uniform(shape, seed, dtype=x.dtype, alg=rng_alg or "auto_select")
    scaled = x * tf.convert_to_tensor(1 / (1 - rate), x.dtype)
    is_kept = uniform >= tf.convert_to_tensor(rate, x.dtype)
    return tf.where(is_kept, scaled, tf.zeros([], x.dtype), name=name)


def _drawn(
    seed: Seed,
    shape: Sequence | tf.Tensor,
    draw: Callable[[Any, tf.Tensor], tf.Tensor],
    draw_rows: Callable[[list, Piece], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Draws the values of this piece's rows.

    Args:
        seed: The seed.
        shape: The shape of the piece's values.
        draw: Draws values of a shape with a seed of TensorFlow's.
        draw_rows: Draws only those of a piece's rows, on axis 0, if they can be drawn alone.
    """
    sizes, piece = _sizes(shape), current()
    if sizes is None or len(axes := _axes_with_rows(sizes, seed)) > 1:
        return draw(shape, seed.of_piece)
    axis = axes[0] if axes else None
    if piece is None or axis is None:
        with by_row(axis, seed.source, seed.knows_rows or is_in_call()):
            return draw(shape, seed.of_batch)
    if axis == 0 and draw_rows is not None:
        return draw_rows(sizes, piece)
    of_row = sizes[axis] // piece.num_rows_used  # An axis may hold several values of each row.
    num_rows = piece.num_global_rows if piece.num_drawn_rows is None else piece.num_drawn_rows
    whole = [*sizes[:axis], num_rows * of_row, *sizes[axis + 1 :]]
    begin = [0] * len(sizes)
    begin[axis] = piece.first_row_used * of_row
    return tf.slice(draw(tf.stack(whole), seed.of_batch), tf.stack(begin), tf.stack(sizes))


def _axes_with_rows(sizes, seed) -> list[int]:
    if tf.executing_eagerly():
        return [] if seed.axis == _NONE else [seed.axis]
    return [
        axis
        for axis, size in enumerate(sizes)
        if tf.is_symbolic_tensor(size) and provenance.counts_rows(size)
    ]


def _sizes(shape) -> list | None:
    """The sizes of a shape, numbers where they are known; None if it is not known how many."""
    if not tf.is_symbolic_tensor(shape):
        return list(shape.numpy() if tf.is_tensor(shape) else shape)
    if shape.op.type == "Shape" and shape.op.inputs[0].shape.rank is not None:
        known = list(shape.op.inputs[0].shape)
    else:
        known = tf.get_static_value(shape, partial=True)
    if known is None:
        return None
    return [shape[axis] if size is None else int(size) for axis, size in enumerate(known)]


def uniform_of_rows(shape, dtype, seed, piece: Piece) -> tf.Tensor:
    """Draws this replica's rows of the uniform tensor that one device draws for the batch.

    Philox numbers are a function of (key, counter), and element i of a tensor comes from counter
    i // w, with w elements per step; so a slice of a tensor can be drawn alone.

    Args:
        shape: Sizes of this replica's part; axis 0 holds `piece.num_rows_used` rows, or a multiple.
        dtype: Floating-point type.
        seed: Seed of the whole tensor, shape `(2,)` and int32.
        piece: The replica's part of the batch.

    Returns:
        Tensor of `shape` with values in [0, 1).
    """
    width = _PHILOX_WORDS // 2 if dtype == tf.float64 else _PHILOX_WORDS
    # Row counts stay in 32 bits, which TensorFlow keeps on the host: a GPU would wait for 64 bits.
    before = piece.start * (shape[0] // piece.num_rows_used)
    row_size = math.prod(shape[1:]) if all(isinstance(size, int) for size in shape[1:]) else None
    if not row_size:
        return _uniform_of_any_size(shape, dtype, seed, before, width)
    step = _long(before // width) * row_size + _long(before % width) * row_size // width
    if row_size % width == 0:
        return _from_step(shape, dtype, seed, step)
    skipped = before % width * (row_size % width) % width
    num_more = -(-width // row_size)  # Enough additional rows to skip part of a step.
    flat = tf.reshape(_from_step([shape[0] + num_more, row_size], dtype, seed, step), [-1])
    return tf.reshape(flat[skipped : skipped - num_more * row_size], shape)


def _uniform_of_any_size(shape, dtype, seed, before, width):
    """Draws the same rows if the size of a row is known only when the step runs."""
    row_size = tf.reduce_prod(_long(tf.stack(shape[1:])))
    first = _long(before) * row_size
    skipped = first % width
    num_elements = _long(shape[0]) * row_size
    flat = _from_step([num_elements + skipped], dtype, seed, first // width)
    return tf.reshape(flat[skipped:], shape)


def _from_step(shape, dtype, seed, step):
    """Draws a tensor from a given step of the counter on."""
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
