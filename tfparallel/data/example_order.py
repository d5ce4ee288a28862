"""The order of the examples, as a pure function of the seed and the pass.

The order does not depend on devices, replicas or earlier steps: a run that resumes at epoch 5, or
on another number of devices, sees the same batches as an uninterrupted run on one device.

A *pass* is one permutation of all examples, divided into global batches; the last batch of a pass
may be short. Steps are numbered across passes. With 7 examples and a global batch of 3:

    step    0      1      2   |  3      4      5   |  6  ...
    pass    0      0      0   |  1      1      1   |  2
    size    3      3      1   |  3      3      1   |  3
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order in which pass number `epoch` visits the examples.

    Args:
        num_examples: Number of examples.
        seed: The seed of the run, any non-negative integer.
        epoch: The number of the pass, counted from 0.

    Returns:
        A permutation of `range(num_examples)`, int64, of shape `(num_examples,)`. Equal arguments
        give equal permutations, on every machine.

    Raises:
        ValueError: If an argument is negative.
    """
    if num_examples < 0 or seed < 0 or epoch < 0:
        raise ValueError(
            "The number of examples, the seed and the epoch must not be negative. "
            f"Received: num_examples={num_examples}, seed={seed}, epoch={epoch}."
        )
    return _generator(seed, epoch).permutation(num_examples)


def window_order(sizes: Sequence[int], window: int, seed: int, epoch: int) -> np.ndarray:
    """Returns an order that needs only a few files at a time.

    The files are permuted and divided into windows of `window` files; the examples within each
    window are permuted.

    Args:
        sizes: Number of examples in each file; indices count through all files.
        window: Number of files per window, at least 1. `len(sizes)` or more mixes all files.
        seed: The seed of the run.
        epoch: The number of the pass, counted from 0.

    Returns:
        A permutation of `range(sum(sizes))`, int64.

    Example:
        >>> window_order([2, 2, 2, 2], window=2, seed=7, epoch=0)  # Files 0 and 1, then 2 and 3.
        array([3, 0, 2, 1, 7, 4, 5, 6])
    """
    generator = _generator(seed, epoch)
    starts = np.cumsum([0, *sizes])
    files = generator.permutation(len(sizes))
    parts = [np.empty(0, np.int64)]
    for first in range(0, len(files), window):
        mixed = files[first : first + window]
        examples = [np.arange(starts[file], starts[file + 1]) for file in mixed]
        parts.append(generator.permutation(np.concatenate(examples)))
    return np.concatenate(parts)


def _generator(seed, epoch):
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))


def num_batches_per_pass(num_examples: int, global_batch_size: int) -> int:
    """Returns the number of batches in one pass, including a short last one."""
    return -(-num_examples // global_batch_size)


def batch_indices(
    num_examples: int,
    global_batch_size: int,
    seed: int,
    first_step: int,
    num_steps: int,
    order_of_pass: Callable[[int, int], np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Returns the examples of `num_steps` consecutive global batches.

    Args:
        num_examples: Number of examples, at least one.
        global_batch_size: Examples in a full batch.
        seed: The seed of the run.
        first_step: The first step, counted from the start of the run.
        num_steps: Number of steps.
        order_of_pass: Returns the order for a seed and a pass; `epoch_order` if None.

    Returns:
        One int64 array of example indices per step.
    """
    per_pass = num_batches_per_pass(num_examples, global_batch_size)
    order_of_pass = order_of_pass or functools.partial(epoch_order, num_examples)
    order_of = functools.lru_cache(maxsize=1)(order_of_pass)  # The steps of a pass share it.
    batches = []
    for step in range(first_step, first_step + num_steps):
        index, batch = divmod(step, per_pass)
        start = batch * global_batch_size
        batches.append(order_of(seed, index)[start : start + global_batch_size])
    return batches
