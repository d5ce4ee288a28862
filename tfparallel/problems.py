"""Collects several problems into one error."""

import contextlib
from collections.abc import Iterator, Sequence

from tfparallel import devices as device_lib


class PlacementError(ValueError):
    """Raised if the model, the devices and the options do not fit together."""


class Problems:
    """Collects errors of independent checks, and raises them together.

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
        """Collects a `ValueError` of the block, and continues after the block.

        Any other error may be a consequence of the collected ones, which are then raised instead.
        """
        try:
            yield
        except ValueError as error:
            self._errors.append(error)
        except Exception:
            self.raise_all()
            raise

    def raise_all(self) -> None:
        """Raises the collected errors, if any.

        Raises:
            ValueError: A single error unchanged; several as a `PlacementError` with all messages.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise PlacementError("\n".join(map(str, self._errors)))


def usable_devices(devices: str | Sequence[str] | int, problems: Problems) -> list[str]:
    """Returns the names of devices, and collects problems; unusable devices still count.

    Args:
        devices: The devices that the user requested.
        problems: Collects the problems.
    """
    with problems.gathered():
        return device_lib.check_devices(devices)
    if isinstance(devices, int):
        problems.raise_all()
    names = devices.split(",") if isinstance(devices, str) else list(devices)
    if not names:
        problems.raise_all()  # Without devices, nothing else can be checked.
    return names
