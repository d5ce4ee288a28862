"""The Keras model with several replicas, each of which has its layers on several devices."""

from tfparallel.hybrid.optimizer import update_copies
from tfparallel.hybrid.spread_call import SpreadCall
from tfparallel.layers.optimizer import split_updates
from tfparallel.layers.split_model import NestedModel
from tfparallel.layers.variable import parts_of
from tfparallel.pipeline.pipelined_model import PipelinedModel
from tfparallel.placement.copies import copy_to, replicas_of

__all__ = ["HybridModel"]


class HybridModel(SpreadCall, NestedModel, PipelinedModel):
    """Extends a functional or Sequential model of placed layers, of which each replica has copies.

    A step takes D·M pieces of the batch: M micro-batches through the stages of each replica. Layers
    of a stage may be split over the devices of the stage.
    """

    @property
    def split(self) -> dict[str, str]:
        """How each split layer is split, by name; the others are on their stage's first device."""
        return self.layout.split_of

    def trace_each(self, is_needed: bool = True) -> None:
        """Has steps trace their micro-batches one by one, as layers in parts need, or the first."""
        # Of a function TensorFlow has the gradients computed on one device.
        super().trace_each(is_needed or self.layout.mesh.tensor > 1)

    def _place_updates(self):
        if self.layout.mesh.tensor > 1:
            split_updates(self.optimizer)
        else:
            super()._place_updates()
        if self.layout.mesh.data > 1:
            update_copies(self.optimizer, replicas_of(self.layout))

    def _parts(self, variables):
        return parts_of(variables)

    def copy_variables(self) -> None:
        """Gives each replica a copy of all that layers read, but of what passes write.

        Seeds are drawn once a step, for all pieces; a metric inside of a layer adds up all rows.
        """
        layers = self._flatten_layers()
        written = {id(own.state) for layer in layers for own in layer._seed_generators}
        written |= {id(v) for layer in layers for metric in layer.metrics for v in metric.variables}
        own = [variable for variable in self.variables if id(variable) not in written]
        copy_to(replicas_of(self.layout), parts_of(own))
