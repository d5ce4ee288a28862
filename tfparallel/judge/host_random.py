"""Numbers that Python code draws while it is traced, with `random` or NumPy.

They are constants of a trace, so each trace has other numbers. A step in pieces is not traced as
often as that of one device.
"""

import random
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfparallel.tracing.graphs import with_inner


class HostRandom:
    """Restores the states of Python's and NumPy's random numbers at the end of a block.

    Attributes:
        has_drawn: Whether the block changed one of them.
    """

    has_drawn = False

    def __enter__(self) -> "HostRandom":
        self._states = random.getstate(), np.random.get_state()
        return self

    def __exit__(self, *error) -> None:
        python, of_numpy = self._states
        now = random.getstate(), np.random.get_state()
        self.has_drawn = repr(now) != repr(self._states)
        random.setstate(python)
        np.random.set_state(of_numpy)


def differs_in_each_trace(traced: Callable[[], tf.Graph]) -> bool:
    """Returns whether a function draws such numbers, also by a generator of its own, or counts.

    Args:
        traced: Traces the function, and returns the graph.
    """
    with HostRandom() as drawn:
        first, second = _constants(traced()), _constants(traced())
    return drawn.has_drawn or first != second


def _constants(graph) -> list[bytes]:
    operations = with_inner(graph.get_operations())
    values = (op.get_attr("value") for op in operations if op.type == "Const")
    return [value.SerializeToString() for value in values]
