"""Compares the facts of all workers: which values differ, and on which workers.

Facts are nested dicts and lists of plain values. They are compared leaf by leaf, to show exactly
where they differ:

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

_MAX_LENGTH = 60
_MAX_VALUES = 4
_MAX_DIFFERENCES = 8


def differences(
    facts: Mapping[int, Mapping[str, Any]], may_differ: Collection[str] = ()
) -> list[str]:
    """Compares the facts of several workers, as JSON gives them back.

    Returns:
        One line per leaf that differs between workers, except under top-level keys in
        `may_differ`. Long values are cut to the part that differs.
    """
    leaves = {
        index: dict(_leaves({key: entry[key] for key in entry if key not in may_differ}))
        for index, entry in facts.items()
    }
    # dict.fromkeys: each path once, in order of first appearance.
    paths = dict.fromkeys(path for entry in leaves.values() for path in entry)
    lines = []
    for path in paths:
        workers_with = {}
        for index in sorted(leaves):
            workers_with.setdefault(leaves[index].get(path, "nothing"), []).append(index)
        if len(workers_with) > 1:
            values = zip(_excerpts(list(workers_with)), workers_with.values(), strict=True)
            parts = [f"{value} on {name_workers(group)}" for value, group in values]
            if len(parts) > _MAX_VALUES:
                parts[_MAX_VALUES:] = [f"{len(parts) - _MAX_VALUES} more values on the others"]
            lines.append(f"{path}: {'; '.join(parts)}")
    if len(lines) > _MAX_DIFFERENCES:
        left_out = len(lines) - _MAX_DIFFERENCES
        lines[_MAX_DIFFERENCES:] = [f"and {left_out} more differences"]
    return lines


def name_workers(indices: Iterable[int]) -> str:
    """Formats worker indices for a reader: `"workers 0 to 5, 7 and 9"`."""
    indices = sorted(indices)
    if len(indices) == 1:
        return f"worker {indices[0]}"
    # In a run of consecutive indices, index minus position is constant.
    runs = [
        [index for _, index in run]
        for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])
    ]
    words = []
    for run in runs:
        words.extend([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    *most, last = words
    return f"workers {', '.join(most)} and {last}" if most else f"workers {last}"


def who_said(texts: Sequence[str], workers: Sequence[int] | None = None) -> str:
    """Groups workers by their text: `"workers 0 and 2: this; worker 1: that"`."""
    workers_with: dict[str, list[int]] = {}
    for index, text in zip(workers or range(len(texts)), texts, strict=True):
        workers_with.setdefault(text, []).append(index)
    return "; ".join(f"{name_workers(who)}: {text}" for text, who in workers_with.items())


def name_worker(workers: Sequence[str], index: int) -> str:
    """Returns a worker's name with its address, if listed: `"worker 1 (10.0.0.2:2222)"`."""
    return f"worker {index} ({workers[index]})" if index < len(workers) else f"worker {index}"


def _leaves(value, path=""):
    """Yields each leaf of nested facts with its path; an empty container is a leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        # repr distinguishes 1, 1.0 and True, and makes NaNs compare equal.
        yield path, repr(value)


def _excerpts(texts):
    """Cuts differing texts to a few words around the first difference."""
    if max(map(len, texts)) <= _MAX_LENGTH:
        return texts
    start = max(0, len(os.path.commonprefix(texts)) - _MAX_LENGTH // 2)
    return [
        ("..." if start else "")
        + text[start : start + _MAX_LENGTH]
        + ("..." if len(text) > start + _MAX_LENGTH else "")
        for text in texts
    ]
