"""One worker of a contender of `all_reduce.py`: sums vectors with the others and times each sum.

Before each sum the workers synchronize in the way that gives their contender the best times.
TensorFlow's use shared memory: after one of its own collectives they are up to 2 ms apart, which
would count as part of the sum. PyTorch's use a sum of gloo: a worker that has spun on a core waits
up to 4 ms for gloo's thread.

{"kind": "ours_mpi", "cores": [0], …}   ->  {"implementation": "MPI shared memory, …", …}
{"bytes": 4096, "iterations": 30}       ->  {"seconds": [0.0003, …], "num_wrong": 0}
"""

import os
import time

import dialog
import numpy as np

WARM_UP = 4  # And a tenth of the iterations.
MEETING_DEADLINE_SECONDS = 60.0


def build(kind):
    """Returns `prepare(x)`, which returns a function that sums x, and the contender's details."""
    if kind == "gloo":
        return build_gloo()
    import tensorflow as tf

    weight = None  # Compression keeps its error per weight: the vectors are this one's gradients.
    if kind == "stock":
        communication = tf.distribute.experimental.CommunicationImplementation.RING
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=communication
            )
        )

        def all_reduce(x):
            def replica(x):
                # A tensor on the replica's own device.
                return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(x))

            return strategy.run(replica, args=(x,))

        implementation = "tf.distribute.MultiWorkerMirroredStrategy (RING)"
    else:
        import tfparallel

        transport, _, compression = kind.removeprefix("ours_").partition("+")
        group = tfparallel.MultiWorkerMirroredStrategy(
            all_reduce=transport, compression=compression or None
        ).workers

        def all_reduce(x):
            # As the gradient of a weight: casts and error feedback are part of the sum.
            return group.all_reduce_gradients([x], [weight])[0]

        implementation = group.transport

    def prepare(values):
        nonlocal weight
        weight = variable = tf.Variable(values, trainable=False)
        step = tf.function(lambda: all_reduce(variable.read_value())).get_concrete_function()
        return step, lambda result: result.numpy()

    return prepare, {"implementation": implementation, "version": f"TensorFlow {tf.__version__}"}


def build_gloo():
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")

    def prepare(values):
        # In place, as DistributedDataParallel calls it; each sum adds to the last one.
        tensor = torch.from_numpy(values.copy())

        def call():
            distributed.all_reduce(tensor)
            return tensor

        def result_of(_):
            tensor.copy_(torch.from_numpy(values))
            return call().numpy()

        return call, result_of

    version = f"PyTorch {torch.__version__}"
    return prepare, {"implementation": "torch.distributed gloo", "version": version}


class Barrier:
    """A barrier, which the workers leave within a microsecond of each other.

    Args:
        path: A file of zeros, 64 bytes a worker.
        rank: This worker.
    """

    def __init__(self, path, rank):
        turns = np.memmap(path, np.int64, "r+").reshape(-1, 8)[:, 0]
        self._turns = [turns[k : k + 1] for k in range(len(turns))]
        self._local_turn, self._turn = self._turns[rank], 0

    def __call__(self):
        """Returns once all workers have arrived."""
        self._turn += 1
        self._local_turn[0] = self._turn
        deadline = time.monotonic() + MEETING_DEADLINE_SECONDS
        for turn in self._turns:
            while turn[0] < self._turn:
                if time.monotonic() > deadline:
                    raise RuntimeError("The other worker did not come.")


def whole_numbers(count, rank):
    # Up to 127, so that the sum of two is exact in bfloat16 too.
    return ((31 * np.arange(count, dtype=np.int64) + 7 * rank) % 128).astype(np.float32)


def main():
    order, reply = dialog.begin()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prepare, info = build(order["kind"])
    if order["kind"] == "gloo":
        meet, _ = prepare(np.zeros(1, np.float32))
    else:
        meet = Barrier(os.environ["MEETING"], rank)
    reply(**info)
    prepared = {}
    for request in dialog.requests():
        count = request["bytes"] // 4
        if count not in prepared:
            prepared = {count: prepare(whole_numbers(count, rank))}
        call, result_of = prepared[count]
        expected = sum(whole_numbers(count, k) for k in range(num_ranks))
        num_wrong = int(np.sum(result_of(call()) != expected))
        seconds = []
        warm_up = WARM_UP + request["iterations"] // 10
        for _ in range(warm_up + request["iterations"]):
            meet()
            start = time.perf_counter()
            result = call()
            seconds.append(time.perf_counter() - start)
            del result
        reply(seconds=seconds[warm_up:], num_wrong=num_wrong)


if __name__ == "__main__":
    main()
