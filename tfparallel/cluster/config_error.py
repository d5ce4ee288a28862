"""Reports all problems of one input, such as a launcher's variables, in one error."""

import math
import re
from collections.abc import Mapping, Sequence

# A broken variable may contain a whole file; its start is enough to recognize it.
_SHOWN_CHARACTERS = 600
# A list of thousands of workers may have the same problem in every entry.
_MAX_PROBLEMS = 30
_INTEGER = re.compile("[0-9]{1,10}")


def refusal(head: str, problems: Sequence[str], received: str, fix: str = "") -> ValueError:
    """Returns an error, for the caller to raise, that lists every problem of an input.

    Args:
        head: What cannot be done.
        problems: One entry per problem: what is wrong and what is required.
        received: The input, as text.
        fix: How to fix it, beyond what the problems say.
    """
    end = f"Received: {received}." + (f" {fix}" if fix else "")
    if len(problems) == 1:
        return ValueError(f"{head}: {problems[0]}. {end}")
    listed = "".join(f"\n  - {problem}." for problem in problems[:_MAX_PROBLEMS])
    if len(problems) > _MAX_PROBLEMS:
        listed += f"\n  - and {len(problems) - _MAX_PROBLEMS} more."
    return ValueError(f"{head}:{listed}\n{end}")


def shown(value: object) -> str:
    """Formats a value, or named values, for an error message: quoted, of limited length."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={shown(part)}" for name, part in value.items()) or "nothing"
    # Cut before quoting: repr() of a huge text is slow.
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:_SHOWN_CHARACTERS]!r}... ({len(value)} characters)"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to show"
    if len(text) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    return text


class EnvReader:
    """Reads environment variables of one source, and collects their problems.

    Attributes:
        received: The variables that were read and are set.
        problems: One entry per problem so far.
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

        None if it is missing or invalid. Adds a problem if it is invalid, or missing but required.
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
        """Raises a ValueError with all problems and how to fix them, if there are any."""
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
        """Reads the local rank and the number of workers on this host."""
        size = self.number(num_local, least=1, below=num_workers and num_workers + 1)
        return self.number(local_rank, below=size), size
