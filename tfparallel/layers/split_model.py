"""The Keras model whose layers are split into parts."""

import keras

from tfparallel.layers.layer import WholeLayer
from tfparallel.layers.optimizer import split_updates
from tfparallel.layers.parts import between_layers, whole
from tfparallel.layers.softmax_loss import in_parts
from tfparallel.layers.variable import parts_of
from tfparallel.placement.placed_model import PlacedModel

__all__ = ["NestedLayer", "SplitModel"]


class NestedModel:
    """Extends a model inside of another: it reads and returns whole tensors."""

    def call(self, *args, **kwargs):
        """Calls the model."""
        with between_layers(True):
            outputs = super().call(*args, **kwargs)
        return keras.tree.map_structure(whole, outputs)


class NestedLayer(NestedModel, WholeLayer):
    """Extends a model that is a layer of another."""


class SplitModel(NestedModel, PlacedModel):
    """Extends a functional or Sequential model of split layers."""

    @property
    def split(self) -> dict[str, str]:
        """How each split layer is split, by name; the others are on the first device."""
        return self.layout.split_of

    @property
    def _by_device(self) -> dict[str, str]:
        return {f"part {k} of each split layer": device for k, device in enumerate(self.devices)}

    @property
    def _last_device(self) -> str:
        return self.devices[0]

    def compile(self, optimizer="rmsprop", loss=None, *args, **kwargs):
        """Compiles the model, as `keras.Model.compile`; a softmax loss is computed in parts."""
        super().compile(optimizer, keras.tree.map_structure(in_parts, loss), *args, **kwargs)

    def _place_updates(self):
        split_updates(self.optimizer)

    def _parts(self, variables):
        return parts_of(variables)
