"""Numbers that Python code draws while it is traced, with `random` or NumPy.

They are constants of a trace, so each trace has other numbers. A step in pieces is not traced as
often as that of one device.
"""

import random
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfparallel.tracing.graphs import with_inner

# Until no other thread draws: those that read data do not while their queue is full.
_MOST_SECONDS = 30.0
_WAIT_SECONDS = 0.1


class HostRandom:
    """Restores the states of Python's and NumPy's random numbers at the end of a block.

    Attributes:
        has_drawn: Whether the block changed one of them.
    """

    has_drawn = False

    def __enter__(self) -> "HostRandom":
        self._before, self._states = _states(), (random.getstate(), np.random.get_state())
        return self

    def __exit__(self, *error) -> None:
        python, of_numpy = self._states
        self.has_drawn = _states() != self._before
        random.setstate(python)
        np.random.set_state(of_numpy)


def differs_in_each_trace(traced: Callable[[], tf.Graph]) -> bool:
    """Returns whether a function draws such numbers, also by a generator of its own, or counts.

    Other threads draw, too, such as those of a `keras.utils.PyDataset`. A function that draws does
    so in each trace, so one trace without a draw is a proof.

    Args:
        traced: Traces the function, and returns the graph.
    """
    first, is_proved = None, False
    deadline = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < deadline:
        before = _states()
        constants = _constants(traced())
        is_proved |= _states() == before
        if first is not None and (constants != first or is_proved):
            return constants != first
        if first is not None:
            time.sleep(_WAIT_SECONDS)
        first = constants
    return True


def _states() -> str:
    return repr((random.getstate(), np.random.get_state()))


def _constants(graph) -> list[bytes]:
    operations = with_inner(graph.get_operations())
    values = (op.get_attr("value") for op in operations if op.type == "Const")
    return [value.SerializeToString() for value in values]
