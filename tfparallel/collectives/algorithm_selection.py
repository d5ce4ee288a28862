"""Selects the all-reduce algorithm between the replicas of one process, by measurement.

A saved profile decides. Without one, the algorithms take turns on tensors of the actual sizes, for
less than two seconds, before the first step. TensorFlow's default is one of the candidates, and
only a clearly faster one replaces it: within measurement noise the default stays.

Times are lower quartiles. Other load on the machine only ever slows calls down, and in a short
measurement it hits some algorithms more than others.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfparallel.collectives import cross_device, nccl, profile
from tfparallel.user_log import notice

DEFAULT = "tf_reduce_to_one"
BUDGET_SECONDS = 1.5
# An algorithm must be this much faster than the default to replace it.
MIN_GAIN = 0.1
_MIN_ROUNDS = 3
_MAX_ROUNDS = 15
# Algorithms that tie or win somewhere in one process; likely winners first, as time may run out.
_CANDIDATES = ("nccl", DEFAULT, "tf_hierarchical_copy", "tree", "hierarchical", "ring")
# With more tensors than this, the smallest are measured as one.
_MAX_TENSORS = 32


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen algorithm, with the reason.

    Attributes:
        algorithm: Its name.
        source: "profile", "calibration", "default" or "argument".
        why: The reason, as text for the user.
        seconds: Lower-quartile time of a reduction, by algorithm; empty if nothing was measured.
        implementation: The implementation that runs.
    """

    algorithm: str
    source: str
    why: str
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    implementation: str = ""

    @property
    def what_runs(self) -> str:
        """The implementation; derived from the algorithm if unset."""
        return self.implementation or cross_device.implementation(self.algorithm)

    def __str__(self):
        return f"{self.algorithm} ({self.what_runs}); {self.why}"

    def as_json(self) -> dict[str, Any]:
        """Returns the choice for a report, times in microseconds."""
        return {
            "algorithm": self.algorithm,
            "implementation": self.what_runs,
            "source": self.source,
            "why": self.why,
            "microseconds": {name: time * 1e6 for name, time in self.seconds.items()},
        }


class ChosenAllReduce(tf.distribute.CrossDeviceOps):
    """Picks the fastest algorithm for the first values that it reduces, and keeps it.

    Without a profile, it measures the algorithms if `calibrate` is set. A profile from another
    machine raises `ValueError`.
    """

    def __init__(self, devices: Sequence[str], calibrate: bool = True):
        super().__init__()
        self._devices = list(devices)
        self._calibrate = calibrate
        self._profile = profile.load(devices)  # Loaded now, so that a bad profile fails early.
        self._ops = None
        self._elsewhere = tf.distribute.ReductionToOneDevice()
        self.choice: Choice | None = None

    @property
    def how(self) -> str:
        """How the choice will be made, as text for the user."""
        return how(self._profile, self._calibrate)

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        """Reduces one value; before the choice, on one device."""
        ops = self._ops or self._elsewhere
        return ops.reduce(reduce_op, per_replica_value, destinations, options)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        """Reduces several values, usually gradients; the first call makes the choice."""
        if self._ops is None:
            specs = [_spec(value) for value, _ in value_destination_pairs]
            specs = [spec for spec in specs if spec is not None]
            self.choice = choose(self._devices, specs, self._profile, self._calibrate)
            self._ops = cross_device.make(self.choice.algorithm, self._devices)
            notice(f"all-reduce: {self.choice}")
        return self._ops.batch_reduce(reduce_op, value_destination_pairs, options)


def all_reduce_report(model) -> dict[str, Any] | None:
    """Returns the choice of a model's strategy for a report; None for TensorFlow's default."""
    choice = choice_of(getattr(model, "strategy", None))
    return None if choice is None else choice.as_json()


def choice_of(strategy) -> Choice | None:
    """Returns the choice of a strategy; None for TensorFlow's default, or if not made yet."""
    if getattr(strategy, "workers", None) is not None:
        return strategy.all_reduce_choice
    ops = getattr(strategy, "all_reduce_ops", None)
    if ops is None:
        return None
    if not isinstance(ops, ChosenAllReduce):
        if strategy.all_reduce_is_default:
            return Choice(strategy.all_reduce_name, "default", "each replica has a GPU")
        return Choice(strategy.all_reduce_name, "argument", "as requested")
    return ops.choice


