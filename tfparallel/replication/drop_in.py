"""`tfparallel.MirroredStrategy`: plain Keras code under its scope trains exactly."""

from tfparallel.replication import model as models
from tfparallel.strategies import mirrored


class MirroredStrategy(mirrored.MirroredStrategy):
    """See `tfparallel.strategies.mirrored.MirroredStrategy`, which says what its arguments are.

    To that this one adds what happens to a Keras model that trains under it: the model's class is
    extended in place when `fit`, `evaluate`, `predict` or `train_on_batch` is first called.
    """

    def extend_model(self, model) -> None:
        """Makes a model that Keras trains under this strategy data parallel."""
        if getattr(model, "_strategy", None) is not self:
            models.extend_model(model, self)
        else:
            models.extend_parts(model)
