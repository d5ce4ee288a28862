"""`tfparallel plan all_reduce`: predicts the time of an all-reduce on a hypothetical cluster."""

import json
from collections.abc import Sequence

from absl import flags

from tfparallel.collectives.algorithms import ALGORITHMS, GROUPED, double_binary_tree, rings
from tfparallel.collectives.cost_model import CostModel, Link, simulate
from tfparallel.command_line.contradictions import counts_of, size_problems
from tfparallel.command_line.exits import UsageError
from tfparallel.diagnostics.report import write_report
from tfparallel.texts import aligned, size_text

_MAX_RANKS = 2**16
# The simulation of trees counts packets in Python, one message at a time.
_MAX_TREE_RANKS = 256


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Prints the predictions, and returns the exit code."""
    model, sizes = _model(values), counts_of(values, 1)
    ranks, local = values.ranks, values.local_ranks
    predicted = {
        name: [model.seconds(name, ranks, size, local) for size in sizes] for name in ALGORITHMS
    }
    simulated = {
        name: times
        for name in ALGORITHMS
        if (times := _simulated(name, ranks, local, sizes, model)) is not None
    }
    print("\n".join(_assumptions(values, model)))
    print("\n".join(["", "by formula", *_table(sizes, predicted)]))
    if simulated:
        print("\n".join(["", "by simulation, message by message", *_table(sizes, simulated)]))
        print("\n" + _agreement(predicted, simulated))
    crossovers = model.crossovers(ranks, sizes[0], sizes[-1], local)
    print(
        "fastest by formula: "
        + ", ".join(f"{name} from {size_text(size)}" for size, name in crossovers)
    )
    if values.report is not None:
        content = {
            "ranks": ranks,
            "local_ranks": local,
            "sizes": sizes,
            "seconds": predicted,
            "simulated_seconds": simulated,
            "crossovers": crossovers,
        }
        write_report(values.report, content)
        print(f"wrote {values.report}")
    return 0


def problems(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the flags beyond their rows."""
    problems = []
    if values.ranks is None or not 2 <= values.ranks <= _MAX_RANKS:
        problems.append(
            f"A number of ranks from 2 to {_MAX_RANKS} is required. "
            f"Received: --ranks={values.ranks}."
        )
    elif values.local_ranks is not None:
        try:
            rings.groups(values.ranks, values.local_ranks)
        except ValueError as error:
            problems.append(f"--local_ranks: {error}")
    return problems + size_problems(values, 1)


def _model(values) -> CostModel:
    if values.sweep is not None:
        return _fitted(values.sweep)
    across = Link(values.latency_us * 1e-6, 1e-9 / values.bandwidth)
    gamma = 1e-9 / values.add_bandwidth
    if values.local_ranks is None:
        return CostModel(across.alpha, across.beta, gamma)
    return CostModel(
        values.local_latency_us * 1e-6, 1e-9 / values.local_bandwidth, gamma, across=across
    )


def _fitted(path) -> CostModel:
    try:
        with open(path, encoding="utf-8") as file:
            models = json.load(file)["models"]
        # If several transports were measured, take the one with the most times.
        fields = max(models.values(), key=lambda model: len(model["residuals"]))
        return CostModel(
            fields["alpha"], fields["beta"], fields["gamma"], fields["fixed"], fields["transport"],
            residuals=tuple(fields["residuals"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "--sweep must be a report of `tfparallel bench all_reduce --report=FILE.json` with at "
            f"least two sizes, so that it has a fitted model. Received: --sweep={path} ({error!r})."
        ) from error


def _simulated(name, ranks, local, sizes, model) -> list[float] | None:
    if model.transport != "wire":
        return None
    algorithm = ALGORITHMS[name]
    if name in GROUPED:
        return simulate(algorithm.schedule(ranks, local), sizes, model, local)
    if name != "double_binary_tree":
        return simulate(algorithm.schedule(ranks), sizes, model, local)
    if ranks > _MAX_TREE_RANKS:
        return None
    wire = model.across or model
    times = []
    for size in sizes:
        packets = double_binary_tree.best_num_packets(ranks, size, wire.alpha, wire.beta)
        schedule = double_binary_tree.schedule(ranks, packets)
        times += simulate(schedule, [size], model, local)
    return times


def _assumptions(values, model) -> list[str]:
    def wire(alpha, beta):
        return f"{alpha * 1e6:.3g} us a message, {1e-9 / beta if beta else float('inf'):.3g} GB/s"

    ranks = f"{values.ranks} ranks"
    if model.transport == "shared":
        lines = [f"{ranks}, devices of one process sharing cores and memory"]
    elif model.across is None:
        lines = [f"{ranks}, one kind of link: {wire(model.alpha, model.beta)}"]
    else:
        lines = [
            f"{ranks}, {values.local_ranks} per host",
            f"  within a host: {wire(model.alpha, model.beta)}",
            f"  between hosts: {wire(model.across.alpha, model.across.beta)}, per rank",
        ]
    if values.sweep is not None:
        lines.append(f"fitted to {values.sweep}: median error {model.median_error:.0%}")
    else:
        lines.append("assumed, not measured; set the flags to change it")
    return lines


def _agreement(predicted, simulated) -> str:
    apart = {
        name: max(abs(b / a - 1) for a, b in zip(predicted[name], times, strict=True))
        for name, times in simulated.items()
    }
    same = sorted(name for name, difference in apart.items() if difference < 1e-6)
    others = [
        f"{name} by up to {difference:.0%}"
        for name, difference in apart.items()
        if name not in same
    ]
    text = f"formula and simulation agree: {', '.join(same) or 'none'}"
    return text + (
        f"; these differ, since the formulas are upper bounds: {', '.join(others)}"
        if others
        else ""
    )


def _table(sizes, seconds) -> list[str]:
    rows = [["size", *seconds]]
    for index, size in enumerate(sizes):
        times = {name: of_all[index] for name, of_all in seconds.items()}
        best = min(times, key=times.get)
        rows.append(
            [size_text(size), *(_time(t) + ("*" if n == best else " ") for n, t in times.items())]
        )
    return aligned(rows, right=True)


def _time(seconds: float) -> str:
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
