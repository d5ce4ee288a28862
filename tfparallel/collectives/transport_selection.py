"""Selects the transport that sums the gradients of a job's workers.

The default is the one that was fastest in every measurement (docs/mpi.md): NCCL between GPUs, MPI's
shared memory on one host if all workers have it, else TensorFlow's ring, tuned.

Under "auto" the transports are measured on the job's own gradients, like the algorithms of one
process in `algorithm_selection.py`. Worker 0's profile decides for all workers (`tfparallel bench
all_reduce --nproc_per_node=2 --save_profile`); without one, all workers run a calibration. A
transport is a candidate only if every worker has it.
"""

import dataclasses
import platform
import statistics
import time
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from tfparallel.collectives import algorithm_selection, profile, transport
from tfparallel.collectives.algorithm_selection import Choice
from tfparallel.collectives.mpi import library, workers
from tfparallel.collectives.process_group import ProcessGroup

_WHAT = "the choice of the transport"  # Names the exchanges.
_MAX_BYTES = 2**26  # Enough to rank the transports by bandwidth.
# "mpi" is MPI's own choice of algorithm; TensorFlow's ring without pieces never won.
_LIKELY = ("nccl", "ring_tuned", "mpi")
_MIN_ROUNDS = 3
_MAX_ROUNDS = 15


class Outcome(NamedTuple):
    """The workers, connected by the chosen transport, and the choice with its reason."""

    workers: ProcessGroup
    choice: Choice


def by_default(group: ProcessGroup) -> Outcome:
    """Selects the default transport: the fastest of those installed.

    Every worker calls it at the same point of the program, with the group that TensorFlow connects.
    """
    name, why = _default(group)
    if name != group.transport:
        joined = _joined(group, [name]).get(name)
        group, why = joined or group, why if joined else f"{name} failed to start"
    name, runs = group.transport, group.implementation
    return Outcome(group, Choice(name, "default", why, implementation=runs))


def _default(group) -> tuple[str, str]:
    """Returns the name of the default transport and the reason."""
    if not transport.nccl_refusal(group):
        return "nccl", "each worker has a GPU"
    offers = workers.offers(group, _WHAT)
    if len({offer["memory"] for offer in offers}) > 1:
        return group.transport, "the workers are on several hosts"
    missing = {k: offer["missing"] for k, offer in enumerate(offers) if offer["missing"]}
    if missing:
        if group.worker_index == 0:
            logging.warning(
                "The workers share a host, and could sum gradients faster through shared memory: "
                "%s (worker %d lacks it: %s). TensorFlow's ring is used instead.",
                *(library.PIP, *min(missing.items())),
            )
        return group.transport, f"one host, without MPI: {library.PIP}"
    if not all(offer["starts"] for offer in offers):
        return group.transport, "one host, with an MPI library that only its own mpiexec can start"
    return "mpi", "all workers share the memory of one host"


class TransportChoice:
    """Chooses a transport once, for the gradients of the first model that trains.

    Every worker creates and calls it at the same point of the program. Without a profile, it
    measures the transports if `calibrate` is set. A profile of worker 0 from another machine raises
    `ValueError`.
    """

    def __init__(self, group: ProcessGroup, calibrate: bool = True):
        self._group = group.by_tensorflow
        self._calibrate = calibrate
        self._profile = _profile_of_first(group)

    @property
    def how(self) -> str:
        """How the choice will be made, as text for the user."""
        return algorithm_selection.how(self._profile, self._calibrate)

    def choose(self, size_bytes: int) -> Outcome:
        """Chooses a transport for gradients of `size_bytes` in total."""
        group, names = self._group, _candidates(self._group)
        size = f"{size_bytes / 2**20:.3g} MiB on {group.num_workers} workers"
        default = "nccl" if "nccl" in names else group.transport
        groups: dict[str, ProcessGroup] = {}
        if self._profile:
            seconds = {
                name: profile.seconds_at(row, size_bytes)
                for name, row in self._profile.items()
                if name in names
            }
            choice = algorithm_selection.fastest(seconds, default, "profile", size)
        elif self._calibrate:
            groups = _joined(group, [name for name in _LIKELY if name in names])
            seconds = _measured(groups, min(size_bytes, _MAX_BYTES))
            choice = algorithm_selection.fastest(seconds, default, "calibration", size)
        else:
            choice = Choice(default, "default", f"{size}: no profile, and nothing was measured")
        groups = groups or _joined(group, [choice.algorithm])
        if choice.algorithm not in groups:
            # MPI is installed but cannot start.
            groups = _joined(group, [group.transport])
            choice = Choice(
                group.transport, "default", f"{size}: {choice.algorithm} failed to start"
            )
        workers = groups[choice.algorithm]
        choice = dataclasses.replace(choice, implementation=workers.implementation)
        return Outcome(workers, choice)


def names_of(group: ProcessGroup) -> list[str]:
    """Returns the names of the workers in a profile, made of their host names."""
    return [f"worker:{host}" for host in group.exchange(platform.node(), _WHAT)]


def _profile_of_first(group) -> profile.Times | None:
    names = names_of(group)
    times, problem = None, None
    if group.worker_index == 0:
        try:
            times = profile.load(names)
        except ValueError as error:
            problem = str(error)
    times, problem = group.exchange([times, problem], _WHAT)[0]
    if problem:
        raise ValueError(problem)
    return times


def _candidates(group) -> list[str]:
    """Returns the transports that all workers have."""
    names = ["ring", "ring_tuned"]
    if not transport.nccl_refusal(group):
        names.append("nccl")
    if all(group.exchange(library.is_installed(), _WHAT)):
        names += [name for name in transport.NAMES if name.startswith("mpi")]
    return names


def _joined(group, names) -> dict[str, ProcessGroup]:
    """Connects the workers by each of the transports; omits those that fail to start anywhere."""
    groups = {}
    for name in names:
        try:
            joined = transport.joined(group, name)
        except (RuntimeError, OSError) as error:  # OSError: a socket's, or no answer in time.
            logging.warning("%s failed to start, so another transport is used: %s", name, error)
            joined = None
        if all(group.exchange(joined is not None, _WHAT)):
            groups[name] = joined
    return groups


def _measured(groups, size_bytes) -> dict[str, float]:
    """Measures the transports in turns; returns lower quartiles of the slowest worker's times."""
    group = next(iter(groups.values()))
    vector = tf.Variable(tf.zeros([max(size_bytes // 4, 1)]), trainable=False)
    steps = {}
    for name, joined in groups.items():

        def reduce(joined=joined):
            return joined.all_reduce([vector.read_value()])[0][:1]

        steps[name] = tf.function(reduce, autograph=False)
        steps[name]()
    meet = tf.function(lambda ones: group.all_reduce([ones])[0], autograph=False)
    times: dict[str, list[float]] = {name: [] for name in groups}

    def turn():
        for name, step in steps.items():
            meet(tf.ones([1])).numpy()
            start = time.perf_counter()
            step().numpy()
            times[name].append(time.perf_counter() - start)

    start = time.perf_counter()
    turn()
    num_affordable = int(algorithm_selection.BUDGET_SECONDS / (time.perf_counter() - start))
    num_rounds = max(min(group.exchange(num_affordable, _WHAT)[0], _MAX_ROUNDS), _MIN_ROUNDS)
    for _ in range(num_rounds - 1):
        turn()
    by_worker = group.exchange(times, _WHAT)
    return {
        name: statistics.quantiles(map(max, *[seconds[name] for seconds in by_worker]), n=4)[0]
        for name in groups
    }
