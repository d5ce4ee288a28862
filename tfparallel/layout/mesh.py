"""The mesh axes of a job: it divides rows, layers, and weights or sequences along them.

                     tensor ──►
                   part 0     part 1
     pipeline  ┌──────────┬──────────┐ ┐
        │      │ device 0 │ device 1 │ │ stage 0
        ▼      ├──────────┼──────────┤ ┘
               │ device 2 │ device 3 │   stage 1
               └──────────┴──────────┘
                  data = 0             data = 1: devices 4 to 7

Replicas along `data` hold the same weights and different rows; stages along `pipeline` hold
different layers; parts along `tensor` hold different elements of the same weights, and parts along
`sequence` the same weights and different positions. A mesh divides weights or sequences, not both.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_AXES_ELSEWHERE = {"dp": "data", "batch": "data", "pp": "pipeline", "stage": "pipeline"}
_AXES_ELSEWHERE |= {"tp": "tensor", "model": "tensor", "sp": "sequence", "cp": "sequence"}


class Coordinate(NamedTuple):
    """A place in a mesh, from 0 along each axis."""

    data: int = 0
    pipeline: int = 0
    tensor: int = 0
    sequence: int = 0


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The number of devices along each mesh axis.

    Attributes:
        data: D, the number of replicas, each with its own rows.
        pipeline: K, the number of devices that hold stages.
        tensor: T, the number of devices that hold parts of a split layer.
        sequence: S, the number of devices that hold parts of a sequence.

    Raises:
        ValueError: If a size is not a whole number of at least 1; lists all such sizes.

    Example:
        >>> tfparallel.Mesh(data=2, tensor=2).size
        4
        >>> print(tfparallel.Mesh(data=2, tensor=2))
        data=2, tensor=2
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        wrong = {
            axis: size
            for axis, size in dataclasses.asdict(self).items()
            if not isinstance(size, int) or isinstance(size, bool) or size < 1
        }
        if wrong:
            is_text = any(isinstance(size, str) for size in wrong.values())
            fix = " Drop the quotes, or use `Mesh.parse`, which reads text." if is_text else ""
            raise ValueError(
                "Each mesh axis must have a whole number of devices, at least 1. Received: "
                f"{', '.join(f'{axis}={size!r}' for axis, size in wrong.items())}.{fix}"
            )
        if self.tensor > 1 and self.sequence > 1:
            raise ValueError(
                "The devices of a stage divide its weights or its sequences, not both. Received: a "
                f"mesh of {self}. Use tensor=1 or sequence=1."
            )

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Parses a mesh in the form that `str` writes.

        Raises:
            ValueError: If an axis is unknown, named twice or without a size.

        Example:
            >>> tfparallel.Mesh.parse("data=2,pipeline=4").size
            8
        """
        pairs = [pair.partition("=") for pair in text.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        is_right = set(names) <= set(Coordinate._fields) and len(set(names)) == len(names)
        if not is_right or not all(size.strip().isdecimal() for _, _, size in pairs):
            raise ValueError(
                f"A mesh must name some of the axes {', '.join(Coordinate._fields)}, each once, "
                f"with its number of devices, such as data=2,pipeline=2. Received: {text!r}."
                f"{_renamed(names)}"
            )
        return cls(**{name: int(size) for name, (_, _, size) in zip(names, pairs, strict=True)})

    @property
    def size(self) -> int:
        """The number of devices: D·K·T·S."""
        return self.data * self.pipeline * self.parts

    @property
    def parts(self) -> int:
        """The number of devices of a stage: T·S."""
        return self.tensor * self.sequence

    def coordinates(self) -> Iterator[Coordinate]:
        """Yields all coordinates: tensor and sequence fastest, then pipeline, then data."""
        axes = map(range, dataclasses.astuple(self))
        return itertools.starmap(Coordinate, itertools.product(*axes))

    def index(self, at: Coordinate) -> int:
        """Returns the index of a coordinate in the order of `coordinates`."""
        part = at.tensor * self.sequence + at.sequence
        return (at.data * self.pipeline + at.pipeline) * self.parts + part

    def __str__(self):
        sizes = [f"{axis}={n}" for axis, n in dataclasses.asdict(self).items() if n > 1]
        return ", ".join(sizes) or "one device"


def _renamed(names: Iterable[str]) -> str:
    """Returns how to fix axes that are named as elsewhere; "" if none is."""
    fixes = [f"{name} is {_AXES_ELSEWHERE[name]}" for name in names if name in _AXES_ELSEWHERE]
    return f" Here, {', '.join(fixes)}." if fixes else ""


def _with_known_axes(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)  # With its signature, which documentation shows.
    def checked(self, *sizes, **axes):
        unknown = [axis for axis in axes if axis not in Coordinate._fields]
        if unknown:
            raise TypeError(
                f"The axes of a mesh are {', '.join(Coordinate._fields)}. Received: "
                f"{', '.join(f'{axis}={axes[axis]!r}' for axis in unknown)}.{_renamed(unknown)}"
            )
        init(self, *sizes, **axes)

    return checked


Mesh.__init__ = _with_known_axes(Mesh.__init__)
