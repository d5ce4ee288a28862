"""One error for all that is wrong with one input, such as the variables of a launcher."""

import math
import re
from collections.abc import Mapping, Sequence

__all__ = ["EnvReader", "refusal", "shown"]

# A broken variable may hold a whole file; its start is enough to recognize it.
_SHOWN_CHARACTERS = 600
# So may a list of thousands of workers, each wrong in the same way.
_MAX_PROBLEMS = 30
_INTEGER = re.compile("[0-9]{1,10}")


def refusal(head: str, problems: Sequence[str], received: str, fix: str = "") -> ValueError:
    """Makes the error, to be raised by the caller, that lists every problem of an input.

    Args:
        head: What cannot be done.
        problems: What is wrong and what is required, an entry each.
        received: The input, as text.
        fix: What to do about it, beside what the problems say.
    """
    end = f"Received: {received}." + (f" {fix}" if fix else "")
    if len(problems) == 1:
        return ValueError(f"{head}: {problems[0]}. {end}")
    listed = "".join(f"\n  - {problem}." for problem in problems[:_MAX_PROBLEMS])
    if len(problems) > _MAX_PROBLEMS:
        listed += f"\n  - and {len(problems) - _MAX_PROBLEMS} more."
    return ValueError(f"{head}:{listed}\n{end}")


def shown(value: object) -> str:
    """Shows a value, or named values, as an error should: quoted, and not too long."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={shown(part)}" for name, part in value.items()) or "nothing"
    # Cut before it is quoted: repr() of a huge text takes its time.
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:_SHOWN_CHARACTERS]!r}... ({len(value)} characters)"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to be shown"
    if len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    return text


class EnvReader:
    """Reads environment variables of one source, and gathers what is wrong with them.

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
        """Returns the first variable that is set, as a whole number from `least` to `below` - 1.

        None if there is none, which is a problem where it is required, or a problem with it.
        """
        text = self.text(*names)
        if text is None:
            if required:
                self.problems.append(f"{names[0]} is missing")
            return None
        name = next(name for name in names if name in self.environ)
        if _INTEGER.fullmatch(text) and least <= int(text) < (below or math.inf):
            return int(text)
        highest = "up" if below is None else f"to {below - 1}"
        self.problems.append(
            f"{name} must be a whole number from {least} {highest}, not {shown(text)}"
        )
        return None

    def check(self, fix: str = "") -> None:
        """Raises a ValueError if there are problems, with all of them and what to do about it."""
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
