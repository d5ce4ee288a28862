"""A sweep, in the terms of the cost model."""

from collections.abc import Sequence

from tfparallel.bench.row import Row
from tfparallel.collectives.algorithms.catalog import ALGORITHMS
from tfparallel.collectives.cost_model import CostModel, Measurement, fit

_FEWEST = 4  # Numbers that are fitted.
_BETWEEN_WORKERS = {
    "ring": ("gRPC", "ring"),
    "ring_tuned": ("gRPC, tuned", "ring"),
    "mpi_ring": ("MPI", "ring"),
    "mpi_tree": ("MPI", "tree"),
    "mpi_recursive_doubling": ("MPI", "recursive_doubling"),
    "mpi_reduce_scatter_all_gather": ("MPI", "halving_doubling"),
}


def fitted(
    rows: Sequence[Row], shared: bool, num_cores: int | None = None
) -> dict[str, CostModel]:
    """Returns a model for each transport of a sweep that has enough times to fit one.

    Args:
        rows: The sweep.
        shared: Whether the ranks are devices of one process.
        num_cores: Of the host that all ranks are on; None if they are on several.
    """
    measured: dict[str, list[Measurement]] = {}
    for row in rows:
        modelled = modelled_as(row.algorithm, shared)
        if modelled is not None and row.collective == "all_reduce":
            transport, algorithm = modelled
            measured.setdefault(transport, []).append(
                Measurement(algorithm, row.num_ranks, row.size_bytes, row.median_seconds)
            )
    kind = "shared" if shared else "wire"
    return {
        transport: fit(times, kind, num_cores)
        for transport, times in measured.items()
        if len(times) >= _FEWEST
    }


def modelled_as(name: str, shared: bool) -> tuple[str, str] | None:
    """Returns the transport and the schedule behind a contender's name; None for an unknown one.

    What a library calls its algorithms says what they send, not how: each transport has numbers
    of its own.
    """
    if shared:
        return ("memory", name) if name in ALGORITHMS else None
    return _BETWEEN_WORKERS.get(name)


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
        "num_cores": model.num_cores,
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
