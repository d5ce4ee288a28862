"""Replicas in words: where they are, and what sums their gradients."""

from tfparallel.layout.layout import Layout
from tfparallel.layout.shorten import first_to_last

__all__ = ["replicas_in_words"]


def replicas_in_words(layout: Layout) -> str:
    """Returns a line such as "2 replicas on CPU:0, CPU:1; gradients: added on CPU:0".

    Args:
        layout: That of replicas alone; every worker has as many.
    """
    by_worker: dict[str, list[str]] = {}
    for device in layout.devices:
        worker, _, name = device.rpartition("/device:")
        by_worker.setdefault(worker, []).append(name)
    names = next(iter(by_worker.values()))
    count, devices = len(names), first_to_last(names)
    if len(by_worker) > 1:
        where = f"{len(by_worker)} workers x {count} device{'s' * (count > 1)} ({devices})"
    else:
        where = f"{count} replica{'s' * (count > 1)} on {devices}"
    return where if layout.reduction is None else f"{where}; gradients: {layout.reduction}"
