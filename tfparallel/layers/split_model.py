"""The Keras model of `tensor_parallel`: its layers are split into parts."""

import keras

from tfparallel.layers.layer import WholeLayer
from tfparallel.layers.parts import as_it_is, handing_on, whole, with_parts
from tfparallel.layers.softmax_loss import in_parts
from tfparallel.placement.placed_model import PlacedModel
from tfparallel.problems import PlacementError
from tfparallel.seams.compiled import compile_arguments
from tfparallel.update.place_optimizer import prepare
from tfparallel.update.places import Places
from tfparallel.variables.split import parts_of


class NestedModel:
    """Extends a nested model: it reads and returns whole tensors."""

    def call(self, *args, **kwargs):
        with handing_on(as_it_is):
            outputs = super().call(*args, **kwargs)
        return keras.tree.map_structure(whole, outputs)


class NestedLayer(NestedModel, WholeLayer):
    """Extends a model that is a layer of another."""


class CompositeLayer(WholeLayer):
    """Extends a layer of the user's or of a library that calls split layers."""

    def call(self, *args, **kwargs):
        with handing_on(with_parts):
            return super().call(*args, **kwargs)


class SplitModel(NestedModel, PlacedModel):
    """Extends a functional or Sequential model of split layers."""

    @property
    def split(self) -> dict[str, str]:
        """How each split layer is split, by name; the others are on the first device."""
        return self._layout.split_of

    @property
    def _by_device(self) -> dict[str, str]:
        return {f"part {k} of each split layer": device for k, device in enumerate(self.devices)}

    @property
    def _last_device(self) -> str:
        return self.devices[0]

    def _prepare_compiled(self):
        super()._prepare_compiled()
        keras.tree.map_structure(in_parts, (compile_arguments(self) or {}).get("loss"))

    def save_spec(self, *args, **kwargs):
        """Raises an error that TFLite's converter shows.

        The converter calls this after it fails to make a SavedModel, and hides the reason.
        """
        raise PlacementError(
            "TFLite's converter needs a model with whole weights. Received: model "
            f"'{self.name}', whose layers are split over {', '.join(self.devices)}. Save it with "
            "`model.save('model.keras')`, and convert what `keras.models.load_model` returns."
        )

    def _place_updates(self):
        prepare(self.optimizer, Places(), parts=True)

    def _parts(self, variables):
        return parts_of(variables)
