"""The drop-in strategies: plain Keras code under their scope trains exactly."""

from tfparallel.replication import checks, sample_partition
from tfparallel.replication import data_parallel_model as models
from tfparallel.strategies import keras_trainer, mirrored, multi_worker


class _ExtendsModels:
    """Extends a Keras model in place when it is compiled, or first asked to predict."""

    def extend_model(self, model) -> None:
        """Makes a model that Keras trains under this strategy data parallel."""
        if getattr(model, "_strategy", None) is not self:
            models.extend_model(model, self)
        else:
            checks.check_compile(model, self)
            models.extend_parts(model)

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a data set; the batches of a sample partition are marked as such."""
        return sample_partition.marked(super().experimental_distribute_dataset(dataset, options))


class MirroredStrategy(_ExtendsModels, mirrored.MirroredStrategy):
    """See `tfparallel.strategies.mirrored.MirroredStrategy`, which says what its arguments are."""


class MultiWorkerMirroredStrategy(_ExtendsModels, multi_worker.MultiWorkerMirroredStrategy):
    """See `tfparallel.strategies.multi_worker.MultiWorkerMirroredStrategy`."""

    def extend_model(self, model) -> None:
        """Makes a model that Keras trains under this strategy data parallel, when it is compiled.

        Raises:
            ValueError: If it was compiled outside the scope, so that `fit` knows of no chief.
        """
        is_late = getattr(model, "_strategy", None) is not self and model.compiled
        if self.workers is not None and is_late and keras_trainer.compiling_model() is not model:
            raise ValueError(
                f"Model '{model.name}' was compiled outside the scope of the strategy that trains "
                "it, and every worker would print and write what the chief alone should. "
                "`compile` within the scope is required. Received: a model whose losses and "
                "metrics belong to no strategy. Write `with strategy.scope(): model.compile(...)`."
            )
        super().extend_model(model)
