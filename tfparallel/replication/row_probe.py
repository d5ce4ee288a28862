"""Whether a call treats each example by itself: one piece and several of the same rows, compared.

    rows x  (B, …)  ──▶  f(x)                        as on one device
          x_0, x_1  ──▶  f(x_0), f(x_1)  ──▶ joined  as the form computes it

A layer that subtracts the mean of the batch, keeps its maximum, or adds a sum of its rows as a
loss gives something else in pieces, and would train to other weights without a word. The rows are
made up, of the types of the call's arguments: uniform numbers, small and positive or large and of
both signs, since a layer may show nothing below a threshold; ids of 0 and 1. Nothing is read from
the data, and nothing of the model changes: what the pieces write is restored. Weights near zero are
made up, too.

Random layers other than dropout are switched off, and batch normalization takes its moving
averages: what these do across rows is this package's own. Where a layer draws whatever `training`
says, shapes alone are compared.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfparallel.seams.tensorflow import wait_for_other_processes
from tfparallel.strategies import variables

__all__ = ["Difference", "NotTried", "QuietInProbe", "first_difference", "is_probing", "made_up"]

# Another order of summation changes less; what looks at other rows changes more.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
_COARSE = 5e-2
_LARGEST_MADE_UP, _SMALL = 1 << 20, 1e-2  # Elements of a weight, and their values.
_LENGTH, _SIZE = 8, 32  # For axes of no known size: of sequences, of pictures.
_LARGE = 100.0  # Numbers of every other batch, in both directions.


class Difference(NamedTuple):
    """What differs between the whole and the pieces.

    Attributes:
        what: "output 0", "a loss that it adds", "variable 'path'", "what is to be joined".
        relative: How far, relative to the largest element; infinite for other shapes.
        error: What the pieces raised, if they cannot be computed at all.
    """

    what: str
    relative: float
    error: str = ""

    def __str__(self):
        if self.error:
            return f"computed in pieces it fails: {self.error}"
        return (
            f"computed in pieces, {self.what} differs from the whole batch's by "
            f"{self.relative:.1g}, relative"
        )


class NotTried(Exception):
    """The made-up rows, as one piece or in several, were not computed."""


class _State:
    """Process-wide, not by thread: replicas run in threads that inherit nothing."""

    is_on = False
    num_dropped = 0


def is_probing() -> bool:
    """Whether a probe is being traced."""
    return _State.is_on


def note_dropout() -> None:
    """Called by each draw of a dropout layer, whose mask is compared like all else."""
    _State.num_dropped += 1


@contextlib.contextmanager
def _probing() -> Iterator[None]:
    _State.is_on, _State.num_dropped = True, 0
    try:
        yield
    finally:
        _State.is_on = False


class QuietInProbe:
    """Extends a layer: while a probe is traced, it acts as in inference."""

    def call(self, *args, **kwargs):
        """Calls the layer, without training where a probe calls it."""
        if _State.is_on and kwargs.get("training"):
            kwargs["training"] = False
        return super().call(*args, **kwargs)


def made_up(
    spec: tf.TensorSpec, num_rows: int, seed: tuple[int, int], words: Sequence[str] = ()
) -> np.ndarray | None:
    """Returns rows of a type, or None where the type is not supported.

    Args:
        spec: The type.
        num_rows: How many.
        seed: Of NumPy's generator: which argument, and which batch.
        words: What the model knows among strings.
    """
    if isinstance(spec, tf.RaggedTensorSpec):
        return _ragged(spec, num_rows, seed, words)
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return None
    unknown = _SIZE if spec.shape.rank >= 4 else _LENGTH
    shape = [num_rows if axis == 0 else size or unknown for axis, size in enumerate(spec.shape)]
    random = np.random.default_rng(seed)
    drawn = random.uniform(0, 2, shape)
    if spec.dtype.is_floating and seed[1] % 2:
        drawn = _LARGE * (drawn - 1)
    if drawn.ndim > 1:
        drawn[1::2, drawn.shape[1] // 2 :] = 0  # As padded rows end.
    if spec.dtype == tf.string:
        return random.choice(["a", "b a", "c b a", *words], shape)
    if spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool:
        return np.floor(drawn).astype(bool) if spec.dtype.is_bool else drawn.astype(
            spec.dtype.as_numpy_dtype
        )
    return None


def _ragged(spec, num_rows, seed, words) -> tf.RaggedTensor | None:
    """Rows of unequal lengths; the last one is the longest, so that a piece alone has it."""
    if spec.ragged_rank != 1:
        return None
    lengths = [1 + row % 2 for row in range(num_rows - 1)] + [_LENGTH]
    flat = made_up(tf.TensorSpec([None, *spec.shape[2:]], spec.dtype), sum(lengths), seed, words)
    if flat is None:
        return None
    return tf.RaggedTensor.from_row_lengths(
        tf.constant(flat), tf.constant(lengths, spec.row_splits_dtype)
    )


def first_difference(
    whole: Callable[..., tuple[Any, Sequence[tf.Tensor]]],
    in_pieces: Callable[..., tuple[Any, Sequence[tf.Tensor]]],
    specs: Sequence[tf.TensorSpec],
    batches: Sequence[Sequence[np.ndarray]],
    written: Sequence[keras.Variable],
    weights: Sequence[keras.Variable] = (),
    compute_dtype: str = "float32",
) -> Difference | None:
    """Runs both and compares; None where nothing differs.

    Args:
        whole: Takes tensors, returns outputs and the losses that layers added.
        in_pieces: The same, as the form computes it; it may write variables.
        specs: The types of the tensors.
        batches: The tensors, several times: a batch may happen to show nothing.
        written: The variables that either may write.
        weights: What is trained. Where it is zero, as a bias is at first, it hides what it
            multiplies; it has made-up values for the time being.
        compute_dtype: The coarsest type that is computed in.

    Raises:
        NotTried: If none of these batches can be computed.
    """
    updates: dict[str, tf.Tensor] = {}
    places = {str(place): variable for place, variable in enumerate(written)}

    @tf.function(autograph=False)
    def one_piece(*tensors):
        scope = keras.StatelessScope(collect_losses=True)
        with scope:
            outputs, _ = whole(*tensors)
        after = {place: scope.get_current_value(v) for place, v in places.items()}
        updates.update({place: value for place, value in after.items() if value is not None})
        return keras.tree.flatten(outputs), list(scope.losses), dict(updates)

    @tf.function(autograph=False)
    def pieces(*tensors):
        outputs, losses = in_pieces(*tensors)
        return keras.tree.flatten(outputs), list(losses)

    tolerance = _TOLERANCE.get(compute_dtype, _COARSE)
    with _probing():
        try:
            first = one_piece.get_concrete_function(*specs)
            draws = _num_draws(first.graph) > _State.num_dropped
            try:
                second = pieces.get_concrete_function(*specs)
            except Exception as error:
                if None in (spec.shape[0] for spec in specs):
                    raise
                # The model declares its batch size, and is not computed for another one.
                said = " ".join(str(error).split())[:200]
                return Difference("what is to be joined", float("inf"), said)
        except Exception as error:
            raise NotTried(f"{type(error).__name__}: {error}") from error
        changed = [places[place] for place in updates]
        # One that lies in parts has no value of its own.
        parts = [part for weight in weights for part in getattr(weight, "parts", (weight,))]
        made = list(filter(_is_small, parts))
        num_tried = 0
        for rows in batches:
            with _restored([*changed, *made]):
                _make_up(made)
                wait_for_other_processes()  # Where the layers may be.
                tensors = [each if tf.is_tensor(each) else tf.constant(each) for each in rows]
                try:
                    expected = first(*tensors)
                except Exception as error:  # Made-up rows may be none that the model takes.
                    if rows is batches[-1] and not num_tried:
                        raise NotTried(f"{type(error).__name__}: {error}") from error
                    continue
                num_tried += 1
                try:
                    received = second(*tensors)
                except tf.errors.InvalidArgumentError:
                    return Difference("what is to be joined", float("inf"))
                except tf.errors.OpError as error:  # Out of memory, for one.
                    raise NotTried(f"{type(error).__name__}: {error.message}") from error
                states = {place: variables.copies(places[place])[0].numpy() for place in updates}
            for what, one, other in _pairs(expected, received, states, places):
                one, other = _array(one), _array(other)
                relative = _distance(one, other, only_shapes=draws)
                if relative > max(tolerance, _TOLERANCE.get(one.dtype.name, _COARSE)):
                    return Difference(what, relative)
    return None


def _array(value) -> np.ndarray:
    # Of TensorFlow 2.19 `np.asarray` takes no scalar in bfloat16.
    return np.asarray(value.numpy() if tf.is_tensor(value) else value)


def _pairs(expected, received, states, places) -> Iterator[tuple[str, Any, Any]]:
    """What the whole and the pieces made: outputs, losses, and what they wrote."""
    for i, pair in enumerate(zip(expected[0], received[0], strict=False)):
        yield f"output {i}", *pair
    if len(expected[1]) == len(received[1]):
        for pair in zip(expected[1], received[1], strict=True):
            yield "a loss that it adds", *pair
    for place, value in expected[2].items():
        if "seed_generator" not in places[place].path:
            yield f"variable '{places[place].path}'", value, states[place]


@contextlib.contextmanager
def _restored(written: Sequence[keras.Variable]) -> Iterator[None]:
    before = [[copy.numpy() for copy in variables.copies(v)] for v in written]
    try:
        yield
    finally:
        for variable, values in zip(written, before, strict=True):
            for copy, value in zip(variables.copies(variable), values, strict=True):
                copy.assign(value)


def _is_small(variable: keras.Variable) -> bool:
    if np.prod(variable.shape) > _LARGEST_MADE_UP:
        return False
    return np.max(np.abs(variables.copies(variable)[0].numpy()), initial=0.0) < _SMALL


def _make_up(zeros: Sequence[keras.Variable]) -> None:
    for seed, variable in enumerate(zeros):
        value = np.random.default_rng(seed).uniform(-0.5, 0.5, variable.shape)
        for copy in variables.copies(variable):
            copy.assign(tf.cast(value, copy.dtype))


def _num_draws(graph) -> int:
    counted = [op.type for op in graph.get_operations()]
    return sum("Random" in name and not name.startswith("StatelessRandomGet") for name in counted)


def _distance(one: np.ndarray, other: np.ndarray, only_shapes: bool) -> float:
    if one.shape != other.shape:
        return float("inf")
    if only_shapes or one.size == 0:
        return 0.0
    if not np.issubdtype(one.dtype, np.number) and one.dtype.name != "bfloat16":
        return 0.0 if np.array_equal(one, other) else float("inf")
    one, other = one.astype("float64"), other.astype("float64")
    if not np.isfinite(one).all():
        return 0.0  # Of rows that mean nothing to the model.
    scale = np.max(np.abs(one)) or 1.0
    apart = np.max(np.abs(one - other))
    return float(apart / scale) if np.isfinite(apart) else float("inf")