def choose(
    devices: Sequence[str],
    specs: Sequence[tuple[int, tf.DType]],
    measured: profile.Times | None,
    calibrate: bool = True,
) -> Choice:
    """Returns the fastest algorithm, or the default if none is faster by `MIN_GAIN`.

    Args:
        devices: Names of the devices.
        specs: Number of elements and dtype of each tensor that a step reduces.
        measured: A profile, or None.
        calibrate: Whether to measure if there is no profile.
    """
    size_bytes = sum(count * dtype.size for count, dtype in specs)
    size = f"{size_bytes / 2**20:.3g} MiB in {len(specs)} tensors on {len(devices)} devices"
    if measured and size_bytes:
        runnable = cross_device.runnable(devices)
        seconds = {
            name: profile.seconds_at(row, size_bytes)
            for name, row in measured.items()
            if name in runnable and name not in cross_device.NOT_IN_LOOPS
        }
        return fastest(seconds, default(devices), "profile", size)
    if calibrate and size_bytes:
        return fastest(_calibrated(devices, specs), default(devices), "calibration", size)
    why = f"{size}: no profile, and nothing was measured"
    return Choice(default(devices), "default", why)


def how(measured: profile.Times | None, calibrate: bool) -> str:
    """Returns how a choice will be made, as text for the user."""
    if measured:
        return "by a saved profile"
    return "by a measurement" if calibrate else "without a measurement"


def fastest(seconds: dict[str, float], default: str, source: str, size: str) -> Choice:
    """Returns the fastest measured algorithm, or the default if none beats it by `MIN_GAIN`.

    Args:
        seconds: A time for each algorithm.
        default: The algorithm to keep unless another one is clearly faster.
        source: "profile" or "calibration".
        size: Describes the measured sizes, as text for the user.
    """
    best = min(seconds, key=seconds.get)
    if default not in seconds:
        return Choice(best, source, f"{size}: the fastest of those measured", seconds)
    gain = 1 - seconds[best] / seconds[default]
    if gain < MIN_GAIN:
        why = (
            f"{size}: none is faster by {MIN_GAIN:.0%}; the best ({best}) is faster by "
            f"{max(gain, 0):.0%}"
        )
        return Choice(default, source, why, seconds)
    return Choice(best, source, f"{size}: {gain:.0%} less time than {default}", seconds)


def default(devices: Sequence[str]) -> str:
    """Returns the default algorithm: NCCL between GPUs, else a sum on the first device."""
    return "nccl" if len(devices) > 1 and not nccl.refusal(devices) else DEFAULT


def _calibrated(devices, specs) -> dict[str, float]:
    """Measures the candidates in turns until the budget is spent; returns lower quartiles."""
    deadline = time.perf_counter() + BUDGET_SECONDS
    runnable = cross_device.runnable(devices)
    steps, times = {}, {}
    # A step is being traced; the measurement must run eagerly.
    with tf.init_scope():
        inputs = variables_on_each(devices, _merge_small(specs))
        for name in _CANDIDATES:
            if name not in runnable or (steps and time.perf_counter() > deadline - 0.7):
                continue
            steps[name] = _step(cross_device.make(name, devices), devices, inputs)
            steps[name]()
            times[name] = []
        for number in range(_MAX_ROUNDS):
            if number >= _MIN_ROUNDS and time.perf_counter() > deadline:
                break
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.quantiles(row, n=4)[0] for name, row in times.items()}


def _merge_small(specs):
    ordered = sorted(specs, key=lambda spec: -spec[0])
    largest = ordered[: _MAX_TENSORS - 1]
    rest: dict = {}
    for count, dtype in ordered[_MAX_TENSORS - 1 :]:
        rest[dtype] = rest.get(dtype, 0) + count
    return largest + [(count, dtype) for dtype, count in rest.items()]


def variables_on_each(devices: Sequence[str], specs: Sequence[tuple]) -> list[list[tf.Variable]]:
    """Returns variables to sum in a measurement: one per device, for each count and dtype."""
    inputs = []
    for count, dtype in specs:
        inputs.append([])
        for device in devices:
            with tf.device(device):
                inputs[-1].append(tf.Variable(tf.zeros([count], dtype), trainable=False))
    return inputs


def _step(ops, devices, inputs):
    def reduce():
        terms = [list(map(_read, devices, by_device)) for by_device in inputs]
        results = cross_device.all_reduce(ops, terms)
        # Reading one element of each result runs every sum, but copies little.
        return [list(map(_first_element, devices, by_device)) for by_device in results]

    traced = tf.function(reduce, autograph=False).get_concrete_function()
    return lambda: [last.numpy() for last in tf.nest.flatten(traced())]


def _read(device, variable):
    # The algorithm takes the devices from its tensors, and a plain read has no device.
    with tf.device(device):
        return tf.identity(variable.read_value())


def _first_element(device, tensor):
    with tf.device(device):
        return tensor[:1]


def _spec(value):
    term = value.values[0]
    if not isinstance(term, tf.Tensor) or term.shape.num_elements() is None:
        return None
    return term.shape.num_elements(), term.dtype
