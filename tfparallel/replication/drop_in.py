"""The drop-in strategies: plain Keras code under their scope trains exactly."""

from tfparallel.replication import checks
from tfparallel.replication import model as models
from tfparallel.strategies import mirrored, multi_worker


class _ExtendsModels:
    """Extends a Keras model in place when it is compiled, or first asked to predict."""

    def extend_model(self, model) -> None:
        """Makes a model that Keras trains under this strategy data parallel."""
        if getattr(model, "_strategy", None) is not self:
            models.extend_model(model, self)
        else:
            checks.check_compile(model, self)
            models.extend_parts(model)


class MirroredStrategy(_ExtendsModels, mirrored.MirroredStrategy):
    """See `tfparallel.strategies.mirrored.MirroredStrategy`, which says what its arguments are."""


class MultiWorkerMirroredStrategy(_ExtendsModels, multi_worker.MultiWorkerMirroredStrategy):
    """See `tfparallel.strategies.multi_worker.MultiWorkerMirroredStrategy`."""
