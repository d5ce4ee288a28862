"""The values of `sync=`: when workers synchronize their weights. Needs no TensorFlow."""

import contextlib
from typing import NamedTuple

FORMS = (
    "every_step, accumulate:N such as accumulate:4, accumulate:auto, adascale:N, adascale:auto, "
    "local_sgd:H such as local_sgd:8, post_local_sgd:START,H, diloco:H, async, or async:STALENESS"
)


class Synchronization(NamedTuple):
    """A synchronization policy.

    Attributes:
        every: H, the number of steps between averages of the weights; None to sum gradients.
        start: The number of steps that sum gradients before averaging begins.
        is_outer: Whether an average is followed by an outer step, as in DiLoCo.
        accumulated: N, the initial number of steps per update.
        grows: Whether N is doubled if a larger batch pays.
        scales_rate: Whether the learning rate follows the gain of an update of N steps (AdaScale).
        is_async: Whether each worker independently updates weights on servers.
        staleness: With `is_async`, how many updates of other workers a gradient may miss; None for
            a default.
    """

    every: int | None = None
    start: int = 0
    is_outer: bool = False
    accumulated: int = 1
    grows: bool = False
    scales_rate: bool = False
    is_async: bool = False
    staleness: int | None = None

    @classmethod
    def parse(cls, spec: str) -> "Synchronization":
        """Reads "every_step", "accumulate:4", "local_sgd:8", "post_local_sgd:1000,8" or "async:6".

        Raises:
            ValueError: If it is none of these, or the numbers do not fit.
        """
        kind, _, numbers = str(spec).partition(":")
        if spec == "every_step":
            return cls()
        if spec == "async":
            return cls(is_async=True)
        if kind == "async":
            values, expected = _whole(numbers), "async takes how many updates a gradient may miss"
            if len(values) == 1 and values[0] >= 0:
                return cls(is_async=True, staleness=values[0])
        elif kind in ("accumulate", "adascale"):
            scales_rate = kind == "adascale"
            if numbers == "auto":
                return cls(grows=True, scales_rate=scales_rate)
            values, expected = _whole(numbers), f"{kind} takes the steps per update, or auto"
            if len(values) == 1 and values[0] >= 1:
                return cls(accumulated=values[0], scales_rate=scales_rate and values[0] > 1)
        elif kind == "local_sgd":
            values, expected = _whole(numbers), "local_sgd takes the steps between two averages"
            if len(values) == 1 and values[0] >= 1:
                return cls(values[0])
        elif kind == "diloco":
            values, expected = _whole(numbers), "diloco takes the steps between two outer steps"
            if len(values) == 1 and values[0] >= 1:
                return cls(values[0], is_outer=True)
        elif kind == "post_local_sgd":
            values = _whole(numbers)
            expected = "post_local_sgd takes the steps before it starts and between averages"
            if len(values) == 2 and values[0] >= 0 and values[1] >= 1:
                return cls(values[1], values[0])
        else:
            fix = ""
            plain = str(spec).lower().replace("-", "_").replace("localsgd", "local_sgd")
            if plain != spec:
                with contextlib.suppress(ValueError):
                    cls.parse(plain)
                    fix = f" Did you mean {plain!r}?"
            raise ValueError(f"`sync` must be {FORMS}. Received: {spec!r}, which is unknown.{fix}")
        raise ValueError(
            f"`sync` must be {FORMS}. Received: {spec!r}; {expected} (whole numbers of at least 1)."
        )

    @property
    def accumulates(self) -> bool:
        """Whether an update may cover several steps."""
        return self.accumulated > 1 or self.grows

    @property
    def is_local(self) -> bool:
        """Whether workers ever step alone."""
        return self.every is not None

    def __str__(self) -> str:
        if self.is_async:
            return "async" if self.staleness is None else f"async:{self.staleness}"
        if self.accumulates:
            kind = "adascale" if self.scales_rate else "accumulate"
            return f"{kind}:{'auto' if self.grows else self.accumulated}"
        if self.every is None:
            return "every_step"
        if self.start:
            return f"post_local_sgd:{self.start},{self.every}"
        return f"diloco:{self.every}" if self.is_outer else f"local_sgd:{self.every}"


EVERY_STEP = Synchronization()


def _whole(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return []
