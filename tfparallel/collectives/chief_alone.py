"""What runs on the chief alone, where a collective would wait for the other workers forever."""

import contextlib
from collections.abc import Iterator

_running: list[str] = []  # What runs on the chief alone at present, the innermost last.


@contextlib.contextmanager
def on_chief_alone(what: str, instead: str) -> Iterator[None]:
    """Surrounds what the other workers do not run.

    Args:
        what: Its name, for the error of `check_all_take_part`.
        instead: How to avoid that error.
    """
    _running.append(f"{what} runs on the chief alone, {{}}. {instead}")
    try:
        yield
    finally:
        _running.pop()


def check_all_take_part() -> None:
    """Raises `RuntimeError` on the chief where the other workers would never join."""
    if _running:
        raise RuntimeError(
            _running[-1].format(
                "but all workers are required here, or it would wait for them forever. Received: a "
                "call of `fit`, `evaluate` or `predict`, a save of sharded weights, or a collective"
            )
        )
