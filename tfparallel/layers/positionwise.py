"""Layers that treat each position of a sequence by itself: each device computes some of them."""

import zlib
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.extend import extended_attributes
from tfparallel.judge.kept_attributes import plain_attributes
from tfparallel.judge.positions import Arguments, keeps_positions_apart
from tfparallel.layers.dropout import dropped_in_parts
from tfparallel.layers.layer import WholeLayer
from tfparallel.layers.parts import Parts, handing_on, on_devices, whole
from tfparallel.layers.positions import check_lengths, cut, is_long_enough, joined, positions_of
from tfparallel.seams.keras import layers_in, mask_of, set_mask, takes_training

__all__ = ["Judgements", "PositionwiseDropout", "PositionwiseLayer", "arguments_of", "is_apart"]

_PLAIN = (bool, int, float, str, type(None))
_OF_KERAS = (keras.Layer, keras.Variable, keras.random.SeedGenerator)


class Argument(NamedTuple):
    """An argument of a call, as far as a judgement depends on it.

    Attributes:
        path: Its place among the arguments.
        value: Rank, type and length of a tensor; itself, or its type, if it is none.
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
    return tuple(_argument(path, leaf) for path, leaf in leaves)


def _argument(path, leaf) -> Argument:
    if not _is_tensor(leaf):
        is_plain = isinstance(leaf, bool | int | float | str | None)
        return Argument(path, leaf if is_plain else type(leaf))
    is_cut, dtype = _is_sequence(leaf), keras.backend.standardize_dtype(leaf.dtype)
    length = leaf.shape[1] if is_cut else None
    value = (leaf.shape.rank if tf.is_tensor(leaf) else len(leaf.shape), dtype, length)
    return Argument(path, value, is_cut and length != 1, _is_masked(leaf))


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


def _settings_of(layer: keras.Layer) -> str:
    """What a layer's calls may depend on besides weights: if it changes, they are judged anew."""
    own, found = extended_attributes(layer), [sorted(plain_attributes(layer).items(), key=repr)]
    for part in layers_in(layer):
        found += [
            (name, _setting(value))
            for name, value in vars(part).items()
            if name not in own and not isinstance(value, _OF_KERAS)
        ]
        found += [part.trainable] if not type(part).__module__.startswith("keras.") else []
    return repr(found)


def _setting(value):
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if callable(value) or not hasattr(value, "__dict__"):
        return id(value) if callable(value) else None
    own = vars(value).items()
    return {name: each if isinstance(each, _PLAIN) else id(each) for name, each in own}


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


class Judgements:
    """What was found out about a layer's calls; an object, since a judge reads plain attributes."""

    def __init__(self):
        self.found: dict[tuple, bool] = {}


class PositionwiseLayer(SequenceLayer):
    """Extends a layer that keeps positions apart: it is called with those of each device.

    Each kind of call is judged when it is first made; one that mixes positions reads the whole.
    """

    _judgements: Judgements

    def __call__(self, *args, **kwargs):
        args, kwargs = keras.tree.map_structure(whole, (args, kwargs))
        arguments, devices = arguments_of(args, kwargs), self._devices
        if arguments is None or not is_apart(self, args, kwargs, len(devices)):
            return super().__call__(*args, **kwargs)
        leaves = keras.tree.flatten((args, kwargs))
        sequences = [leaf for leaf, each in zip(leaves, arguments, strict=True) if each.is_cut]
        if not is_long_enough(sequences[0], devices):
            return super().__call__(*args, **kwargs)
        check_lengths(sequences)
        parts = [
            _with_masks(leaf, devices) if each.is_cut else [leaf] * len(devices)
            for leaf, each in zip(leaves, arguments, strict=True)
        ]
        call = super(WholeLayer, self).__call__

        def on_device(*own):
            args_, kwargs_ = keras.tree.pack_sequence_as((args, kwargs), own)
            return call(*args_, **kwargs_)

        with handing_on(whole):
            outputs = on_devices(devices, on_device, *parts)
        return keras.tree.map_structure(lambda *own: _joined(own, devices), *outputs)


def is_apart(layer: keras.Layer, args: tuple, kwargs: dict, num_devices: int) -> bool:
    """Whether a call of a layer, which is given sequences, may be divided over so many devices.

    It is judged with training and without; the layer keeps the answer for calls of the same kind.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "training"}
    arguments = arguments_of(args, kwargs)
    found = getattr(layer, "_judgements", Judgements()).found
    key = (arguments, num_devices, _settings_of(layer))
    if key not in found:
        (length,) = {each.value[2] for each in arguments if each.is_cut}
        sizes = [] if length is None else [rows.size for rows in row_ranges(length, num_devices)]
        leaves = keras.tree.flatten((args, kwargs))
        cut_ones = [each.is_cut for each in arguments]
        given = Arguments(leaves, cut_ones, [each.is_masked for each in arguments])
        lengths = [length, *sizes] if sizes else []
        ways = [True, False] if takes_training(layer) else [None]
        found[key] = all(
            keeps_positions_apart(layer, _calling(layer, (args, kwargs), way), given, lengths)
            for way in ways
        )
    return found[key]


def _calling(layer, structure, training):
    plain = super(WholeLayer, layer).__call__ if isinstance(layer, WholeLayer) else layer

    def call(leaves):
        args, kwargs = keras.tree.pack_sequence_as(structure, leaves)
        told = {} if training is None else {"training": training}
        return plain(*args, **kwargs | told)

    return call


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
        is_divided = _is_sequence(inputs) and is_long_enough(inputs, self._devices)
        if not training or self.rate == 0 or self._has_penalties or not is_divided:
            return super().call(inputs, training=training)
        return dropped_in_parts(self, Parts(positions_of(inputs, self._devices), 1, self._devices))
