"""The collectives, types and sizes of a benchmark. Imports no NumPy."""

COLLECTIVES = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
    *("reduce", "scatter", "send_recv"),
)
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MIN_WARMUP = 4  # TensorFlow traces, allocates and plans in the first calls.


def sweep(min_bytes: int, max_bytes: int, step_factor: int, itemsize: int) -> list[int]:
    """Returns the element counts from one size to another, each `step_factor` times the last.

    Raises:
        ValueError: If the range is empty, or the factor is less than 2.
    """
    problems = []
    if step_factor < 2:
        problems.append(f"the factor must be at least 2 (step_factor={step_factor})")
    if max_bytes < min_bytes:
        problems.append(f"the largest size is below the smallest ({max_bytes} < {min_bytes} bytes)")
    if min_bytes < itemsize:
        problems.append(
            f"the smallest size is less than one element of {itemsize} bytes ({min_bytes})"
        )
    if problems:
        raise ValueError(f"There is nothing to sweep: {'; '.join(problems)}.")
    counts, size = [], min_bytes
    while size <= max_bytes:
        counts.append(size // itemsize)
        size *= step_factor
    return counts
