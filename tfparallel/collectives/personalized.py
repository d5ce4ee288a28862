"""Collectives that send different rows to different participants: `scatter` and `all_to_all`.

`tfparallel.collectives.ops` says who participates. N participants, S bytes of a value on each, α
seconds for a message and β for a byte:

| between | `all_to_all` | `scatter` |
| --- | --- | --- |
| workers, MPI | `MPI_Ialltoall`; pairwise for large values: (N−1)α + (N−1)/N·Sβ | `MPI_Iscatter`, \
a binomial tree: ⌈log₂N⌉α + (N−1)/N·Sβ |
| workers, TensorFlow | its all-to-all, one message to each other worker: (N−1)α + (N−1)/N·Sβ | \
the same, of which only the root's parts are kept: the same time, but every worker sends |
| replicas of one worker | a copy on one device: 2NSβ of its memory | S bytes of the root |

The formulas are those of Rajeev Thakur, Rolf Rabenseifner, William Gropp, "Optimization of
Collective Communication Operations in MPICH", International Journal of High Performance Computing
Applications 19(1), 2005, §4.2 and 4.3. Between GPUs both pass through the hosts, also where NCCL
sums.
"""

import tensorflow as tf

from tfparallel.collectives import differentiable
from tfparallel.collectives.group import Group, agreed
from tfparallel.collectives.ops import Value
from tfparallel.judge.propagation import exchanged, is_judging


def scatter(value: Value, root: int = 0, group: Group | None = None) -> Value:
    """Divides the root's rows between all participants, in rank order.

    Cost: ⌈log₂N⌉α + (N−1)/N·Sβ through MPI, else (N−1)α + (N−1)/N·Sβ; see
    `tfparallel.collectives.personalized`. The gradient of the root's value joins those of all
    shares; that of other values is 0.

    Args:
        value: Tensors of shape `(rows, …)`, of the same shape and dtype on every participant; only
            the root's content is used. `rows` must be a multiple of N, the number of participants.
        root: The participant whose value is sent: a worker index or, in a replica, a replica index.
        group: The workers that participate, from `new_group`; None means all of them.

    Returns:
        Tensors of shape `(rows / N, …)`: rank k receives the root's rows k·rows/N to (k+1)·rows/N.

    Raises:
        ValueError: For a dtype that cannot be sent, if `root` is not a participant, if N does not
            divide `rows`, or if the workers' values differ in structure, shape or dtype.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> shares = strategy.run(tfparallel.scatter, [tf.range(4)])
        >>> shares.values[1].numpy()
        array([2, 3], dtype=int32)
    """
    ranks, tensors = agreed("scatter", value, group, root=root)
    if is_judging():
        return tf.nest.pack_sequence_as(value, [exchanged(each, "by rank") for each in tensors])
    if ranks.num_ranks > 1:
        index = ranks.members.index(root)
        tensors = [
            differentiable.scatter(ranks, _divisible(tensor, ranks.num_ranks), index)
            for tensor in tensors
        ]
    return tf.nest.pack_sequence_as(value, tensors)


def all_to_all(value: Value, group: Group | None = None) -> Value:
    """Sends each participant its share of the rows, and joins the shares that arrive.

    A transpose of N × N shares, and its own gradient:

        rank 0   a0 a1          a0 b0
        rank 1   b0 b1    ──>   a1 b1

    Cost: (N−1)α + (N−1)/N·Sβ; see `tfparallel.collectives.personalized`.

    Args:
        value: Tensors of shape `(rows, …)`, of the same shape and dtype on every participant;
            `rows` must be a multiple of N, the number of participants.
        group: The workers that participate, from `new_group`; None means all of them.

    Returns:
        Tensors of the same shapes: share k of rank r is share r of rank k.

    Raises:
        ValueError: For a dtype that cannot be sent, if N does not divide `rows`, or if the workers'
            values differ in structure, shape or dtype.
        RuntimeError: In a multi-worker job, before a strategy has connected the workers.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def exchange():
        ...     rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        ...     return tfparallel.all_to_all(10 * rank + tf.range(2))
        >>> strategy.run(exchange).values[1].numpy()
        array([ 1, 11], dtype=int32)
    """
    ranks, tensors = agreed("all_to_all", value, group)
    if is_judging():
        return tf.nest.pack_sequence_as(value, [exchanged(each, "by rank") for each in tensors])
    if ranks.num_ranks > 1:
        tensors = [
            differentiable.all_to_all(ranks, _divisible(tensor, ranks.num_ranks))
            for tensor in tensors
        ]
    return tf.nest.pack_sequence_as(value, tensors)


def _divisible(tensor, num_ranks):
    """Checks, where the number of rows is known only when the step runs, that it can be divided."""
    if tensor.shape[0] is not None:
        return tensor
    message = f"The number of rows must be a multiple of {num_ranks}, one share for each rank."
    check = tf.debugging.assert_equal(tf.shape(tensor)[0] % num_ranks, 0, message)
    with tf.control_dependencies([check]):
        return tf.identity(tensor)
