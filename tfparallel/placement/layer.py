"""A layer on a device: its variables and all that its calls do."""

import tensorflow as tf

from tfparallel.tracing.audit import noting
from tfparallel.variables.replica import here

__all__ = ["PlacedLayer"]


class PlacedLayer:
    """Extends a layer: what it builds and computes is on its device, its losses included.

    The gradients' operations are placed by `gradients.py`.
    """

    def __call__(self, *args, **kwargs):
        """Calls the layer on its device."""
        device = here(self._device)
        with tf.device(device), noting("forward", self.name, device):
            return super().__call__(*args, **kwargs)
