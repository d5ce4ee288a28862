"""Where the rows of a batch are in a tensor that is computed of a piece of it.

| placement | of rows in two pieces |
| --- | --- |
| `Replicate()` | each piece has the same |
| `Shard(axis)` | the pieces, one behind the other along the axis, are that of the batch |
| `Sum()` | the pieces, added up, are that of the batch |
| `Mixed(why)` | none of these is known |

They are those of GSPMD (Xu et al., 2021) and of PyTorch's DTensor, where `Sum` is `Partial`. A
tensor may hold a power of B, the number of rows: a mean over the rows is `Sum(power=-1)`, which
pieces make if each is weighted with its share of the rows; B itself is `Replicate(power=1)`.
"""

import dataclasses
from typing import Any

__all__ = [
    "OF_REPLICA",
    "Entries",
    "Listed",
    "Mixed",
    "Placement",
    "Replicate",
    "Row",
    "Shard",
    "Sum",
]

OF_REPLICA = "is the number of the replica"  # Why a tensor may be `Mixed`.


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the rows are; see above."""

    def __str__(self):
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class Replicate(Placement):
    """The same of every piece, but for B^power."""

    power: int = 0

    def __str__(self):
        return f"Replicate{_times(self.power)}"


@dataclasses.dataclass(frozen=True)
class Shard(Placement):
    """Axis `axis` holds the rows in order, one or several places a row.

    Attributes:
        axis: From 0.
        power: Of B, by which every element is multiplied.
        folded: Operations that folded other axes in before the rows, to be undone in turn.
        numbers: Whether the elements, or the first of each last axis, are the rows' numbers, by
            which rows may be looked up and nothing computed.
    """

    axis: int
    power: int = 0
    folded: tuple = ()
    numbers: bool = False

    def __str__(self):
        inside = ", ".join([str(self.axis), *self.folded])
        return f"Shard({inside}){_times(self.power)}"


@dataclasses.dataclass(frozen=True)
class Row(Placement):
    """Of one row alone, in a loop over the rows.

    Attributes:
        index: Which row.
    """

    index: Any


@dataclasses.dataclass(frozen=True)
class Sum(Placement):
    """A sum over the rows, of what each of them gives, times B^power."""

    power: int = 0

    def __str__(self):
        return "Mean" if self.power == -1 else f"Sum{_times(self.power)}"


@dataclasses.dataclass(frozen=True)
class Listed(Placement):
    """A list of tensors.

    Attributes:
        item: Their placement; None while the list is empty.
        by_row: Whether each item is that of a row.
    """

    item: Placement | None
    by_row: bool = False


@dataclasses.dataclass(frozen=True)
class Entries(Placement):
    """Part of rows that are sparse or ragged.

    Attributes:
        part: "indices", "values", "sizes" or "splits".
    """

    part: str


@dataclasses.dataclass(frozen=True)
class Mixed(Placement):
    """Nothing of the above is known.

    Attributes:
        operation: Where that began.
        why: In words, a clause about the operation.
    """

    operation: Any = dataclasses.field(compare=False)
    why: str = dataclasses.field(compare=False)


def _times(power) -> str:
    return f"·B^{power}" if power else ""
