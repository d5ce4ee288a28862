"""One error for all that is wrong with one input."""

from collections.abc import Mapping, Sequence

__all__ = ["refusal", "shown"]

# A broken variable may hold a whole file; its start is enough to recognize it.
_SHOWN_CHARACTERS = 600
# So may a list of thousands of workers, each wrong in the same way.
_MAX_PROBLEMS = 30


def refusal(head: str, problems: Sequence[str], received: str, fix: str = "") -> ValueError:
    """Makes the error that lists every problem of an input.

    Args:
        head: What cannot be done.
        problems: What is wrong and what is required, an entry each.
        received: The input, as text.
        fix: What to do about it, beside what the problems say.

    Returns:
        The error, to be raised by the caller.
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
