"""A collective between workers as a traced step: a variable's value in, the outcome out."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

__all__ = ["PreparedStep"]


class PreparedStep:
    """One collective of one size and type; see `tfparallel.bench.contender.Prepared`.

    Args:
        collective: Does it, in a `tf.function`.
        count: The elements of this worker's input.
        dtype: Their type.
        before: Called before each run.
    """

    def __init__(
        self,
        collective: Callable[[tf.Tensor], tf.Tensor],
        count: int,
        dtype: str,
        before: Callable[[], None] = lambda: None,
    ):
        self._before = before
        self._input = tf.Variable(tf.zeros([count], dtype), trainable=False)
        # Read from a variable: a constant would be exchanged once, when the step is traced.
        steps = (
            lambda: collective(self._input.read_value()),
            lambda: tf.identity(self._input.read_value()),
        )
        self._run, self._run_null = [tf.function(s).get_concrete_function() for s in steps]

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Takes this worker's input."""
        self._input.assign(inputs[0])

    def run(self) -> tf.Tensor:
        """Does the collective once; returns its outcome when it is there in full."""
        self._before()
        return _concrete(self._run())

    def run_null(self) -> None:
        """Does all that `run` does, without the exchange."""
        _concrete(self._run_null())

    def arrays(self, outcome: tf.Tensor) -> list[np.ndarray]:
        """Returns this worker's outcome."""
        return [outcome.numpy()]


def _concrete(result: tf.Tensor) -> tf.Tensor:
    if "GPU" in result.device:
        result[-1].numpy()  # On a CPU the call returns with the result.
    return result
