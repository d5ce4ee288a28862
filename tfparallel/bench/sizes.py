"""Sizes of a sweep: `4K`, `64KiB`, `16M`, from one to another by a factor."""

import re

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KIB": 2**10, "MIB": 2**20}
_UNITS |= {"GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Reads a size in bytes; as in nccl-tests, K, M and G are powers of 1024.

    Raises:
        ValueError: If it is none, or below 1.
    """
    match = re.fullmatch(r"(\d+) ?([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if unit is None or int(match[1]) < 1:
        raise ValueError(
            "A size is a whole number of bytes of at least 1, or one with a unit: K, M, G, KiB, "
            f"MiB, GiB (powers of 1024), KB, MB, GB (powers of 1000). Received: {text!r}. Write, "
            "for example, 4K or 16M."
        )
    return int(match[1]) * unit


def sweep(min_bytes: int, max_bytes: int, step_factor: int, itemsize: int) -> list[int]:
    """Returns the counts of elements from one size to another, each `step_factor` times the last.

    Raises:
        ValueError: If there is no size between the two, or the factor does not grow.
    """
    problems = []
    if step_factor < 2:
        problems.append(f"the factor must be at least 2 (step_factor={step_factor})")
    if max_bytes < min_bytes:
        problems.append(f"the largest size is below the smallest ({max_bytes} < {min_bytes} bytes)")
    if min_bytes < itemsize:
        problems.append(f"the smallest size holds no element of {itemsize} bytes ({min_bytes})")
    if problems:
        raise ValueError(f"There is nothing to sweep: {'; '.join(problems)}.")
    counts, size = [], min_bytes
    while size <= max_bytes:
        counts.append(size // itemsize)
        size *= step_factor
    return counts
