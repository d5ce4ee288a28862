"""`tfparallel.MirroredStrategy`: plain Keras code under its scope trains exactly."""

from tfparallel.replication import model as models
from tfparallel.strategies import mirrored


class MirroredStrategy(mirrored.MirroredStrategy):
    __doc__ = mirrored.MirroredStrategy.__doc__

    def extend_model(self, model) -> None:
        """Makes a model that Keras trains under this strategy data parallel."""
        if getattr(model, "_strategy", None) is not self:
            models.extend_model(model, self)
        else:
            models.extend_parts(model)
