"""Where the rows of a batch are in a tensor that is computed from a piece of it.

| placement | meaning |
| --- | --- |
| `Replicate()` | every piece has the same tensor |
| `Shard(axis)` | the pieces, concatenated along the axis, are the tensor of the batch |
| `Sum()` | the sum of the pieces is the tensor of the batch |
| `Mixed(why)` | none of these is known |

They are those of GSPMD (Xu et al., 2021) and of PyTorch's DTensor, where `Sum` is `Partial`. A
tensor may contain a power of B, the number of rows: a mean over the rows is `Sum(power=-1)`, which
pieces compute if each is weighted by its share of the rows; B itself is `Replicate(power=1)`.
"""

import dataclasses
from typing import Any

OF_REPLICA = "is the replica's index"  # A reason why a tensor is `Mixed`.


@dataclasses.dataclass(frozen=True)
class Placement:
    """A placement; see the module docstring."""

    def __str__(self):
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class Replicate(Placement):
    """The same in every piece, up to a factor B^power."""

    power: int = 0

    def __str__(self):
        return f"Replicate{_times(self.power)}"


@dataclasses.dataclass(frozen=True)
class Shard(Placement):
    """Axis `axis` holds the rows in order, with one or several entries per row.

    Attributes:
        axis: From 0.
        power: The power of B that multiplies every element.
        folded: Operations that folded other axes in before the rows, to be undone in reverse order.
        numbers: Which elements are the numbers of their rows: "all", the "first" of each last axis,
            or none. Rows may be looked up by them, but nothing else computed.
    """

    axis: int
    power: int = 0
    folded: tuple = ()
    numbers: str = ""

    def __str__(self):
        inside = ", ".join([str(self.axis), *self.folded])
        return f"Shard({inside}){_times(self.power)}"


@dataclasses.dataclass(frozen=True)
class Row(Placement):
    """A single row, in a loop over the rows.

    Attributes:
        index: The index of the row.
    """

    index: Any


@dataclasses.dataclass(frozen=True)
class Sum(Placement):
    """A sum over the rows of a term of each row, times B^power."""

    power: int = 0

    def __str__(self):
        return "Mean" if self.power == -1 else f"Sum{_times(self.power)}"


@dataclasses.dataclass(frozen=True)
class Listed(Placement):
    """A list of tensors.

    Attributes:
        item: The placement of the items; None while the list is empty.
        by_row: Whether there is one item per row.
    """

    item: Placement | None
    by_row: bool = False


@dataclasses.dataclass(frozen=True)
class Entries(Placement):
    """A component of sparse or ragged rows.

    Attributes:
        part: "indices", "values", "sizes" or "splits".
    """

    part: str


@dataclasses.dataclass(frozen=True)
class Mixed(Placement):
    """None of the above is known.

    Attributes:
        operation: The first operation that mixes rows.
        why: A clause about the operation, in words.
    """

    operation: Any = dataclasses.field(compare=False)
    why: str = dataclasses.field(compare=False)


def _times(power) -> str:
    return f"·B^{power}" if power else ""
