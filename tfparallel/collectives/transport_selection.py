"""Which transport sums the gradients of a job's workers.

Where nobody asks, the one that has been fastest wherever it was measured (docs/mpi.md): between
GPUs NCCL, on one host MPI's shared memory if all workers have it, else TensorFlow's ring, tuned.

Under "auto" it is measured for the job's own gradients, as `algorithm_selection.py` chooses among
the algorithms of one process. Worker 0's profile decides for all (`tfparallel bench all_reduce
--nproc_per_node=2 --save_profile`), or, without one, a calibration in which all take part. A
transport that needs what a worker lacks is no candidate.
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
from tfparallel.collectives.mpi import library, start
from tfparallel.collectives.process_group import ProcessGroup

_WHAT = "the choice of what joins the workers"  # Names the exchanges.
_MAX_BYTES = 2**26  # More need not be moved to tell which transport moves a byte faster.
# Of MPI's algorithms its own choice; TensorFlow's ring without pieces never won.
_LIKELY = ("nccl", "ring_tuned", "mpi")
_MIN_ROUNDS = 3
_MAX_ROUNDS = 15


class Outcome(NamedTuple):
    """What was chosen: the workers, joined by it, and why."""

    workers: ProcessGroup
    choice: Choice


def by_default(group: ProcessGroup) -> Outcome:
    """Takes what is fastest of what is installed, where nobody asks for anything.

    Called by every worker, at the same place of the program, with what TensorFlow has joined.
    """
    name, why = _default(group)
    if name != group.transport:
        joined = _joined(group, [name]).get(name)
        group, why = joined or group, why if joined else f"{name} failed to start"
    name, runs = group.transport, group.implementation
    return Outcome(group, Choice(name, "default", why, implementation=runs))


def _default(group) -> tuple[str, str]:
    """The name of a transport, and why it is that one."""
    if not transport.nccl_refusal(group):
        return "nccl", "each worker has a GPU"
    offers = start.offers(group, _WHAT)
    if len({offer["memory"] for offer in offers}) > 1:
        return group.transport, "the workers are on several hosts"
    missing = {k: offer["missing"] for k, offer in enumerate(offers) if offer["missing"]}
    if missing:
        if group.worker_index == 0:
            logging.warning(
                "The workers share a host, and would sum gradients faster through its memory: %s "
                "(worker %d lacks it: %s). TensorFlow's ring does it now.",
                *(library.PIP, *min(missing.items())),
            )
        return group.transport, f"one host, without MPI: {library.PIP}"
    if not all(offer["starts"] for offer in offers):
        return group.transport, "one host, with an MPI library that only its mpiexec starts"
    return "mpi", "all workers share the memory of one host"


class TransportChoice:
    """Chooses once, for the gradients of the first model that is trained.

    Made and called by every worker, at the same place of the program. Without a profile it is
    measured if `calibrate` says so; a profile of worker 0 of another machine is a `ValueError`.
    """

    def __init__(self, group: ProcessGroup, calibrate: bool = True):
        self._group = group.by_tensorflow
        self._calibrate = calibrate
        self._profile = _profile_of_first(group)

    @property
    def how(self) -> str:
        """By what the choice will be made, in words."""
        return algorithm_selection.how(self._profile, self._calibrate)

    def choose(self, size_bytes: int) -> Outcome:
        """Chooses a transport for gradients of that many bytes in all."""
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
            found = algorithm_selection.fastest(seconds, default, "profile", size)
        elif self._calibrate:
            groups = _joined(group, [name for name in _LIKELY if name in names])
            seconds = _measured(groups, min(size_bytes, _MAX_BYTES))
            found = algorithm_selection.fastest(seconds, default, "calibration", size)
        else:
            found = Choice(default, "default", f"{size}: no profile, and nothing was measured")
        groups = groups or _joined(group, [found.algorithm])
        if found.algorithm not in groups:
            # MPI is installed, and cannot start.
            groups = _joined(group, [group.transport])
            found = Choice(group.transport, "default", f"{size}: {found.algorithm} failed to start")
        workers = groups[found.algorithm]
        found = dataclasses.replace(found, implementation=workers.implementation)
        return Outcome(workers, found)


def names_of(group: ProcessGroup) -> list[str]:
    """Returns a name for each worker, by which a profile knows them: those of their hosts."""
    return [f"worker:{host}" for host in group.exchange(platform.node(), _WHAT)]


def _profile_of_first(group) -> profile.Times | None:
    names = names_of(group)
    found, problem = None, None
    if group.worker_index == 0:
        try:
            found = profile.load(names)
        except ValueError as error:
            problem = str(error)
    found, problem = group.exchange([found, problem], _WHAT)[0]
    if problem:
        raise ValueError(problem)
    return found


def _candidates(group) -> list[str]:
    """The transports that all workers have."""
    found = ["ring", "ring_tuned"]
    if not transport.nccl_refusal(group):
        found.append("nccl")
    if all(group.exchange(library.is_installed(), _WHAT)):
        found += [name for name in transport.NAMES if name.startswith("mpi")]
    return found


def _joined(group, names) -> dict[str, ProcessGroup]:
    """The workers joined by each of the transports that starts on all of them."""
    found = {}
    for name in names:
        try:
            joined = transport.joined(group, name)
        except RuntimeError as error:
            logging.warning("%s does not start, and another transport is taken: %s", name, error)
            joined = None
        if all(group.exchange(joined is not None, _WHAT)):
            found[name] = joined
    return found


def _measured(groups, size_bytes) -> dict[str, float]:
    """The lower quartile of the slowest worker's seconds, by transport, all taking turns."""
    group = next(iter(groups.values()))
    vector = tf.Variable(tf.zeros([max(size_bytes // 4, 1)]), trainable=False)
    steps = {}
    for name, joined in groups.items():

        def reduce(joined=joined):
            return joined.all_reduce([vector.read_value()])[0][:1]

        steps[name] = tf.function(reduce, autograph=False)
        steps[name]()
    meet = tf.function(lambda here: group.all_reduce([here])[0], autograph=False)
    times: dict[str, list[float]] = {name: [] for name in groups}

    def turn():
        for name, step in steps.items():
            meet(tf.ones([1])).numpy()
            start = time.perf_counter()
            step().numpy()
            times[name].append(time.perf_counter() - start)

    start = time.perf_counter()
    turn()
    wanted = int(algorithm_selection.BUDGET_SECONDS / (time.perf_counter() - start))
    num_rounds = max(min(group.exchange(wanted, _WHAT)[0], _MAX_ROUNDS), _MIN_ROUNDS)
    for _ in range(num_rounds - 1):
        turn()
    everyones = group.exchange(times, _WHAT)
    return {
        name: statistics.quantiles(map(max, *[theirs[name] for theirs in everyones]), n=4)[0]
        for name in groups
    }
