"""What the doctor says of one thing: a verdict, what it means, what to do."""

import dataclasses

__all__ = ["VERDICTS", "Finding", "worst"]

# From harmless to harmful.
VERDICTS = ("ok", "warn", "broken")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        check: What was looked at, a word or two.
        verdict: `"ok"`; `"warn"`, to be known; or `"broken"`: training will fail, or go wrong.
        meaning: What was found, and what that means.
        advice: What to do about it; empty if nothing is to be done.
        is_upstream: Whether it is of TensorFlow's own strategies, and no trouble of this host.
    """

    check: str
    verdict: str
    meaning: str
    advice: str = ""
    is_upstream: bool = False


def worst(findings: list[Finding]) -> str:
    """Returns the gravest of the verdicts; `"ok"` if there are none."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default="ok")
