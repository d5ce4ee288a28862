"""A sweep, in the terms of the cost model."""

from collections.abc import Sequence

from tfparallel.bench.row import Row
from tfparallel.collectives.algorithms.catalog import ALGORITHMS
from tfparallel.collectives.cost_model import CostModel, Measurement, fit

_FEWEST = 4  # Numbers that are fitted.


def fitted(rows: Sequence[Row], shared: bool) -> CostModel | None:
    """Returns the model of a sweep, or None if too little of it can be modelled."""
    measured = [
        Measurement(row.algorithm, row.num_ranks, row.size_bytes, row.median_seconds)
        for row in rows
        if row.algorithm in ALGORITHMS and row.collective == "all_reduce"
    ]
    if len(measured) < _FEWEST:
        return None
    return fit(measured, "shared" if shared else "wire")


def describe(model: CostModel) -> str:
    """Returns the model in one line."""
    return (
        f"t0 {model.fixed * 1e6:.3g} us, alpha {model.alpha * 1e6:.3g} us a message, "
        f"beta {model.beta * 1e9:.3g} ns a byte sent, gamma {model.gamma * 1e9:.3g} ns a byte "
        f"added; median error {model.median_error:.0%} of {len(model.residuals)} times"
    )


def as_json(model: CostModel) -> dict:
    """Returns the model, times in seconds."""
    return {
        "transport": model.transport,
        "fixed": model.fixed,
        "alpha": model.alpha,
        "beta": model.beta,
        "gamma": model.gamma,
        "median_error": model.median_error,
        "residuals": list(model.residuals),
    }


def fastest(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """Returns, as measured, from which size on which algorithm was the fastest."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.size_bytes not in best or row.median_seconds < best[row.size_bytes].median_seconds:
            best[row.size_bytes] = row
    found: list[tuple[int, str]] = []
    for size, row in sorted(best.items()):
        if not found or found[-1][1] != row.algorithm:
            found.append((size, row.algorithm))
    return found
