"""A schedule of messages, executed by TensorFlow on the devices of one process.

A message is a tensor that one device made and another reads: TensorFlow sends it where the two
have memories of their own, and hands it over where they share one. What arrives is not added at
once but kept beside what is there, and all of it is added in one pass when it is next needed.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.collectives.algorithms.schedule import MessageSchedule


# Schedules are generators, which AutoGraph cannot convert, and need not.
@tf.autograph.experimental.do_not_convert
def execute(
    schedule: MessageSchedule, vectors: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Runs a schedule.

    Args:
        schedule: Of as many ranks as there are vectors.
        vectors: One on each device, shape `(count,)`, of one type; of any shape for a schedule of
            one block.
        devices: Names of the devices.

    Returns:
        The sum, of the same shape, on each device; the same bits on all.
    """
    num_blocks = schedule.num_blocks
    # held[rank][block]: the terms whose sum the rank has of the block.
    held = [
        [[part] for part in _split(vector, schedule, device)]
        for vector, device in zip(vectors, devices, strict=True)
    ]

    def settled(rank, block):
        terms = held[rank][block]
        if len(terms) > 1:
            with tf.device(devices[rank]):
                held[rank][block] = terms = [tf.add_n(terms)]
        return terms[0]

    for step in schedule.steps():
        sent = [
            (target, block, settled(source, block))
            for source, target, start, stop in step.messages()
            for block in range(start, stop)
        ]
        for target, block, value in sent:
            with tf.device(devices[target]):
                value = tf.identity(value)
            held[target][block] = [*held[target][block], value] if step.adds else [value]

    results = []
    for rank, device in enumerate(devices):
        blocks = [settled(rank, block) for block in range(num_blocks)]
        with tf.device(device):
            results.append(blocks[0] if num_blocks == 1 else tf.concat(blocks, 0))
    return results


def _split(vector, schedule, device):
    if schedule.num_blocks == 1:
        return [vector]
    count = vector.shape[0]
    with tf.device(device):
        bounds = schedule.bounds(tf.size(vector) if count is None else count)
        sizes = [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        return tf.split(vector, sizes, num=schedule.num_blocks)
