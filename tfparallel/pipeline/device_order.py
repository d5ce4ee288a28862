"""Runs instructions one by one on each device, and records when each begins and ends.

Control dependencies order a device's next instruction after the end of its last. Transfers to the
device continue meanwhile: only computation waits.

A GPU runs asynchronously: for its host, an operation is done once it is queued. So a time is
recorded when one element of each tensor has reached the host, since the host waits for that copy.
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfparallel.layout.schedule import Instruction

_OF_THE_HOST = (tf.string, tf.variant, tf.resource)


class DeviceOrder:
    """The instructions of a traced step, device by device.

    Args:
        devices: The names of the devices.
        timed: Whether to record when each instruction begins and ends.

    Attributes:
        ends: The last operation of each instruction, in a graph.
        stamps: If timed, begin and end of each instruction, scalars in seconds.
    """

    def __init__(self, devices: Sequence[str], timed: bool):
        self._devices = devices
        self._timed = timed
        self._last: list[list[tf.Operation]] = [[] for _ in devices]
        self._current: Instruction | None = None
        self.ends: dict[Instruction, tf.Operation] = {}
        self.stamps: dict[Instruction, tuple[tf.Tensor, tf.Tensor]] = {}

    @contextlib.contextmanager
    def next(self, device: int, instruction: Instruction) -> Iterator[list]:
        """Places the block's operations on the device, after its last instruction.

        Yields:
            A list; add the results of the instruction to it.
        """
        done: list = []
        self._current = instruction
        with tf.device(self._devices[device]):
            with tf.control_dependencies(self._last[device]):
                yield done
            self._end(device, instruction, done)

    def begun(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Records the begin once all tensors have arrived; readers of the result wait for it."""
        if not self._timed:
            return tensors
        begin = _time_after(tensors)
        self.stamps[self._current] = (begin, begin)
        with tf.control_dependencies([begin]):
            return [tf.identity(tensor) for tensor in tensors]

    def _end(self, device, instruction, done):
        if self._timed and instruction in self.stamps:
            end = _time_after(done)
            self.stamps[instruction] = (self.stamps[instruction][0], end)
            done = [end]
        if tf.executing_eagerly() or not done:
            return
        with tf.control_dependencies(done):
            end = tf.no_op(name=f"end_of_{instruction}_of_stage_{instruction.stage}")
        self._last[device] = [end]
        self.ends[instruction] = end


def _time_after(results):
    """Returns the time on the host once all results are there."""
    parts = tf.nest.flatten(results, expand_composites=True)
    tensors = [part for part in parts if tf.is_tensor(part) and part.dtype not in _OF_THE_HOST]
    elements = [tf.reshape(tensor, [-1])[:1] for tensor in tensors]
    with tf.device("CPU:0"):
        arrived = [tf.identity(element) for element in elements]
        with tf.control_dependencies([*results, *arrived]):
            return tf.timestamp()
