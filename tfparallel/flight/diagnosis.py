"""Names the bottleneck of a job, from the time splits of its workers' steps."""

import statistics
from collections.abc import Sequence

from tfparallel.flight.job import Split

_MUCH = 0.25  # Fraction of a step.
_SLOWER = 1.25  # Relative to the other workers.
_SMALL_BYTES = 4e6  # A smaller sum is dominated by latency.
_LINK_RATIO = 0.5  # Fraction of the link's rate.
_SHORT_SECONDS = 0.004  # TensorFlow takes a millisecond or two to start a step.
_CHANCE_SECONDS = 0.002  # Normal variation between workers.
_INPUT = "in waiting for its data"


def verdict(
    splits: Sequence[Split],
    *,
    sent_bytes: float = 0.0,
    link_bits: float | None = None,
    expected_compute: float | None = None,
) -> str:
    """Names the bottleneck of a job, in a sentence that begins with the cause.

    Args:
        splits: The workers' splits, from `job.splits`.
        sent_bytes: Bytes that a worker passes to the others in a step.
        link_bits: Rate of the link between the hosts in bits per second, if known.
        expected_compute: Compute seconds per step, scaled in proportion to the rows from a run of
            fewer workers; None for the first run.
    """
    total = statistics.mean(split.total for split in splits)
    mean = {
        name: statistics.mean(getattr(split, name) for split in splits)
        for name in ("input", "compute", "reduction", "waiting", "between")
    }
    slow = _slow_worker(splits, total)
    if slow is not None:
        own_time, others, where = slow[1:]
        if where == _INPUT:
            return (
                f"input-bound on worker {slow[0]}: its steps take {own_time * 1e3:.1f} ms with the "
                f"wait for data, those of the others {others * 1e3:.1f} ms. Read and decode ahead "
                "(`prefetch`), on more threads, or from a faster disk."
            )
        return (
            f"worker {slow[0]} is slow: its own work takes {own_time * 1e3:.1f} ms per step, that "
            f"of the others {others * 1e3:.1f} ms; the difference is {where}."
        )
    meeting = mean["reduction"] + mean["waiting"]
    most = max(mean["input"], mean["between"], meeting)
    if most == mean["input"] > _MUCH * total:
        return (
            f"input-bound: {mean['input'] * 1e3:.1f} of {total * 1e3:.1f} ms per step are spent "
            "waiting for data. Read and decode ahead (`prefetch`), or on more threads."
        )
    if most == mean["between"] > _MUCH * total:
        return (
            f"callbacks: {mean['between'] * 1e3:.1f} of {total * 1e3:.1f} ms per step are spent "
            "between steps, in callbacks and the training loop. Set steps_per_execution, or run "
            "callbacks less often."
        )
    if most == meeting > _MUCH * total:
        rate = 8 * sent_bytes / mean["reduction"] if mean["reduction"] else 0.0
        near_limit = link_bits is not None and rate > _LINK_RATIO * link_bits
        if near_limit or (sent_bytes > _SMALL_BYTES and mean["reduction"] > mean["waiting"]):
            of = "" if link_bits is None else f" of {link_bits / 1e9:.2g}"
            return (
                f"the link carries {rate / 1e9:.2g}{of} Gbit/s: {mean['reduction'] * 1e3:.1f} of "
                f"{total * 1e3:.1f} ms per step are spent summing {sent_bytes / 1e6:.3g} MB. Send "
                "less: compression='powersgd:2', sync='local_sgd:8' or 'accumulate:4'."
            )
        return (
            f"batch too small: a step computes for {mean['compute'] * 1e3:.1f} ms, then spends "
            f"{meeting * 1e3:.1f} ms waiting for the other workers and summing. Give each worker "
            "more rows, or use sync='accumulate:4'."
        )
    if expected_compute is not None and mean["compute"] - expected_compute > _MUCH * total:
        return (
            f"batch too small: a worker computes for {mean['compute'] * 1e3:.1f} ms, but in "
            f"proportion to its rows it would be {expected_compute * 1e3:.1f} ms. Give each worker "
            "more rows (weak scaling)."
        )
    if len(splits) > 1 and total < _SHORT_SECONDS:
        return (
            f"batch too small: a step takes {total * 1e3:.1f} ms, most of it fixed overhead. Give "
            "each worker more rows, or set steps_per_execution."
        )
    return (
        f"no bottleneck: {(mean['compute'] + mean['input']) / total:.0%} of a step of "
        f"{total * 1e3:.1f} ms is computation."
    )


def _slow_worker(splits, total):
    """Returns the worker that the others wait for, its time, theirs, and the main difference."""
    if len(splits) < 2:
        return None
    names = ("input", "compute", "between")
    seconds_of = {split.worker: sum(getattr(split, name) for name in names) for split in splits}
    slowest = max(seconds_of, key=seconds_of.__getitem__)
    others = [split for split in splits if split.worker != slowest]
    median = statistics.median(seconds_of[split.worker] for split in others)
    waiting = statistics.median(split.waiting for split in others)
    is_slower = seconds_of[slowest] >= max(_SLOWER * median, median + _CHANCE_SECONDS)
    if not is_slower or waiting < (_MUCH / 2) * total:
        return None
    (of_slow,) = [split for split in splits if split.worker == slowest]
    texts = {
        "input": _INPUT,
        "compute": "in its computation",
        "between": "between steps, in a callback or the training loop",
    }
    where = max(
        names,
        key=lambda name: getattr(of_slow, name)
        - statistics.median(getattr(split, name) for split in others),
    )
    return slowest, seconds_of[slowest], median, texts[where]
