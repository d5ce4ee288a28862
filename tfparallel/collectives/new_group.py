"""Groups: collectives among some of the workers."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.cluster.differences import name_workers
from tfparallel.collectives.group import Group, Workers, find, is_index
from tfparallel.collectives.in_replica import Replicas
from tfparallel.collectives.mpi import workers as mpi_workers
from tfparallel.collectives.mpi.workers import MpiProcessGroup
from tfparallel.collectives.process_group import ProcessGroup


def new_group(ranks: Sequence[int], timeout_seconds: float = 1800.0) -> Group:
    """Makes a group of some of the workers, on which collectives take `group=`.

    Every worker of the job must call it with the same arguments, also those outside the group, and
    in the same order as other collectives. Collectives of a group are called by its members alone,
    and concern nobody else. `root` stays a worker index: `broadcast(x, root=2, group=evens)`.

    A group uses the transport of the job. Through MPI on one host, each member allocates 4 MiB of
    shared memory for it, so make groups once, not in a loop.

    Args:
        ranks: The indices of the workers, in any order.
        timeout_seconds: How long a collective of the group waits for its members.

    Returns:
        The group: `ranks` in ascending order, `size`, and `rank`, the position of this worker in
        it, or None outside.

    Raises:
        ValueError: If `ranks` is empty, repeats an index or has one that is not a worker, if
            `timeout_seconds` is not positive, or if the workers' arguments differ.
        RuntimeError: In a replica, in a `tf.function`, or in a multi-worker job before a strategy
            has connected the workers.

    Example:
        >>> evens = tfparallel.new_group(range(0, tfparallel.num_workers(), 2))
        >>> if evens.rank is not None:
        ...     total = tfparallel.all_reduce(1.0, group=evens)
    """
    everyone = find()
    if isinstance(everyone, Replicas) or not tf.executing_eagerly():
        raise RuntimeError(
            "Groups are made by the workers' programs, outside replicas and `tf.function`s. "
            "Received: a call of `tfparallel.new_group` inside one. Make the group first, and use "
            "it there."
        )
    ranks = list(ranks)
    problem = _problem(ranks, timeout_seconds, everyone.num_ranks)
    if isinstance(everyone, Workers):
        # Even a worker with wrong arguments must take part here, or the others would hang.
        everyone.compare_notes(f"new_group({ranks}, timeout_seconds={timeout_seconds})")
    if problem:
        raise ValueError(problem)
    ranks = sorted(map(int, ranks))
    rank = ranks.index(everyone.rank) if everyone.rank in ranks else None
    if not isinstance(everyone, Workers):
        return Group(ranks, rank, None)
    return Group(ranks, rank, _connected(everyone.group, ranks, timeout_seconds))


def _problem(ranks, timeout_seconds, num_workers):
    all_are_workers = all(is_index(rank) and rank in range(num_workers) for rank in ranks)
    if not ranks or not all_are_workers or len(set(ranks)) < len(ranks):
        everyone = name_workers(range(num_workers))
        return (
            f"A group needs at least one worker, each once, of this job: {everyone}. Received: "
            f"ranks={ranks}. Pass worker indices, such as `tfparallel.new_group([0])`."
        )
    if not 0 < timeout_seconds < float("inf"):
        return (
            "The timeout of a group must be a positive number of seconds. Received: "
            f"timeout_seconds={timeout_seconds!r}. Omit it to wait up to half an hour."
        )
    return ""


def _connected(workers, members, timeout_seconds) -> ProcessGroup | None:
    """Connects some workers; all call it. Returns None outside the group, and in a group of one."""
    group = workers.by_tensorflow.of_members(members, timeout_seconds)
    if len(members) > 1 and isinstance(workers, MpiProcessGroup):
        return mpi_workers.subgroup(workers, group, members)
    return group if workers.worker_index in members and len(members) > 1 else None
