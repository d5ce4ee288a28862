"""Who sends which blocks to whom, step by step.

The vector of S bytes that each of n ranks holds is divided into blocks. In a step, ranks send
blocks to others, which add them to their own (*reduce*) or replace their own by them (*gather*).
Within a step all is sent as it was before the step.

Most all-reduces are a reduction and the same once more, played backwards: what was sent to be
summed comes back, summed, along the same way. A schedule prints itself, each message with the
blocks that it carries:

    >>> print(ring.schedule(3))
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
    """What is sent at the same time: message i takes blocks `starts[i]` to `stops[i]`.

    Attributes:
        sources: Ranks that send, shape `(messages,)`.
        targets: Ranks that receive.
        starts: First block of each message.
        stops: One past its last block.
        adds: Whether targets add what they receive, or take it for their own.
    """

    sources: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    adds: bool = True

    def backwards(self) -> "Step":
        """Returns the step by which what was summed comes back."""
        return Step(self.targets, self.sources, self.starts, self.stops, adds=False)

    def messages(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields source, target, first block and one past the last, in whole numbers."""
        columns = (self.sources, self.targets, self.starts, self.stops)
        yield from zip(*(column.tolist() for column in columns), strict=True)


@dataclasses.dataclass(frozen=True)
class MessageSchedule:
    """An all-reduce among `num_ranks`, of a vector in `num_blocks` blocks.

    Attributes:
        num_ranks: n.
        num_blocks: Into how many blocks of equal size, ±1 element, a vector is divided.
        steps: Returns the steps, one after the other; they are made as they are asked for.
    """

    num_ranks: int
    num_blocks: int
    steps: Callable[[], Iterator[Step]]

    def __post_init__(self):
        check_num_ranks(self.num_ranks)

    def __str__(self):
        """A line a step. Blocks 2 to 4 are written 2-4; where there is one block, no number."""
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
        """Returns where the blocks of `count` elements begin, and the end: `num_blocks + 1`."""
        return [block * count // self.num_blocks for block in range(self.num_blocks + 1)]


class Terms(NamedTuple):
    """What an all-reduce of S bytes costs: T = (a·α + b·S·β) + (a'·α' + b'·S·β') + c·S·γ.

    Attributes:
        latencies: a, messages that wait for one another, within a group.
        sent: b, what a rank sends in them, in sizes S.
        added: c, what a rank adds, in sizes S.
        latencies_across: a', messages between groups.
        sent_across: b', what a rank sends in them.
    """

    latencies: float
    sent: float
    added: float
    latencies_across: float = 0.0
    sent_across: float = 0.0


def there_and_back(
    num_ranks: int, num_blocks: int, num_steps: int, step: Callable[[int], Step]
) -> MessageSchedule:
    """Returns the schedule of steps 0 to `num_steps` − 1, and then the same backwards."""

    def steps():
        for number in range(num_steps):
            yield step(number)
        for number in reversed(range(num_steps)):
            yield step(number).backwards()

    return MessageSchedule(num_ranks, num_blocks, steps)


def holdings(schedule: MessageSchedule) -> np.ndarray:
    """Returns whose terms each rank holds of each block after the last step.

    Returns:
        Counts of shape `(num_ranks, num_blocks, num_ranks)`: how often rank r's block b contains
        the term of each rank. An all-reduce ends with 1 everywhere.
    """
    num_ranks = schedule.num_ranks
    held = np.zeros((num_ranks, schedule.num_blocks, num_ranks), int)
    held[np.arange(num_ranks), :, np.arange(num_ranks)] = 1
    for step in schedule.steps():
        before = held.copy()
        for source, target, start, stop in step.messages():
            if step.adds:
                held[target, start:stop] += before[source, start:stop]
            else:
                held[target, start:stop] = before[source, start:stop]
    return held


def check_num_ranks(num_ranks: int) -> None:
    """Raises unless there is a rank.

    Raises:
        ValueError: If `num_ranks` is below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"A collective needs at least one rank. Received: num_ranks={num_ranks}.")


def log2_ceiling(number: int) -> int:
    """Returns ⌈log₂ number⌉."""
    return (number - 1).bit_length()
