"""Layers that treat each position of a sequence independently: each device computes some."""

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
from tfparallel.placement.placed_model import PlacedLayer
from tfparallel.seams.keras import layers_in, mask_of, set_mask, takes_training

_PLAIN = (bool, int, float, str, type(None))
_OF_KERAS = (keras.Layer, keras.Variable, keras.random.SeedGenerator)


class Argument(NamedTuple):
    """An argument of a call, as far as the judgement depends on it.

    Attributes:
        path: Its path among the arguments.
        value: Rank, dtype and length of a tensor; a plain value; or the type of any other value.
        is_cut: Whether it is divided by positions.
        is_masked: Whether it has a Keras mask.
    """

    path: tuple
    value: Any
    is_cut: bool = False
    is_masked: bool = False


def arguments_of(args: tuple, kwargs: dict) -> tuple[Argument, ...] | None:
    """Returns the arguments of a layer's call; None if they hold no sequence to divide.

    Sequences of features, ids or labels are divided, if all have the same length.
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
    """Returns the state, besides weights, that calls depend on; if it changes, judge again."""
    skipped = extended_attributes(layer)
    settings = [sorted(plain_attributes(layer).items(), key=repr)]
    for part in layers_in(layer):
        settings += [
            (name, _setting(value))
            for name, value in vars(part).items()
            if name not in skipped and not isinstance(value, _OF_KERAS)
        ]
        settings += [part.trainable] if not type(part).__module__.startswith("keras.") else []
    return repr(settings)


def _setting(value):
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if callable(value) or not hasattr(value, "__dict__"):
        return id(value) if callable(value) else None
    attributes = vars(value).items()
    return {name: each if isinstance(each, _PLAIN) else id(each) for name, each in attributes}


class SequenceLayer(WholeLayer):
    """Extends a layer that computes in parts of a sequence: its outputs have parts attached."""

    def __call__(self, *args, **kwargs):
        return keras.tree.map_structure(_with_parts_attached, super().__call__(*args, **kwargs))

    @property
    def _has_penalties(self) -> bool:
        """Whether it adds a loss for its outputs, which Keras computes from tensors only."""
        return any(
            getattr(part, "activity_regularizer", None) is not None for part in layers_in(self)
        )


def _with_parts_attached(value):
    if not isinstance(value, Parts):
        return value
    return joined(value.tensors, value.devices, mask_of(value))


class Judgements:
    """Verdicts about a layer's calls; an object, since the judge reads plain attributes."""

    def __init__(self):
        self.verdicts: dict[tuple, bool] = {}


class PositionwiseLayer(SequenceLayer):
    """Extends a layer that treats positions independently: each device calls it with its own.

    Each kind of call is judged the first time; a call that mixes positions reads the whole.
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
        # A placed layer would compute each part on its own device.
        before = PlacedLayer if isinstance(self, PlacedLayer) else WholeLayer
        call = super(before, self).__call__

        def on_device(*local):
            args_, kwargs_ = keras.tree.pack_sequence_as((args, kwargs), local)
            return call(*args_, **kwargs_)

        with handing_on(whole):
            outputs = on_devices(devices, on_device, *parts)
        return keras.tree.map_structure(lambda *local: _joined(local, devices), *outputs)


def is_apart(layer: keras.Layer, args: tuple, kwargs: dict, num_devices: int) -> bool:
    """Returns whether a layer's call with sequences may be divided over `num_devices` devices.

    The judge checks it with and without training; the layer caches the verdict for similar calls.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "training"}
    arguments = arguments_of(args, kwargs)
    verdicts = getattr(layer, "_judgements", Judgements()).verdicts
    key = (arguments, num_devices, _settings_of(layer))
    if key not in verdicts:
        (length,) = {each.value[2] for each in arguments if each.is_cut}
        sizes = [] if length is None else [rows.size for rows in row_ranges(length, num_devices)]
        leaves = keras.tree.flatten((args, kwargs))
        cut_ones = [each.is_cut for each in arguments]
        example = Arguments(leaves, cut_ones, [each.is_masked for each in arguments])
        lengths = [length, *sizes] if sizes else []
        modes = [True, False] if takes_training(layer) else [None]
        verdicts[key] = all(
            keeps_positions_apart(layer, _calling(layer, (args, kwargs), mode), example, lengths)
            for mode in modes
        )
    return verdicts[key]


def _calling(layer, structure, training):
    plain = super(WholeLayer, layer).__call__ if isinstance(layer, WholeLayer) else layer

    def call(leaves):
        args, kwargs = keras.tree.pack_sequence_as(structure, leaves)
        options = {} if training is None else {"training": training}
        return plain(*args, **kwargs | options)

    return call


def _with_masks(tensor, devices) -> list[tf.Tensor]:
    parts, mask = positions_of(tensor, devices), mask_of(tensor)
    if mask is not None:
        for part, part_mask in zip(parts, cut(mask, devices), strict=True):
            set_mask(part, part_mask)
    return parts


def _joined(parts, devices):
    masks = [mask_of(part) for part in parts]
    if masks[0] is None:
        return joined(parts, devices)
    with tf.device(devices[0]):
        return joined(parts, devices, tf.concat(masks, 1))


class PositionwiseDropout(SequenceLayer):
    """Extends dropout: each part takes its share of the whole sequence's mask."""

    def call(self, inputs, training=False):
        is_divided = _is_sequence(inputs) and is_long_enough(inputs, self._devices)
        if not training or self.rate == 0 or self._has_penalties or not is_divided:
            return super().call(inputs, training=training)
        return dropped_in_parts(self, Parts(positions_of(inputs, self._devices), 1, self._devices))
