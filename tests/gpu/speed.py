"""Step times and memory of `make test-gpu`: plain Keras, TensorFlow's own strategy, and ours."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests.gpu.row import OK, Row, tried
from tfparallel import device_memory
from tfparallel.replication.drop_in_strategies import MirroredStrategy

# How TensorFlow's own strategy fails where XLA is to compile a step of several devices.
_ONE_DEVICE_A_PROGRAM = "tfvariable_on_a_different_device|[Uu]nsupported operations"
_PLAIN, _THEIRS, _ALONE, _OURS = (
    "plain Keras",
    "tf.distribute.MirroredStrategy",
    "tfparallel.MirroredStrategy on one device",
    "tfparallel.MirroredStrategy",
)
# What is to be reached: of a step's time beside another's, and of GPU:0's memory beside the rest.
_GOALS = {(_OURS, _THEIRS): 1.05, (_ALONE, _PLAIN): 1.02}
_MEMORY_GOAL = 1.1


class Measured(NamedTuple):
    """A step.

    Attributes:
        seconds: The median of its times.
        num_rows: Of its batch.
        peak_bytes: The most that tensors have taken, by GPU.
    """

    seconds: float
    num_rows: int
    peak_bytes: dict[str, int]

    def __str__(self) -> str:
        memory = "".join(
            f", {name} {peak / 2**20:.0f} MiB" for name, peak in self.peak_bytes.items()
        )
        return f"{1e3 * self.seconds:.1f} ms a step of {self.num_rows} rows{memory}"


def speeds(make: Callable, names: list[str], *, is_small: bool) -> Iterator[Row]:
    """Yields a row for each way to train, with XLA off and on, and one for each ratio.

    Args:
        make: Returns a model, and a batch for one device; takes whether they are small.
        names: The devices.
        is_small: Whether to train the small one, for few steps.
    """
    scopes = {
        _PLAIN: (lambda: tf.device(names[0]), names[:1]),
        _THEIRS: (lambda: tf.distribute.MirroredStrategy(names).scope(), names),
        _ALONE: (lambda: MirroredStrategy(names[:1]).scope(), names[:1]),
        _OURS: (lambda: MirroredStrategy(names).scope(), names),
    }
    measured: dict[tuple[str, bool], Measured] = {}
    for title, (scope, devices) in scopes.items():
        for is_compiled in (False, True):

            def measure(title=title, scope=scope, devices=devices, is_compiled=is_compiled):
                step = _step(make, is_small, scope, devices, is_compiled)
                measured[title, is_compiled] = step
                return str(step)

            refusal = _ONE_DEVICE_A_PROGRAM if title == _THEIRS and is_compiled else None
            yield from tried(_named(title, is_compiled), measure, refusal)
    yield from ratios(measured)


def ratios(measured: dict[tuple[str, bool], Measured]) -> Iterator[Row]:
    """Yields the figures to reach: none of them fails, for they depend on the machine.

    Args:
        measured: Steps by what trained, and whether XLA compiled it.
    """
    for (ours, theirs), goal in _GOALS.items():
        for is_compiled in (False, True):
            pair = [measured.get((title, is_compiled)) for title in (ours, theirs)]
            if None not in pair:
                ratio = pair[0].seconds / pair[1].seconds
                what = f"step time, {_named(ours, is_compiled)} / {theirs}"
                yield what, OK, f"{ratio:.3f}; at most {goal} is to be reached"
    for is_compiled in (False, True):
        step = measured.get((_OURS, is_compiled))
        if step is not None and len(step.peak_bytes) > 1:
            first, *others = step.peak_bytes.values()
            what = f"peak memory{', XLA' * is_compiled}, first GPU / the others' largest"
            yield what, OK, f"{first / max(others):.3f}; at most {_MEMORY_GOAL} is to be reached"


def _named(title, is_compiled):
    return f"{title}{', XLA' * is_compiled}"


def _step(make, is_small, scope, devices, is_compiled) -> Measured:
    keras.backend.clear_session()
    for device in device_memory.peak_bytes_of_gpus(devices):
        tf.config.experimental.reset_memory_stats(device)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with scope():
        model, x, y = make(is_small)
        model.compile("adam", loss, jit_compile=is_compiled)
    batch = (np.concatenate([x] * len(devices)), np.concatenate([y] * len(devices)))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    steps = _Times()
    num_steps = 4 if is_small else 25
    model.fit(data, steps_per_epoch=num_steps, verbose=0, callbacks=[steps])
    return Measured(
        statistics.median(steps.seconds[num_steps // 4 :]),
        len(batch[0]),
        device_memory.peak_bytes_of_gpus(devices),
    )


class _Times(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds, self._begin = [], 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._begin)
