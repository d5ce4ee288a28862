"""Decides how a step computes its loss, and why.

| way | computation | used |
| --- | --- | --- |
| by pieces | losses and metrics of each piece's rows are added up | by default |
| from joined outputs | all rows of the outputs are joined on one device | otherwise |

A metric that is not a sum over the rows gets the joined rows of the outputs that it reads; the loss
and the other metrics are still computed by pieces.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfparallel.data.partition import RowRange, row_ranges
from tfparallel.device_memory import memory_bytes
from tfparallel.device_names import canonical
from tfparallel.extend import attach, attached
from tfparallel.seams.compiled import compiled_loss, compiled_metrics
from tfparallel.seams.functional import as_outputs, functional_of
from tfparallel.seams.keras import mask_of
from tfparallel.step.additivity import AddsUp, adds_up, why_not_by_rows
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.row_counts import (
    ALIGNED,
    AS_MANY,
    FIXED,
    known_counts,
    row_counts,
    why_unaligned,
)
from tfparallel.texts import first_to_last
from tfparallel.user_log import notice


class Way(NamedTuple):
    """How a step computes its loss and its metrics.

    Attributes:
        rows_stay: Whether the loss is computed by pieces; else all outputs are joined.
        metrics: The metrics, divided into those computed by pieces and the others.
        why_joined: Why all outputs, or those of some metrics, are joined; None if none are.
    """

    rows_stay: bool
    metrics: StepMetrics
    why_joined: str | None

    @property
    def all_stay(self) -> bool:
        """Whether no outputs are joined."""
        return self.why_joined is None


class WhereRowsMeet:
    """Extends a compiled Keras model whose step processes the batch in pieces, by rows."""

    _workers = None  # The process group of the job; None for one process.
    _batch_sizes: Mapping[str, int | None] = {}  # The rows of a full batch, by method.

    def _look_at(self, call):
        if call.kind in ("fit", "evaluate"):
            # A step with a short last batch does not see the size of a full one.
            call.enter(self._knowing_batches(call.kind, call.full_batch_size()))
        super()._look_at(call)

    def _begin(self, call):
        call.enter(_in_plain_words())
        super()._begin(call)

    def _knowing_batches(self, kind: str, size: int | None) -> AbstractContextManager[None]:
        """Sets the number of rows of a full batch of "fit" or "evaluate" within the block."""
        return attached(self, _batch_sizes=self._batch_sizes | {kind: size})

    @property
    def _meeting_device(self) -> str:
        """The device that joins the outputs of all rows."""
        return self._last_device

    @property
    def _is_chief(self) -> bool:
        """Whether this process prints and writes for all workers."""
        return self._workers is None or self._workers.worker_index == 0

    @property
    def why_joined(self) -> str | None:
        """Why the steps of `fit`, or of `evaluate`, joined the outputs of all rows.

        None if neither did, or neither has run since `compile`.
        """
        reasons = self._reasons
        return reasons.get("fit") or reasons.get("evaluate")

    @property
    def _reasons(self) -> dict[str, str | None]:
        """Why outputs were joined, for "fit" and "evaluate", since the last `compile`."""
        loss, reasons = getattr(self, "_known_reasons", (None, {}))
        return reasons if loss is compiled_loss(self) else {}

    def _way(self, data, kind: str) -> Way:
        """How a step on such data computes its loss and metrics; reports joined outputs once.

        Args:
            data: A batch, as the step receives it.
            kind: "fit" or "evaluate".
        """
        way, reasons = self._way_of(data), self._reasons
        if kind not in reasons or reasons[kind] != way.why_joined:
            description = self._describe(way, data, kind)
            attach(self, _known_reasons=(compiled_loss(self), reasons | {kind: way.why_joined}))
            is_news = not way.all_stay and way.why_joined not in reasons.values() and self._is_chief
            tell = notice if is_news else logging.info
            tell(f"Model '{self.name}', {kind}: {description}.")
        return way

    def _way_of(self, data) -> Way:
        reason = why_not_by_rows(self) or why_unaligned(data)
        joined: dict[int, str] = {}
        if reason is None:
            reason, joined, _ = self._adds_up(data)
        metrics = StepMetrics.divided(compiled_metrics(self), () if reason else joined)
        return Way(reason is None, metrics, reason or next(iter(joined.values()), None))

    def _describe(self, way: Way, data, kind: str) -> str:
        if way.all_stay:
            return "the outputs stay on the devices that computed them"
        if not way.rows_stay:
            return (
                "gathering the outputs of the whole batch on one "
                f"device{self._how_large(data, kind)}, because {way.why_joined}"
            )
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs, _ = self._outputs_of(keras.tree.map_structure(type_of, x))
        places = way.metrics.places(outputs)
        names = getattr(self, "output_names", None) or []
        which = "the outputs"
        if len(names) == len(keras.tree.flatten(outputs)) > len(places):
            which = " and ".join(f"output '{names[place]}'" for place in places)
        how_large = self._how_large(data, kind, places)
        return (
            f"gathering {which} for the whole batch on one device{how_large}, only for metrics, "
            f"because {way.why_joined}"
        )

    def _how_large(self, data, kind: str, places: Collection[int] | None = None) -> str:
        """The memory of a batch's joined outputs, as text.

        Args:
            data: The batch.
            kind: "fit" or "evaluate".
            places: The indices of the flat outputs; all by default.

        Raises:
            ValueError: If the device, or the machine, has less memory.
        """
        if not self.built:  # Inferring the outputs would build it, which only its step may do.
            return ""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        try:
            outputs, _ = self._outputs_of(keras.tree.map_structure(type_of, x))
        except Exception:  # If the program is wrong, Keras raises later.
            return ""
        flat = keras.tree.flatten(outputs)
        joined = flat if places is None else [flat[place] for place in places]
        sizes = [_bytes_of_a_row(output) for output in joined]
        if None in sizes:
            return ""
        num_rows = next(iter(row_counts(x)), None)
        if not isinstance(num_rows, int):
            num_rows = self._batch_sizes.get(kind)
        if num_rows is None:
            return f" ({self._sizes_in_words(sizes, 'per row')})"
        memory, whose = _memory_of(self._meeting_device)
        if num_rows * sum(sizes) > memory:
            raise ValueError(
                f"The outputs of the whole batch must fit the memory of one device ({memory:,} "
                f"bytes of {whose}) for the losses and metrics of model '{self.name}'. Received: a "
                f"batch of {num_rows:,} rows of {sum(sizes):,} bytes. Use smaller batches, or "
                "Keras's own losses and metrics, which need no gathering."
            )
        return f" ({self._sizes_in_words([num_rows * of_row for of_row in sizes], 'per batch')})"

    def _sizes_in_words(self, sizes: Sequence[int], of_what: str) -> str:
        """The bytes of all outputs, and of each if the model names several."""
        total = f"{sum(sizes):,} bytes {of_what}"
        names = getattr(self, "output_names", [])
        if len(sizes) < 2 or len(names) != len(sizes):
            return total
        each = [f"'{name}' {size:,}" for name, size in zip(names, sizes, strict=True)]
        return f"{total}: {first_to_last(each)}"

    def _adds_up(self, data) -> AddsUp:
        """The losses and metrics that do not add up; judged once for each kind of data."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        types = keras.tree.map_structure(type_of, (x, y, sample_weight))
        loss, results = getattr(self, "_known_to_add_up", (None, {}))
        if loss is not compiled_loss(self):
            results = {}
        row_counts = self._known_row_counts(data)
        key = f"{row_counts} of {types}"
        if key not in results:
            try:
                outputs, masks = self._outputs_of(types[0])
            except Exception as error:  # If the program is wrong, Keras raises later.
                reason = f"the shapes of its outputs are unknown: {str(error)[:200]}"
                results[key] = AddsUp(reason, {})
            else:
                results[key] = adds_up(self, types[1], outputs, types[2], masks, row_counts)
            attach(self, _known_to_add_up=(compiled_loss(self), results))
        if results[key].drawing is not None:
            raise ValueError(
                "A loss or metric must compute with the same numbers each time that it is traced, "
                "since a step in pieces is not traced as often as a step on one device. Received: "
                f"{results[key].drawing} of model '{self.name}', which draws numbers with NumPy or "
                "Python's `random`, or counts its calls. Draw with `keras.random` and a "
                "`keras.random.SeedGenerator`, add the numbers to the targets, or train on one "
                "device."
            )
        return results[key]

    def _known_row_counts(self, data) -> list[int]:
        """The numbers of rows that Python knows: the batch's; those of pieces in an eager step."""
        counts = known_counts(data)
        if tf.executing_eagerly():
            pieces = [size for number in counts for _, size in self._pieces_of(number)]
            counts |= {max(size, 1) for size in pieces}
        return sorted(counts)

    def _pieces_of(self, num_rows: int) -> list[RowRange]:
        """The rows of each piece of a batch."""
        return row_ranges(num_rows, self.layout.mesh.data * self.layout.num_micro_batches)

    def _outputs_of(self, types):
        """The types of the outputs, and of their masks, for inputs of these types.

        Returns:
            The types in the outputs' structure, and a flat list with None for an output without a
            mask.
        """
        flat = functional_of(self).outputs
        return keras.tree.map_structure(type_of, as_outputs(self, flat)), masks_of(flat)


