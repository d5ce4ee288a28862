"""Which workers train a model, however it is parallel."""

import keras

from tfparallel.collectives.process_group import ProcessGroup

__all__ = ["workers_of"]


def workers_of(model: keras.Model) -> ProcessGroup | None:
    """Returns the workers that train a model together; None if one process does.

    A mesh of workers has a strategy that Keras does not know of: its steps are not the strategy's.
    """
    for strategy in (getattr(model, "strategy", None), model.distribute_strategy):
        workers = getattr(strategy, "workers", None)
        if isinstance(workers, ProcessGroup):
            return workers
    return None
