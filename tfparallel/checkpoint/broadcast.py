"""Sends the arrays of a checkpoint from the chief, which alone can read it, to all workers."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfparallel.checkpoint.stored import StoredCheckpoint


def broadcast(
    stored: StoredCheckpoint | None,
    content: dict[str, Any],
    specs: Sequence[list[Any]],
    workers: Any,
) -> list[Iterator[np.ndarray]]:
    """Returns the arrays of each group, read and sent one by one as they are consumed.

    Args:
        stored: The checkpoint on the chief, else None.
        content: Its metadata.
        specs: `[name, shape, dtype]` of each array.
        workers: The `ProcessGroup`; None in a single process.
    """

    def sent(start, end):
        if stored is not None:
            arrays = stored.arrays(start, end)
        else:
            arrays = (np.zeros(shape, np.dtype(kind)) for _, shape, kind in specs[start:end])
        for array in arrays:
            if workers is not None:
                tensor = keras.ops.convert_to_tensor(array, array.dtype.name)
                array = workers.broadcast([tensor])[0].numpy()
            yield array

    ends = itertools.accumulate(content["num_arrays"], initial=0)
    return [sent(*ends_of) for ends_of in itertools.pairwise(ends)]
