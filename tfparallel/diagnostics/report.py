"""Building blocks of reports: versions, memory, the doctor's findings."""

import dataclasses
import json
import os
import platform
import resource
import sys
from typing import Any

from tfparallel.installed import version_of

# From harmless to harmful.
VERDICTS = ("ok", "warn", "broken")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        check: The subject, in a word or two.
        verdict: `"ok"`; `"warn"`, worth knowing; or `"broken"`: training will fail or go wrong.
        meaning: The finding and its consequence.
        advice: How to fix it; empty if nothing needs fixing.
        is_upstream: Whether it concerns TensorFlow's own strategies rather than this host.
    """

    check: str
    verdict: str
    meaning: str
    advice: str = ""
    is_upstream: bool = False


def worst(findings: list[Finding]) -> str:
    """Returns the worst verdict; `"ok"` if there are no findings."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default="ok")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect results."""
    result = {"python": platform.python_version()}
    for package in ("tfparallel", "tensorflow", "keras", "numpy"):
        # When run from a checkout, a package may be importable but not installed.
        version = version_of(package) or getattr(sys.modules.get(package), "__version__", None)
        if version is not None:
            result[package] = version
    return result


def peak_memory_bytes() -> int:
    """Returns the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_report(path: str, report: dict[str, Any]) -> None:
    """Writes one JSON object; a number that is not finite becomes a string."""
    unfinished = f"{path}.unfinished"
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(_finite(report), file, indent=2, allow_nan=False)
        file.write("\n")
    os.replace(unfinished, path)


def _finite(value: Any) -> Any:
    # JSON has no NaN, and many readers reject Python's.
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
