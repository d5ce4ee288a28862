"""When the workers of a job agree on their weights: what `sync=` may say. Needs no TensorFlow."""

from typing import NamedTuple

__all__ = ["EVERY_STEP", "FORMS", "Synchronization"]

FORMS = (
    "every_step, accumulate:N such as accumulate:4, accumulate:auto, local_sgd:H such as "
    "local_sgd:8, post_local_sgd:START,H, async, or async:STALENESS"
)


class Synchronization(NamedTuple):
    """A policy.

    Attributes:
        every: H, after how many steps the workers' weights are averaged; None sums their gradients.
        start: How many steps sum gradients before that begins.
        accumulated: N, of how many steps an update is, at first.
        grows: Whether N is doubled where a larger batch pays.
        is_async: Whether each worker updates weights that servers hold, by itself.
        staleness: How many updates of others a gradient may miss then; None for a default.
    """

    every: int | None = None
    start: int = 0
    accumulated: int = 1
    grows: bool = False
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
            found, wanted = _whole(numbers), "async takes the updates that a gradient may miss"
            if len(found) == 1 and found[0] >= 0:
                return cls(is_async=True, staleness=found[0])
        elif kind == "accumulate":
            if numbers == "auto":
                return cls(grows=True)
            found, wanted = _whole(numbers), "accumulate takes the steps of an update, or auto"
            if len(found) == 1 and found[0] >= 1:
                return cls(accumulated=found[0])
        elif kind == "local_sgd":
            found, wanted = _whole(numbers), "local_sgd takes the steps between two averages"
            if len(found) == 1 and found[0] >= 1:
                return cls(found[0])
        elif kind == "post_local_sgd":
            found = _whole(numbers)
            wanted = "post_local_sgd takes the steps before it begins, and those between averages"
            if len(found) == 2 and found[0] >= 0 and found[1] >= 1:
                return cls(found[1], found[0])
        else:
            raise ValueError(f"`sync` must be {FORMS}. Received: {spec!r}, which is unknown.")
        raise ValueError(
            f"`sync` must be {FORMS}. Received: {spec!r}; {wanted}, whole numbers of at least 1."
        )

    @property
    def accumulates(self) -> bool:
        """Whether an update is of several steps, or may come to be."""
        return self.accumulated > 1 or self.grows

    @property
    def is_local(self) -> bool:
        """Whether workers ever step by themselves."""
        return self.every is not None

    def __str__(self) -> str:
        if self.is_async:
            return "async" if self.staleness is None else f"async:{self.staleness}"
        if self.grows:
            return "accumulate:auto"
        if self.every is None:
            return "every_step" if self.accumulated == 1 else f"accumulate:{self.accumulated}"
        if self.start:
            return f"post_local_sgd:{self.start},{self.every}"
        return f"local_sgd:{self.every}"


EVERY_STEP = Synchronization()


def _whole(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return []
