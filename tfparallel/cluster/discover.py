"""Finds the workers of a job from the environment variables of its launchers.

Launchers nest: `srun` may start one torchrun per node, or MPI's daemons. The innermost launcher
counts the workers; the others must count the same number, or the number of launchers. A launcher
of a single process is ignored.

TFPARALLEL_WORKERS, `"host1:port,host2:port"`, lists an address per worker in rank order. It
overrides the addresses computed from the launchers' variables; see
`tfparallel.cluster.launcher_env`.
"""

from collections.abc import Mapping
from typing import Any

from tfparallel.cluster.address import address_problems, local_place
from tfparallel.cluster.config_error import refusal, shown
from tfparallel.cluster.launcher_env import (
    LauncherEnv,
    of_kubernetes,
    of_mpi,
    of_slurm,
    of_torchrun,
)

_WORKERS = "TFPARALLEL_WORKERS"
_NUM_WORKERS = "TFPARALLEL_NUM_WORKERS"


def find(environ: Mapping[str, str], configured: LauncherEnv | None = None) -> dict[str, Any]:
    """Finds this process's job.

    Args:
        environ: Environment variables.
        configured: The cluster from TF_CONFIG, which takes precedence over sources that agree.

    Returns:
        The arguments of a `Cluster`; empty for a single process.

    Raises:
        ValueError: If a source is malformed or incomplete, or if two contradict
            each other.
    """
    environ = {name: value.strip() for name, value in environ.items() if value.strip()}
    claims = [of_torchrun(environ), of_mpi(environ), of_slurm(environ)]
    claims = [claim for claim in claims if claim and claim.num_workers > 1]
    claims = [configured, *claims] if configured else claims
    pod = of_kubernetes(environ, counted=bool(claims))
    claims += [pod] if pod else []
    if not claims:
        _check_alone(environ)
        return {}
    agreeing = _agreeing(claims)
    workers = _addresses(environ, agreeing)
    local_rank, num_local_workers = _place(agreeing, workers)
    return {
        "source": agreeing[0].source,
        "workers": workers,
        "worker_index": agreeing[0].worker_index,
        "local_rank": local_rank,
        "num_local_workers": num_local_workers,
    }


def _agreeing(claims):
    """Drops claims that count launchers instead of workers; raises on a contradiction."""
    inner = claims[0]
    agreeing, against = [inner], []
    for place, claim in enumerate(claims[1:], 1):
        if _same(inner, claim):
            agreeing.append(claim)
        elif not any(_started(claim, other) for other in claims[:place]):
            against.append(claim)
    if not against:
        return agreeing
    claimed = [
        f"{claim.source} says worker {claim.worker_index} of {claim.num_workers}"
        for claim in [inner, *against]
    ]
    received = {}
    for claim in [inner, *against]:
        received |= claim.received
    raise refusal(
        "The sources contradict each other about this process",
        [", ".join(claimed) + "; all must agree, or workers wait for others that never come"],
        shown(received),
        "Unset the variables of the one that is stale, or start as many workers as it says.",
    )


def _check_alone(environ):
    named = {name: environ[name] for name in (_WORKERS, _NUM_WORKERS) if name in environ}
    if "," in named.get(_WORKERS, "") or named.get(_NUM_WORKERS, "1") != "1":
        raise refusal(
            f"{' and '.join(named)} name several workers, but not which one this process is",
            ["a rank set by torchrun, MPI, Slurm or Kubernetes is required"],
            shown(named),
            "Start the workers with one of them or with `tfparallel launch`, or set TF_CONFIG.",
        )


def _same(inner, outer):
    counts = (inner.num_workers, inner.num_workers + inner.num_evaluators)
    return outer.num_workers in counts and outer.worker_index == inner.worker_index


def _started(outer, inner):
    """Whether `outer` counts the processes that started the workers of `inner`."""
    if outer.num_workers == inner.num_launchers:
        return True
    return inner.source == "MPI" and outer.one_a_host and outer.num_workers < inner.num_workers


def _addresses(environ, agreeing):
    named = environ.get(_WORKERS)
    first = agreeing[0]
    if named is not None:
        addresses = tuple(part.strip() for part in named.split(","))
        problems = address_problems(
            (f"{_WORKERS}[{index}]", address) for index, address in enumerate(addresses)
        )
        if len(addresses) != first.num_workers:
            problems.append(
                f"it names {len(addresses)} workers, but {first.source} says {first.num_workers}"
            )
        if first.source == "TF_CONFIG" and not problems and addresses != first.addresses():
            problems.append("its addresses differ from those in TF_CONFIG; unset one of the two")
        if problems:
            received = shown({_WORKERS: named, **first.received})
            raise refusal(f"{_WORKERS} cannot be used", problems, received)
        return addresses
    # TF_CONFIG and Slurm know every host; nested launchers know only their own.
    order = ("TF_CONFIG", "Slurm", "Kubernetes", "torchrun", "MPI")
    return min(agreeing, key=lambda claim: order.index(claim.source)).addresses()


def _place(agreeing, workers):
    for claim in agreeing:
        if claim.local_rank is not None and claim.num_local_workers is not None:
            return claim.local_rank, claim.num_local_workers
    return local_place(workers, agreeing[0].worker_index)
