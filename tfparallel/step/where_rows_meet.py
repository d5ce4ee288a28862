"""Which of the two ways a step takes to its loss, and why.

| way | what | when |
| --- | --- | --- |
| where the rows are | losses and metrics of each piece's rows, added up | the default |
| of the joined outputs | the outputs of all rows meet on one device | where nothing else is right |
"""

import keras
import tensorflow as tf
from absl import logging

from tfparallel.data.shard import count_rows
from tfparallel.extend import attach
from tfparallel.step.apart import why_not_apart
from tfparallel.step.by_rows import why_joined
from tfparallel.step.known_rows import is_known_by_rows

__all__ = ["WhereRowsMeet", "aligned", "as_many_rows", "type_of"]


class WhereRowsMeet:
    """Extends a model whose batch is in pieces."""

    @property
    def why_joined(self) -> str | None:
        """Why the outputs of all rows met in the steps of `fit`, else in those of `evaluate`.

        None where they did not, and before there were any.
        """
        return next(iter(getattr(self, "_why_joined", {}).values()), None)

    def _rows_stay(self, data, kind: str) -> bool:
        """Whether a step on such data needs no joined outputs; says so once where it does.

        Args:
            data: A batch, as the step is given it.
            kind: "fit" or "evaluate".
        """
        known = getattr(self, "_why_joined", {})
        reason = why_joined(self) or _why_unaligned(data) or self._why_not_apart(data)
        if kind not in known or known[kind] != reason:
            attach(self, _why_joined=dict(sorted({**known, kind: reason}.items(), reverse=True)))
            where = "stay where the rows are" if reason is None else f"of all rows meet: {reason}"
            logging.info("Model '%s', %s: the outputs %s.", self.name, kind, where)
        return reason is None

    def _why_not_apart(self, data) -> str | None:
        """Asked once for each kind of data, and for each `compile`."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        types = keras.tree.map_structure(type_of, (x, y, sample_weight))
        of_whom, known = getattr(self, "_known_apart", (None, {}))
        if of_whom is not self._compile_loss:
            known = {}
        if str(types) not in known:
            try:
                outputs = self._outputs_of(types[0])
            except Exception as error:  # Keras's own follows, if it is one of the program.
                found = f"the shapes of its outputs are not known: {str(error)[:200]}"
            else:
                found = why_not_apart(self, types[1], outputs, types[2])
            known[str(types)] = found
            attach(self, _known_apart=(self._compile_loss, known))
        return known[str(types)]

    def _outputs_of(self, types):
        """The types of the outputs, in their structure, for inputs of these types."""
        functional = getattr(self, "_functional", None) or self
        outputs = keras.tree.pack_sequence_as(functional._outputs_struct, functional.outputs)
        return keras.tree.map_structure(type_of, outputs)


def type_of(leaf) -> tf.TensorSpec | None:
    """The type of a tensor or an array, for batches of any size."""
    if leaf is None or not hasattr(leaf, "shape"):
        return None
    shape = tf.TensorShape(leaf.shape)
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, leaf.dtype)


def aligned(x, y, sample_weight) -> list[tf.Operation]:
    """Assertions that all have a row for each example, where sizes are not known yet."""
    expected, *others = _row_counts(x, y, sample_weight)
    return _equal(
        [(other, expected) for other in others],
        "Inputs, targets and sample weights must have a row for each example. Received tensors "
        "of other sizes of axis 0. Give batches of a fixed size (`drop_remainder=True`), and "
        "the outputs of all rows are joined.",
    )


def as_many_rows(model: keras.Model, outputs: list[tf.Tensor], num_rows) -> list[tf.Operation]:
    """Assertions, or none where it is known: a loss would broadcast a row, and be wrong.

    Args:
        model: The model.
        outputs: Of a piece, flat.
        num_rows: How many rows the piece has.
    """
    if is_known_by_rows(model):
        return []
    return _equal(
        [(count_rows(output), num_rows) for output in outputs],
        f"Model '{model.name}' must put out a row for each example. Received, of a part of the "
        "batch, outputs with another number of rows than its examples: a constant with rows of its "
        "own, perhaps. Train on one device, or give the constant one row.",
    )


def _row_counts(*structures) -> list:
    """Of each tensor with a batch axis, an int or, until it is known, a tensor."""
    leaves = keras.tree.flatten(structures)
    return [
        count_rows(leaf) if tf.is_tensor(leaf) else leaf.shape[0]  # Eagerly, an array.
        for leaf in leaves
        if getattr(leaf, "shape", None)
    ]


def _why_unaligned(data) -> str | None:
    """Targets may have several rows for an example, or one for all."""
    known = {n for n in _row_counts(data) if isinstance(n, int)}
    return f"inputs and targets have {sorted(known)} rows" if len(known) > 1 else None


def _equal(pairs, message) -> list[tf.Operation]:
    """Assertions of what is not known to be equal; run at once, they leave nothing."""
    checks = [
        tf.debugging.assert_equal(one, other, message)
        for one, other in pairs
        if not (isinstance(one, int) and isinstance(other, int) and one == other)
    ]
    return [check for check in checks if check is not None]
