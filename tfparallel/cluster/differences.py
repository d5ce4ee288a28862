"""Do all workers of a job say the same: what differs, and on which workers.

Facts are nested dicts and lists of plain values; they are compared leaf by
leaf, so that a difference is shown where it lies:

```
seed: 7 on workers 0 and 2; 8 on worker 1
versions.tensorflow: '2.21.0' on workers 0 and 1; '2.20.0' on worker 2
workers[1]: '10.0.0.2:2222' on worker 0; '10.0.0.3:2222' on workers 1 and 2
```
"""

import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["differences", "name_worker", "name_workers", "who_said"]

_MAX_LENGTH = 60
_MAX_VALUES = 4
_MAX_DIFFERENCES = 8


def differences(
    facts: Mapping[int, Mapping[str, Any]], may_differ: Collection[str] = ()
) -> list[str]:
    """Compares the facts of several workers, as JSON gives them back.

    Returns:
        A line for each leaf that is not the same on all workers, but for those of the top-level
        keys that may differ. A long value is cut to the part that differs.
    """
    leaves = {
        index: dict(_leaves({key: own[key] for key in own if key not in may_differ}))
        for index, own in facts.items()
    }
    # dict.fromkeys: each path once, in the order in which the workers name them.
    paths = dict.fromkeys(path for own in leaves.values() for path in own)
    lines = []
    for path in paths:
        workers_with = {}
        for index in sorted(leaves):
            workers_with.setdefault(leaves[index].get(path, "nothing"), []).append(index)
        if len(workers_with) > 1:
            values = zip(_excerpts(list(workers_with)), workers_with.values(), strict=True)
            told = [f"{value} on {name_workers(group)}" for value, group in values]
            if len(told) > _MAX_VALUES:
                told[_MAX_VALUES:] = [f"{len(told) - _MAX_VALUES} more values on the others"]
            lines.append(f"{path}: {'; '.join(told)}")
    if len(lines) > _MAX_DIFFERENCES:
        left_out = len(lines) - _MAX_DIFFERENCES
        lines[_MAX_DIFFERENCES:] = [f"and {left_out} more differences"]
    return lines


def name_workers(indices: Iterable[int]) -> str:
    """Writes worker indices as a reader says them: `"workers 0 to 5, 7 and 9"`."""
    indices = sorted(indices)
    if len(indices) == 1:
        return f"worker {indices[0]}"
    # Consecutive indices keep their distance from their place in the order.
    runs = [
        [index for _, index in run]
        for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])
    ]
    words = []
    for run in runs:
        words.extend([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    *most, last = words
    return f"workers {', '.join(most)} and {last}" if most else f"workers {last}"


def who_said(texts: Sequence[str]) -> str:
    """Writes what each worker said, by worker: `"workers 0 and 2: this; worker 1: that"`."""
    workers_with: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        workers_with.setdefault(text, []).append(index)
    return "; ".join(f"{name_workers(who)}: {text}" for text, who in workers_with.items())


def name_worker(workers: Sequence[str], index: int) -> str:
    """A worker with its address, if the list has it: `"worker 1 (10.0.0.2:2222)"`."""
    return f"worker {index} ({workers[index]})" if index < len(workers) else f"worker {index}"


def _leaves(value, path=""):
    """Yields each leaf of nested facts with its path; what is empty is a leaf itself."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        # repr tells 1 from 1.0 and from True, and holds one NaN equal to another.
        yield path, repr(value)


def _excerpts(texts):
    """Cuts texts that differ to a few words around the place where they do."""
    if max(map(len, texts)) <= _MAX_LENGTH:
        return texts
    start = max(0, len(os.path.commonprefix(texts)) - _MAX_LENGTH // 2)
    return [
        ("..." if start else "")
        + text[start : start + _MAX_LENGTH]
        + ("..." if len(text) > start + _MAX_LENGTH else "")
        for text in texts
    ]
