"""A batch, cut into micro-batches by rows and joined again."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.judge.check_rows import has_rows, keeps_number_of_rows
from tfparallel.piece import (
    Piece,
    count_rows,
    of_known_number,
    times,
    where_it_is,
)
from tfparallel.pipeline.masks import Masks
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.pipeline.stages import Key, LogitsOf, PartOf, Values
from tfparallel.seams.functional import as_outputs, flat_inputs, functional_of
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.step.logits import Logits, logits_of, output_of
from tfparallel.step.row_counts import rows_of_examples


class Joined(NamedTuple):
    """An output of the whole batch.

    Attributes:
        sources: The tensors that were joined: the output, the logits behind it, or both, by key.
        logits: How to compute the output from its logits.
        mask: Its mask, or None.
        per_example: How many rows an example has; None for a single piece.
    """

    sources: dict[Key, tf.Tensor]
    logits: Logits | None
    mask: tf.Tensor | None
    per_example: int | tf.Tensor | None

    def output(self) -> tf.Tensor:
        """Returns the output; call it under a tape to differentiate it."""
        output = output_of([*self.sources.values()], self.logits)
        if self.mask is not None:
            set_mask(output, self.mask)
        return output


class Batch:
    """The whole batch of a step, and the rows of each micro-batch.

    Args:
        model: The functional or Sequential model.
        x: Inputs, as `fit` takes them.
        y: Targets, or None.
        sample_weight: Weights, or None.
        num_micro_batches: M of each replica. Sizes differ by at most one; a piece without rows
            computes one dummy row, which is dropped before anything reads it.
        others: The number of replicas, and their processes.

    Attributes:
        pieces: The rows of each piece; `piece.replica` is its index.
        local_pieces: Those of the replicas of this process.
        num_rows: The rows of the whole batch; a tensor if unknown when the step is traced.
        masks: Which calls of the model find a mask.
        behind: The logits behind tensors that stages made, by key.
    """

    def __init__(
        self, model: keras.Model, x, y, sample_weight, num_micro_batches: int, others: Others
    ):
        self._model = model
        self._others = others
        self.x, self.y, self.sample_weight = x, y, sample_weight
        self.behind: dict[Key, Logits] = {}
        self._keeps_number = keeps_number_of_rows(model)
        self._functional = functional_of(model)
        leaf = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
        with where_it_is(leaf):
            converted = model.dtype_policy.convert_input(x, model.autocast, model.input_dtype)
            self._flat = flat_inputs(self._functional, converted)
        self.masks = Masks(model, self._functional, self._flat)
        first = next(tensor for tensor in self._flat if tensor is not None)
        self.num_rows = count_rows(first)
        number = num_micro_batches * others.num_replicas
        self.pieces = [
            Piece(m, number, start, size, self.num_rows)
            for m, (start, size) in enumerate(row_ranges(self.num_rows, number))
        ]
        self.local_pieces = others.local(self.pieces)

    @property
    def output_keys(self) -> list[int]:
        """The ids of the model's symbolic outputs."""
        return [id(symbol) for symbol in self._functional.outputs]

    def inputs_of(self, piece: Piece) -> Values:
        """Returns a micro-batch's inputs by symbolic input id; cut on the batch's device."""
        inputs = {}
        for symbol, tensor in zip(self._functional.inputs, self._flat, strict=True):
            with where_it_is(tensor):
                inputs[id(symbol)] = None if tensor is None else piece.rows_used(tensor)
        return inputs

    def note_logits(self, values: Values) -> None:
        """Adds the logits behind a stage's outputs to them.

        Not only for the model's outputs: a layer may pass its input on.
        """
        outputs = [(key, tensor) for key, tensor in values.items() if not isinstance(key, LogitsOf)]
        for key, tensor in outputs:
            logits = None if tensor is None else logits_of(tensor)
            if logits is not None:
                values[LogitsOf(key)] = logits.tensor
                self.behind[key] = logits._replace(tensor=None)

    def attach_logits(self, values: Values) -> None:
        """Recomputes a stage's inputs from the logits that were sent with them."""
        for key in [key for key in values if isinstance(key, LogitsOf)]:
            behind = self.behind[key.output]
            values[key.output] = behind.output(values[key], values[key.output])

    def targets_of(self, piece: Piece) -> tuple[Any, Any]:
        """Returns a micro-batch's targets and weights, cut on the batch's device; scalars whole."""

        def rows(tensor):
            if tensor is None:
                return None
            with where_it_is(tensor):
                tensor = tf.convert_to_tensor(tensor)
                return tensor if tensor.shape.rank == 0 else piece.rows(tensor)

        return keras.tree.map_structure(rows, (self.y, self.sample_weight))

    def rows_of_examples(self, piece: Piece, values: Values) -> list[int | tf.Tensor | None]:
        """Returns how many rows of each output belong to an example.

        Args:
            piece: The rows of a micro-batch.
            values: Its outputs, by key.
        """
        outputs = [values[key] for key in self.output_keys]
        return rows_of_examples(self._model, outputs, piece)

    def outputs_of(self, piece: Piece, values: Values, index: int | None = None) -> Any:
        """Returns a micro-batch's outputs in the model's own structure, without a dummy row.

        Args:
            piece: Its rows.
            values: Its outputs, by key.
            index: To return the positions on one device: its index.
        """
        flat, number = [], 1 if has_rows(self._model) else None
        for symbol in self.output_keys:
            key = symbol if index is None else PartOf(symbol, index)
            part = piece.without_dummy_row(values[key], number)
            mask = self.masks.at_end(symbol, values[key])
            if mask is None and mask_of(part) is not None:
                part = tf.identity(part)  # Calls find the mask, but the loss must not.
            logits = values.get(LogitsOf(key))
            if logits is not None and logits_of(part) is None:  # Sliced, or sent here.
                part = self.behind[key].output(piece.without_dummy_row(logits, number), part)
            if mask is not None:
                set_mask(part, piece.without_dummy_row(mask, number))
            flat.append(part)
        return self.packed(flat)

    def joined(self, key: int, values: list[Values]) -> Joined:
        """Joins the pieces of an output, its mask and its logits with it.

        Args:
            key: The id of the symbolic output.
            values: The values of each local piece, in order.

        Raises:
            ValueError: If the output has no batch axis.
        """
        if values[0][key].shape.rank == 0:
            raise ValueError(
                "An output of shape () cannot be joined from micro-batches: a mean, a sum or a "
                "maximum over the examples would each be joined in a different way. Outputs must "
                "have shape (batch, …). Received: a scalar. Return a value for each example, or "
                "add a scalar with `self.add_loss`."
            )
        behind = self.behind.get(key)
        masks = [self.masks.at_end(key, piece[key]) for piece in values]
        place, pairs = self.output_keys.index(key), zip(self.local_pieces, values, strict=True)
        numbers = [self.rows_of_examples(*pair)[place] for pair in pairs]
        sources: dict[Key, tf.Tensor] = {}
        if behind is None or behind.operation is None:
            sources[key] = self._rows([piece[key] for piece in values], numbers)
        if behind is not None:
            logits = [piece[LogitsOf(key)] for piece in values]
            sources[LogitsOf(key)] = self._rows(logits, numbers)
        mask = None if masks[0] is None else self._rows(masks, numbers)
        return Joined(sources, behind, mask, numbers[0])

    def _rows(self, parts: list[tf.Tensor], numbers: list[int | tf.Tensor | None]) -> tf.Tensor:
        each = zip(self.local_pieces, parts, numbers, strict=True)
        rows = [piece.without_dummy_row(part, number) for piece, part, number in each]
        joined = self._others.joined(tf.concat(rows, 0), self.pieces, numbers[0])
        return of_known_number(joined, self.num_rows, numbers[0]) if self._keeps_number else joined

    def rows_of(
        self, piece: Piece, gradient: tf.Tensor, per_example: int | tf.Tensor | None
    ) -> tf.Tensor:
        """Returns a micro-batch's part of the gradient of an output; zeros for a dummy row.

        Args:
            piece: The rows of the micro-batch.
            gradient: The gradient of the joined output.
            per_example: How many rows of it an example has; None for a single piece.
        """
        rows = piece.rows(gradient, per_example)
        if not piece.may_be_idle or per_example is None:
            return rows
        missing = times(piece.num_rows_used - piece.num_rows, per_example)
        return tf.pad(rows, [[0, missing]] + [[0, 0]] * (gradient.shape.rank - 1))

    def packed(self, flat: list[tf.Tensor]) -> Any:
        """Packs flat outputs into the model's own structure."""
        packed = as_outputs(self._functional, flat)
        is_single = isinstance(packed, list | tuple) and len(packed) == 1
        return packed[0] if is_single else packed
