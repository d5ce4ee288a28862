"""Message schedules: which rank sends which blocks to which rank, step by step.

Each of n ranks holds a vector of S bytes, divided into blocks. In a step, ranks send blocks to
others, which add them to their own (*reduce*) or overwrite their own (*gather*). All messages of a
step carry the values from before the step.

Most all-reduces are a reduction, followed by the same steps in reverse, which return the sums along
the same paths. A schedule prints each message with the blocks that it carries:

    >>> print(rings.ring(3))
    step 0  add   0 ─0─► 1   1 ─1─► 2   2 ─2─► 0
    step 1  add   0 ─2─► 1   1 ─0─► 2   2 ─1─► 0
    step 2  copy  1 ─2─► 0   2 ─0─► 1   0 ─1─► 2
    step 3  copy  1 ─0─► 0   2 ─1─► 1   0 ─2─► 2
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    """Messages that are sent at the same time; message i carries blocks `starts[i]` to `stops[i]`.

    Attributes:
        sources: Ranks that send, shape `(messages,)`.
        targets: Ranks that receive.
        starts: First block of each message.
        stops: One past the last block of each message.
        adds: Whether targets add what they receive, or overwrite their own blocks.
    """

    sources: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    adds: bool = True

    def backwards(self) -> "Step":
        """Returns the reverse step, which sends the sums back."""
        return Step(self.targets, self.sources, self.starts, self.stops, adds=False)

    def messages(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields source, target, first block and one past the last, as Python integers."""
        columns = (self.sources, self.targets, self.starts, self.stops)
        yield from zip(*(column.tolist() for column in columns), strict=True)


@dataclasses.dataclass(frozen=True)
class MessageSchedule:
    """An all-reduce among `num_ranks`, of a vector in `num_blocks` blocks.

    Attributes:
        num_ranks: n.
        num_blocks: Number of blocks, of equal size ±1 element.
        steps: Returns a lazy iterator over the steps.
    """

    num_ranks: int
    num_blocks: int
    steps: Callable[[], Iterator[Step]]

    def __post_init__(self):
        check_num_ranks(self.num_ranks)

    def __str__(self):
        """One line per step. Blocks 2 to 4 print as 2-4; a schedule of one block prints none."""
        lines = []
        for number, step in enumerate(self.steps()):
            messages = []
            for source, target, start, stop in step.messages():
                blocks = str(start) if stop == start + 1 else f"{start}-{stop - 1}"
                messages.append(f"{source} ─{blocks * (self.num_blocks > 1)}─► {target}")
            verb = "add " if step.adds else "copy"
            lines.append(f"step {number:<2} {verb}  {'   '.join(messages)}")
        return "\n".join(lines)

    def bounds(self, count) -> list:
        """Returns the `num_blocks + 1` boundaries of the blocks in a vector of `count` elements."""
        return [block * count // self.num_blocks for block in range(self.num_blocks + 1)]


class Terms(NamedTuple):
    """Cost of an all-reduce of S bytes: T = (a·α + b·S·β) + (a'·α' + b'·S·β') + c·S·γ.

    Attributes:
        latencies: a, number of consecutive messages within a group.
        sent: b, the volume that a rank sends in them, in units of S.
        added: c, the volume that a rank adds, in units of S.
        latencies_across: a', number of consecutive messages between groups.
        sent_across: b', the volume that a rank sends in them, in units of S.
    """

    latencies: float
    sent: float
    added: float
    latencies_across: float = 0.0
    sent_across: float = 0.0


def there_and_back(
    num_ranks: int, num_blocks: int, num_steps: int, step: Callable[[int], Step]
) -> MessageSchedule:
    """Returns the schedule of steps 0 to `num_steps` − 1, followed by the same in reverse."""

    def steps():
        for number in range(num_steps):
            yield step(number)
        for number in reversed(range(num_steps)):
            yield step(number).backwards()

    return MessageSchedule(num_ranks, num_blocks, steps)


def holdings(schedule: MessageSchedule) -> np.ndarray:
    """Counts the terms in each block of each rank at the end: `(ranks, blocks, ranks)`.

    A correct all-reduce ends with 1 everywhere.
    """
    num_ranks = schedule.num_ranks
    counts = np.zeros((num_ranks, schedule.num_blocks, num_ranks), int)
    counts[np.arange(num_ranks), :, np.arange(num_ranks)] = 1
    for step in schedule.steps():
        before = counts.copy()
        for source, target, start, stop in step.messages():
            if step.adds:
                counts[target, start:stop] += before[source, start:stop]
            else:
                counts[target, start:stop] = before[source, start:stop]
    return counts


def check_num_ranks(num_ranks: int) -> None:
    """Checks that there is at least one rank.

    Raises:
        ValueError: If `num_ranks` is below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"A collective needs at least one rank. Received: num_ranks={num_ranks}.")


def log2_ceiling(number: int) -> int:
    """Returns ⌈log₂ number⌉."""
    return (number - 1).bit_length()
