"""What attention over divided positions leaves out, block by block: by masks, and by dropout."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.keras_compat import MASKED_SCORES
from tfparallel.layers.dropout import Draw
from tfparallel.layers.positions import cut, ends_of
from tfparallel.seams.keras import attention_window, dropout_of

__all__ = ["AttentionDropout", "AttentionMask", "is_plain_mask"]

_ALL = slice(None)


def is_plain_mask(given: tf.Tensor | None, others: Sequence[tf.Tensor]) -> bool:
    """Whether a mask of scores says of each key yes or no, for all heads if there are other masks.

    Of others Keras aligns the examples with the heads, or takes what is over a half.
    """
    if given is None:
        return True
    is_yes_or_no = given.dtype.is_bool or given.dtype.is_integer
    return is_yes_or_no and given.shape.rank in ((3,) if others else (2, 3, 4))


class AttentionMask:
    """Which keys the queries look at: those of device i at those of device j.

    Args:
        layer: Of Keras's.
        devices: The devices.
        inputs: Query and value, whole.
        of_query: `(batch, T)`; or None. Likewise below.
        of_keys: `(batch, S)` each.
        given: `(batch, T, S)` or `(batch, heads, T, S)`; sizes may be 1.
        is_causal: Whether a query looks at no key behind it.

    Attributes:
        rows: The number of the first query of each device, and that behind the last.
        columns: Of keys.
        masked: What becomes of masked scores, as for `Block`.
    """

    def __init__(
        self,
        layer: keras.Layer,
        devices: Sequence[str],
        inputs: Sequence[tf.Tensor],
        of_query: tf.Tensor | None,
        of_keys: Sequence[tf.Tensor | None],
        given: tf.Tensor | None,
        is_causal: bool,
    ):
        self.rows, self.columns = (ends_of(each, devices) for each in inputs[:2])
        # Where nothing is dropped, Keras computes attention by an operation of the backend's.
        self.masked = MASKED_SCORES if layer.dropout else "least"
        self._is_causal, self._window = is_causal, attention_window(layer)
        self._of_query = None if of_query is None else cut(tf.cast(of_query, tf.bool), devices)
        known = [mask for mask in of_keys if mask is not None]
        self._of_keys = [cut(tf.cast(mask, tf.bool), devices) for mask in known]
        self._given = None if given is None else tf.cast(given, tf.bool)
        self._is_causal_alone = is_causal and not known and of_query is None and given is None

    def is_seen(self, i: int, j: int) -> bool:
        """Whether a query of device i may look at a key of device j.

        Where something else is masked, too, a query may be left without a key; it then looks at
        all, as in Keras.
        """
        end, start = self.rows[i + 1], self.columns[j]
        if not self._is_causal_alone or tf.is_tensor(end) or tf.is_tensor(start):
            return True
        return start < max(end, 1)

    def of(self, i: int, j: int, heads: slice = _ALL) -> Callable[[], tf.Tensor | None]:
        """Returns the mask of a block: `(batch, heads, T_i, S_j)`, sizes may be 1; None if all."""

        def mask():
            found = None
            for each in self._of_block(i, j, heads):
                found = each if found is None else found & each
            return found

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
        if self._given is not None:
            given = self._given
            if None in given.shape[-2:]:  # What is 1 there holds for all.
                sizes = [tf.shape(given)[:-2], [self.rows[-1], self.columns[-1]]]
                given = tf.broadcast_to(given, tf.concat(sizes, 0))
            if given.shape.rank < 4:
                given = given[..., None, :, :]
            own = (heads, slice(*self.rows[i : i + 2]), slice(*self.columns[j : j + 2]))
            sizes = zip(given.shape[-3:], own, strict=True)
            yield given[(..., *(_ALL if size == 1 else each for size, each in sizes))]

    def _is_before(self, i, j) -> bool:
        start, end = self.rows[i], self.columns[j + 1]
        return not tf.is_tensor(start) and not tf.is_tensor(end) and end <= start + 1


class AttentionDropout:
    """What dropout multiplies the weights of each block by: what one device would.

    Args:
        layer: Of Keras's.
        queries: Of each device `(batch, T_i, heads, size)`.
        mask: Of the attention.
        training: Whether it is a training step.
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
