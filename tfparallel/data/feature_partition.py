"""Feature partition: each example is split along its features, and each device reads a part.

A device then holds only the weights for its own features. A dense layer becomes a sum of dense
layers: x·W = x_1·W_1 + … + x_K·W_K, with x_k the features and W_k the rows of part k.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.texts import short


def by_feature(
    data: Any, num_parts: int, *, axis: int = -1, weights: Sequence[int] | None = None
) -> Any:
    """Splits inputs along their feature axis, for a model with one input per part.

    Args:
        data: An array or tensor of examples, `(examples, …)`, or a `tf.data.Dataset` of them or of
            `(x, y[, sample_weight])`, batched or not, whose `x` is split.
        num_parts: K, the number of parts, at most the number of features.
        axis: The feature axis, by default the last; it must not be the axis of the examples.
        weights: K whole numbers, for parts of unequal size: `[3, 1]` gives the first of two parts
            three of every four features.

    Returns:
        A tuple of K arrays or tensors; or the dataset with such a tuple as its `x`.

    Raises:
        ValueError: If there are fewer features than parts, or `x` is not a single tensor.

    Example:
        >>> left, right = tfparallel.data.by_feature(np.ones((10, 7)), 2)
        >>> left.shape, right.shape
        ((10, 3), (10, 4))
    """
    if not isinstance(num_parts, numbers.Integral):
        raise ValueError(
            f"`num_parts` must be an integer. Received: num_parts={short(num_parts)}. Pass, for "
            "example, num_parts=2."
        )
    if isinstance(data, tf.data.Dataset):
        spec = data.element_spec
        if not isinstance(spec, tuple):
            return data.map(lambda x: _parts(x, num_parts, axis, weights))
        if not isinstance(spec[0], tf.TensorSpec):
            raise ValueError(
                f"The inputs must be one tensor, whose features are split. Received: {spec[0]}. "
                "Select one with `dataset.map`."
            )
        return data.map(lambda x, *rest: (_parts(x, num_parts, axis, weights), *rest))
    if not hasattr(data, "shape"):
        raise ValueError(
            "`by_feature` needs an array or tensor of examples, or a tf.data.Dataset. Received: "
            f"{short(data)}. Make it an array: `np.asarray(data)`."
        )
    return _parts(data, num_parts, axis, weights)


def _parts(x, num_parts, axis, weights):
    rank = len(x.shape)
    position = axis % rank if -rank <= axis < rank else None
    num_features = x.shape[position] if position else None
    if not num_features or not 1 <= num_parts <= num_features:
        raise ValueError(
            "Each part needs at least one feature, along an axis of known length other than that "
            f"of the examples. Received: num_parts={num_parts}, axis={axis}, for inputs of shape "
            f"{tuple(x.shape)}."
        )
    before = (slice(None),) * position
    return tuple(
        x[(*before, slice(part.start, part.start + part.size))]
        for part in row_ranges(num_features, num_parts, weights)
    )
