"""Slurm's compact notation: node lists, tasks per node, and task placement.

```
SLURM_STEP_NODELIST        node[01-02],gpu-a1     node01, node02, gpu-a1
SLURM_STEP_TASKS_PER_NODE  2(x2),1                2, 2, 1
```
"""

import itertools
import math
import re

from tfparallel.cluster.config_error import shown

# Below Kubernetes' node ports (30000) and Linux's ephemeral ports (32768), above the range that
# sites often reserve for MPI (12000 to 12999).
_FIRST_PORT = 13_000
_NUM_PORTS = 16_000

# A typo such as node[1-99999999] must raise an error rather than fill the memory.
_MAX_NODES = 100_000

_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand_node_list(text: str) -> list[str]:
    """Expands a node list, in order; `ValueError` if it is malformed or too long.

    Names are separated by commas; each may have several bracketed ranges, whose leading zeros are
    kept: `"rack[0-1]n[08-10],login"`.
    """
    nodes = []
    for name in _split_names(text):
        # Odd positions hold the bracketed ranges.
        parts = re.split(r"\[([^\[\]]*)\]", name)
        if any("[" in part or "]" in part for part in parts):
            raise ValueError(f"its brackets do not match in {shown(name)}")
        choices = [
            _expand_ranges(part) if place % 2 else [part] for place, part in enumerate(parts)
        ]
        if len(nodes) + math.prod(map(len, choices)) > _MAX_NODES:
            raise ValueError(f"it names more than {_MAX_NODES} nodes")
        nodes.extend("".join(pieces) for pieces in itertools.product(*choices))
    return nodes


def expand_tasks_per_node(text: str) -> list[int]:
    """Expands the tasks per node, `"2(x3),1"` to 2, 2, 2, 1; `ValueError` if malformed."""
    counts = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if not match:
            raise ValueError(f"{shown(part)} is not a count such as '2' or '2(x3)'")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MAX_NODES:
            raise ValueError(f"it counts more than {_MAX_NODES} nodes")
        counts += [int(match[1])] * repeats
    return counts


def place_tasks(counts: list[int], distribution: str) -> list[tuple[int, int]]:
    """Returns the node of each task, as `srun --distribution` assigns them.

    ```
    counts (2, 1, 2)     block           cyclic
    node 0               0 1             0 3
    node 1               2               1
    node 2               3 4             2 4
    ```

    Args:
        counts: The number of tasks on each node.
        distribution: SLURM_DISTRIBUTION. Parts after a colon or comma assign cores, not nodes.

    Returns:
        For each task, its node's index and its index on that node.

    Raises:
        ValueError: If the distribution is not supported.
    """
    method = re.split("[:,]", distribution.strip().lower())[0]
    block = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if method in ("", "*", "block"):
        return block
    if method == "cyclic":
        # Each round assigns one task to each node that still has room.
        return sorted(block, key=lambda place: (place[1], place[0]))
    raise ValueError(
        f"tasks were assigned with --distribution={distribution}, from which a task cannot derive "
        "where the others run; srun's --distribution must be block or cyclic"
    )


def base_port(job_id: int, step_id: int, num_local_tasks: int) -> int:
    """Returns the port of the first task on each node, the same in every task.

    Jobs that share a node tend to have close job ids, so each gets its own block of ports, sized
    for the largest number of tasks on one node. The steps of a job are spread far apart.
    """
    num_blocks = max(1, _NUM_PORTS // num_local_tasks)
    return _FIRST_PORT + (job_id + 251 * step_id) % num_blocks * num_local_tasks


def _split_names(text):
    names = [""]
    # Odd positions hold brackets, whose commas do not separate names.
    for place, piece in enumerate(re.split(r"(\[[^\[\]]*\])", text.strip())):
        first, *others = [piece] if place % 2 else piece.split(",")
        names[-1] += first
        names += others
    if not all(names):
        raise ValueError("it has an empty name between commas")
    return names


def _expand_ranges(text):
    numbers = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"{shown(part)} in its brackets is not a range such as '01-04'")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"the range {part} in its brackets runs backwards")
        if len(numbers) + int(last) - int(first) >= _MAX_NODES:
            raise ValueError(f"it names more than {_MAX_NODES} nodes")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers
