"""Layers that treat each position of a sequence by itself: each device computes some of them."""

from collections.abc import Collection
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import extended_attributes
from tfparallel.judge.kept_attributes import plain_attributes
from tfparallel.layers.dropout import dropped_in_parts
from tfparallel.layers.layer import WholeLayer
from tfparallel.layers.parts import Parts, handing_on, on_devices, whole
from tfparallel.layers.positions import check_lengths, cut, goes_round, joined, positions_of
from tfparallel.seams.keras import layers_in, mask_of, set_mask

__all__ = ["Argument", "PositionwiseDropout", "PositionwiseLayer", "arguments_of", "settings_of"]


class Argument(NamedTuple):
    """An argument of a call, as far as a judgement depends on it.

    Attributes:
        path: Its place among the arguments.
        value: Rank and type of a tensor; itself, or its type, if it is none.
        is_cut: Whether it is divided by positions.
        is_masked: Whether it has a mask of Keras's.
    """

    path: tuple
    value: Any
    is_cut: bool = False
    is_masked: bool = False


def arguments_of(args: tuple, kwargs: dict) -> tuple[Argument, ...] | None:
    """What a layer is called with.

    Divided are sequences of features, of ids, of truths. None if there is none, or if they are not
    all of one length.
    """
    leaves = keras.tree.flatten_with_path((args, kwargs))
    lengths = {leaf.shape[1] for _, leaf in leaves if _is_sequence(leaf)} - {1}
    if len(lengths) != 1:
        return None
    # Whether it trains, a call may be told or not: it is judged both ways. So with no mask at all.
    told = [(path, leaf) for path, leaf in leaves
            if path != (1, "training") and (path != (1, "mask") or leaf is not None)]  # fmt: skip
    return tuple(_argument(path, leaf) for path, leaf in told)


def _argument(path, leaf) -> Argument:
    if _is_tensor(leaf):
        value = (
            leaf.shape.rank if tf.is_tensor(leaf) else len(leaf.shape),
            keras.backend.standardize_dtype(leaf.dtype),
        )
        return Argument(path, value, _is_sequence(leaf) and leaf.shape[1] != 1, _is_masked(leaf))
    is_plain = isinstance(leaf, bool | int | float | str | None)
    return Argument(path, leaf if is_plain else type(leaf))


def _is_tensor(leaf) -> bool:
    return tf.is_tensor(leaf) or keras.backend.is_keras_tensor(leaf)


def _is_masked(leaf) -> bool:
    return tf.is_tensor(leaf) and mask_of(leaf) is not None


def _is_sequence(leaf) -> bool:
    if not _is_tensor(leaf) or isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return False
    rank = leaf.shape.rank if tf.is_tensor(leaf) else len(leaf.shape)
    if rank is None or rank < 2:
        return False
    return rank > 2 or not tf.as_dtype(leaf.dtype).is_floating


def settings_of(layer: keras.Layer) -> dict:
    """What the calls of a layer may depend on, beside its weights: what was judged, no other."""
    own = extended_attributes(layer)
    found = {key: value for key, value in plain_attributes(layer).items() if key[1] not in own}
    return found | {
        id(part): part.trainable
        for part in layers_in(layer)
        if not type(part).__module__.startswith("keras.")
    }


class SequenceLayer(WholeLayer):
    """Extends a layer that computes in parts of a sequence: what it returns knows its parts."""

    def __call__(self, *args, **kwargs):
        return keras.tree.map_structure(_known_whole, super().__call__(*args, **kwargs))

    @property
    def _has_penalties(self) -> bool:
        """Whether it adds a loss for what it returns, which Keras takes of tensors alone."""
        return any(
            getattr(part, "activity_regularizer", None) is not None for part in layers_in(self)
        )


def _known_whole(value):
    if not isinstance(value, Parts):
        return value
    return joined(value.tensors, value.devices, mask_of(value))


class PositionwiseLayer(SequenceLayer):
    """Extends a layer that was judged: it is called with the positions of each device.

    A call that is not one of those that were judged reads the whole sequence.
    """

    _judged: Collection[tuple[Argument, ...]]
    _settings_judged: dict

    def __call__(self, *args, **kwargs):
        args, kwargs = keras.tree.map_structure(whole, (args, kwargs))
        arguments = arguments_of(args, kwargs)
        is_judged = arguments in self._judged and settings_of(self) == self._settings_judged
        if not is_judged or self._has_penalties:
            return super().__call__(*args, **kwargs)
        leaves, devices = keras.tree.flatten_with_path((args, kwargs)), self._devices
        paths = {each.path for each in arguments if each.is_cut}
        sequences = [leaf for path, leaf in leaves if path in paths]
        if not goes_round(sequences[0], devices):
            return super().__call__(*args, **kwargs)
        check_lengths(sequences)
        parts = [
            _with_masks(leaf, devices) if path in paths else [leaf] * len(devices)
            for path, leaf in leaves
        ]
        call = super(WholeLayer, self).__call__

        def on_device(*own):
            args_, kwargs_ = keras.tree.pack_sequence_as((args, kwargs), own)
            return call(*args_, **kwargs_)

        with handing_on(whole):
            outputs = on_devices(devices, on_device, *parts)
        return keras.tree.map_structure(lambda *own: _joined(own, devices), *outputs)


def _with_masks(tensor, devices) -> list[tf.Tensor]:
    parts, mask = positions_of(tensor, devices), mask_of(tensor)
    if mask is not None:
        for part, own in zip(parts, cut(mask, devices), strict=True):
            set_mask(part, own)
    return parts


def _joined(parts, devices):
    masks = [mask_of(part) for part in parts]
    if masks[0] is None:
        return joined(parts, devices)
    with tf.device(devices[0]):
        return joined(parts, devices, tf.concat(masks, 1))


class PositionwiseDropout(SequenceLayer):
    """Extends dropout: the mask is the whole sequence's, in parts."""

    def call(self, inputs, training=False):
        is_divided = _is_sequence(inputs) and goes_round(inputs, self._devices)
        if not training or self.rate == 0 or self._has_penalties or not is_divided:
            return super().call(inputs, training=training)
        return dropped_in_parts(self, Parts(positions_of(inputs, self._devices), 1, self._devices))
