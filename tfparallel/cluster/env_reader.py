"""Environment variables, read as numbers with every mistake in one error."""

import re
from collections.abc import Mapping

from tfparallel.cluster.config_error import refusal, shown

__all__ = ["EnvReader"]

_INTEGER = re.compile("[0-9]{1,10}")


class EnvReader:
    """Reads the variables of one source, and gathers what is wrong with them.

    Args:
        environ: Environment variables.
        source: What to call their source in an error.

    Attributes:
        received: The variables that were looked at and set.
        problems: What is wrong so far, an entry each.
    """

    def __init__(self, environ: Mapping[str, str], source: str):
        self.environ = environ
        self.source = source
        self.received = {}
        self.problems = []

    def text(self, *names: str) -> str | None:
        """Returns the first variable that is set, or None."""
        for name in names:
            if name in self.environ:
                self.received[name] = self.environ[name]
                return self.environ[name]
        return None

    def number(
        self, *names: str, least: int = 0, below: int | None = None, required: bool = False
    ) -> int | None:
        """Returns the first variable that is set, as a whole number, or None.

        Args:
            *names: The variables.
            least: The smallest number allowed.
            below: The first number too high; None if there is none.
            required: Whether it is a problem that none is set.

        Returns:
            The number; None if there is none, or a problem with it.
        """
        text = self.text(*names)
        name = next((name for name in names if name in self.environ), names[0])
        if text is None:
            if required:
                self.problems.append(f"{name} is missing")
            return None
        highest = "" if below is None else f" to {below - 1}"
        if not _INTEGER.fullmatch(text) or int(text) < least or (
            below is not None and int(text) >= below
        ):
            self.problems.append(
                f"{name} must be a whole number from {least}{highest or ' up'}, not {shown(text)}"
            )
            return None
        return int(text)

    def check(self, fix: str = "") -> None:
        """Ends the reading of the variables.

        Args:
            fix: What to do about a problem.

        Raises:
            ValueError: If there are problems; all in one message.
        """
        if self.problems:
            raise refusal(
                f"The variables of {self.source} cannot be used",
                self.problems,
                shown(self.received),
                fix,
            )

    def place(
        self, local_rank: str, num_local: str, num_workers: int | None
    ) -> tuple[int | None, int | None]:
        """Reads the rank on this host and how many workers the host has."""
        size = self.number(num_local, least=1, below=num_workers and num_workers + 1)
        return self.number(local_rank, below=size), size
