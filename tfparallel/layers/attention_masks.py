"""Masks and dropout of attention over divided positions, block by block."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.keras_compat import MASKED_SCORES
from tfparallel.layers.dropout import Draw
from tfparallel.layers.positions import cut, ends_of
from tfparallel.seams.keras import attention_window, dropout_of

_ALL = slice(None)


def is_plain_mask(mask: tf.Tensor | None, others: Sequence[tf.Tensor]) -> bool:
    """Returns whether a mask of scores is boolean or integer, and the same for all heads if needed.

    `others` are the other masks. If not, Keras aligns examples with heads, or thresholds at 0.5.
    """
    if mask is None:
        return True
    is_yes_or_no = mask.dtype.is_bool or mask.dtype.is_integer
    return is_yes_or_no and mask.shape.rank in ((3,) if others else (2, 3, 4))


class AttentionMask:
    """Which keys the queries attend to: queries of device i, keys of device j.

    Args:
        layer: The Keras layer.
        devices: The devices.
        inputs: Query and value, whole.
        of_query: The query mask, `(batch, T)`; or None.
        of_keys: The value and key masks, `(batch, S)`; or None.
        of_scores: `(batch, T, S)` or `(batch, heads, T, S)`, sizes may be 1; or None.
        is_causal: Whether a query ignores later keys.

    Attributes:
        rows: The index of the first query of each device, and the number of queries.
        columns: The same for keys.
        masked: How scores are masked, as for `Block`.
    """

    def __init__(
        self,
        layer: keras.Layer,
        devices: Sequence[str],
        inputs: Sequence[tf.Tensor],
        of_query: tf.Tensor | None,
        of_keys: Sequence[tf.Tensor | None],
        of_scores: tf.Tensor | None,
        is_causal: bool,
    ):
        self.rows, self.columns = (ends_of(each, devices) for each in inputs[:2])
        # Without dropout, Keras computes attention by an operation of the backend.
        self.masked = MASKED_SCORES if layer.dropout else "least"
        self._is_causal, self._window = is_causal, attention_window(layer)
        self._of_query = None if of_query is None else cut(tf.cast(of_query, tf.bool), devices)
        key_masks = [mask for mask in of_keys if mask is not None]
        self._of_keys = [cut(tf.cast(mask, tf.bool), devices) for mask in key_masks]
        self._of_scores = None if of_scores is None else tf.cast(of_scores, tf.bool)
        self._is_causal_alone = (
            is_causal and not key_masks and of_query is None and of_scores is None
        )

    def is_seen(self, i: int, j: int) -> bool:
        """Returns whether a query of device i may attend to a key of device j.

        Where other masks apply, a query may have no key left; it then attends to all, as in Keras.
        """
        end, start = self.rows[i + 1], self.columns[j]
        if not self._is_causal_alone or tf.is_tensor(end) or tf.is_tensor(start):
            return True
        return start < max(end, 1)

    def of(self, i: int, j: int, heads: slice = _ALL) -> Callable[[], tf.Tensor | None]:
        """Returns the mask of a block: `(batch, heads, T_i, S_j)`, sizes may be 1; or None."""

        def mask():
            combined = None
            for each in self._of_block(i, j, heads):
                combined = each if combined is None else combined & each
            return combined

        return mask

    def _of_block(self, i, j, heads):
        if self._of_query is not None:
            yield self._of_query[i][:, None, :, None]
        for mask in self._of_keys:
            yield mask[j][:, None, None, :]
        row = tf.range(self.rows[i], self.rows[i + 1])[:, None]
        column = tf.range(self.columns[j], self.columns[j + 1])[None, :]
        if self._is_causal and not self._is_before(i, j):
            yield (row >= column)[None, None]
        if self._window is not None:
            yield (tf.abs(row - column) < self._window)[None, None]
        if self._of_scores is not None:
            mask_of_scores = self._of_scores
            if None in mask_of_scores.shape[-2:]:  # A size of 1 there broadcasts.
                sizes = [tf.shape(mask_of_scores)[:-2], [self.rows[-1], self.columns[-1]]]
                mask_of_scores = tf.broadcast_to(mask_of_scores, tf.concat(sizes, 0))
            if mask_of_scores.shape.rank < 4:
                mask_of_scores = mask_of_scores[..., None, :, :]
            block = (heads, slice(*self.rows[i : i + 2]), slice(*self.columns[j : j + 2]))
            sizes = zip(mask_of_scores.shape[-3:], block, strict=True)
            yield mask_of_scores[(..., *(_ALL if size == 1 else each for size, each in sizes))]

    def _is_before(self, i, j) -> bool:
        start, end = self.rows[i], self.columns[j + 1]
        return not tf.is_tensor(start) and not tf.is_tensor(end) and end <= start + 1


class AttentionDropout:
    """The dropout factors of the attention weights of each block, equal to those on one device.

    Args:
        layer: The Keras layer.
        queries: The queries of each device, `(batch, T_i, heads, size)`.
        mask: The mask of the attention.
        training: Whether this is a training step.
    """

    def __init__(
        self,
        layer: keras.Layer,
        queries: Sequence[tf.Tensor],
        mask: AttentionMask,
        training: bool | None,
    ):
        self._queries, self._mask, self._draw = queries, mask, None
        if layer.dropout and training:
            self._draw = Draw(dropout_of(layer), [tf.shape(each)[1] for each in queries], 2)

    def of(self, i: int, j: int, heads: slice = _ALL) -> Callable[[], tf.Tensor | None]:
        """Returns the factors of a block: `(batch, heads, T_i, S_j)`; None without dropout."""

        def factors():
            if self._draw is None:
                return None
            rows, columns = self._mask.rows, self._mask.columns
            first = tf.einsum("btnh->bnth", self._queries[i])
            shape = [tf.shape(first)[0], tf.shape(first)[1], rows[-1], columns[-1]]
            drawn = self._draw.factors(first, shape)
            return drawn[:, heads, slice(*rows[i : i + 2]), slice(*columns[j : j + 2])]

        return factors