def _bytes_of_a_row(output: tf.TensorSpec | None) -> int | None:
    """The bytes of one row of an output; None if its shape is unknown."""
    if output is None:
        return 0
    number = output.shape[1:].num_elements() if output.shape.rank else None
    return None if number is None else number * tf.as_dtype(output.dtype).size


def _memory_of(device: str) -> tuple[int, str]:
    """The memory of a device in bytes, or of this machine if unknown, and the name of it."""
    name = canonical(device).rpartition("/device:")[2]
    size = memory_bytes(name) if name.startswith("GPU") else None
    return (memory_bytes(), "this machine") if size is None else (size, name)


def said_in(error: tf.errors.OpError, beginning: str) -> str | None:
    """The message of an assertion in the step, without TensorFlow's additions."""
    if beginning not in error.message:
        return None
    said = error.message[error.message.index(beginning) :].partition("\n\t")[0]
    return " ".join(said.split()).replace("\\'", "'")  # TensorFlow quotes the message.


@contextlib.contextmanager
def _in_plain_words() -> Iterator[None]:
    """Turns failed assertions of this module into a `ValueError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        for beginning in (ALIGNED, AS_MANY, FIXED):
            if (said := said_in(error, beginning)) is not None:
                raise ValueError(re.split(r"\]| Condition x == y", said)[0]) from None
        raise


def type_of(leaf) -> tf.TensorSpec | None:
    """The type of a tensor or array, for batches of any size."""
    if leaf is None or not hasattr(leaf, "shape"):
        return None
    shape = tf.TensorShape(leaf.shape)
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, leaf.dtype)


def masks_of(outputs) -> list[tf.TensorSpec | None]:
    """A flat list of the types of the outputs' masks; None for an output without one."""
    flat = keras.tree.flatten(outputs)
    return [type_of(mask_of(output)) for output in flat]


def of_the_batch(outputs, num_rows) -> list[tf.TensorSpec]:
    """The types of the whole batch's outputs, from those of a piece.

    Sets the number of rows if it is known, since Keras weights an output's loss by it.
    """
    static_rows = num_rows if isinstance(num_rows, int) else tf.get_static_value(num_rows)
    static_rows = None if static_rows is None else int(static_rows)
    return [tf.TensorSpec([static_rows, *output.shape[1:]], output.dtype) for output in outputs]
