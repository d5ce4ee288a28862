"""What does not fit, all of it in one error."""

import contextlib
from collections.abc import Iterator, Sequence

from tfparallel import devices as device_lib

__all__ = ["PlacementError", "Problems", "usable_devices"]


class PlacementError(ValueError):
    """The model, the devices and what is asked of them do not fit together."""


class Problems:
    """Gathers errors of checks that do not depend on each other, and raises them together.

    Example:
        >>> problems = Problems()
        >>> with problems.gathered():
        ...     check_devices(devices)
        >>> with problems.gathered():
        ...     check_schedule(schedule)
        >>> problems.raise_all()
    """

    def __init__(self):
        self._errors: list[ValueError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Keeps the `ValueError` that the block raises, and goes on behind the block.

        Any other error may follow from what is known to be wrong, which is then raised instead.
        """
        try:
            yield
        except ValueError as error:
            self._errors.append(error)
        except Exception:
            self.raise_all()
            raise

    def raise_all(self) -> None:
        """Raises what was gathered, if anything.

        Raises:
            ValueError: A single error as it is; of several a `PlacementError`, a line or more each.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise PlacementError("\n".join(map(str, self._errors)))


def usable_devices(devices: str | Sequence[str] | int, problems: Problems) -> list[str]:
    """Returns the names of devices; what cannot be used is a problem, and counts all the same.

    Args:
        devices: What a user asked for.
        problems: Gathers what is wrong with it.
    """
    with problems.gathered():
        return device_lib.check_devices(devices)
    if isinstance(devices, int):
        problems.raise_all()
    names = devices.split(",") if isinstance(devices, str) else list(devices)
    if not names:
        problems.raise_all()  # Nothing can be held against no device.
    return names
