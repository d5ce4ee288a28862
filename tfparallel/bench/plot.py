"""Plots of a sweep over sizes, of scaling over workers, and of a schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from tfparallel.bench.collectives import bus_factor
from tfparallel.bench.cost_fit import least_bytes, modelled_as
from tfparallel.bench.table import Row
from tfparallel.collectives.algorithms import ALGORITHMS
from tfparallel.collectives.algorithms.schedule import MessageSchedule
from tfparallel.collectives.cost_model import CostModel
from tfparallel.texts import size_text

# Our algorithms in colours for the colour-blind (Okabe and Ito, 2008); others in greys.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#882255", "#999933")
_GREYS = ("#222222", "#777777", "#aaaaaa", "#cccccc")
_MARKERS = "osD^vP*X"
_PARTS = {
    "compute": "#0072B2",
    "input": "#E69F00",
    "reduction": "#009E73",
    "waiting": "#D55E00",
    "between": "#999999",
}


def draw_sweep(
    path: str,
    rows: Sequence[Row],
    *,
    title: str,
    models: Mapping[str, CostModel] | None = None,
    bandwidth: float | None = None,
    shared: bool = True,
) -> None:
    """Draws time and bus bandwidth over size, one line per algorithm.

    Solid lines join the measured medians, in bands from the 10th to the 90th percentile; the cost
    model is dashed. Data larger than the caches cannot be faster than the memory's limit.

    Args:
        path: The path of the PNG.
        rows: The measurement, of one collective and one number of ranks.
        title: The title.
        models: Cost models by transport, from `bench.cost_fit.fitted`; draws their predictions.
        bandwidth: The memory bandwidth in bytes per second; draws its limit.
        shared: Whether the ranks share memory, for the limit.
    """
    figure = Figure(figsize=(12.5, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, bus_axes = figure.subplots(1, 2, sharex=True)
    names = list(dict.fromkeys(row.algorithm for row in rows))
    num_ranks, collective = rows[0].num_ranks, rows[0].collective
    factor = bus_factor(collective, num_ranks)
    styles = _styles(names)
    for name in names:
        points = sorted((row for row in rows if row.algorithm == name), key=lambda r: r.size_bytes)
        sizes = np.array([row.size_bytes for row in points], float)
        times = np.array([row.median_seconds for row in points])
        low, high = ([row.quantile_seconds(q) for row in points] for q in (0.1, 0.9))
        time_axes.plot(sizes, times * 1e6, label=name, **styles[name])
        bus_axes.plot(sizes, sizes / times / 1e9 * factor, **styles[name])
        time_axes.fill_between(
            sizes, np.multiply(low, 1e6), np.multiply(high, 1e6), color=styles[name]["color"],
            alpha=0.07, linewidth=0,
        )  # fmt: skip
        transport, algorithm = modelled_as(name, shared) or (None, None)
        if models and transport in models:
            model = models[transport]
            predicted = np.array([model.seconds(algorithm, num_ranks, size) for size in sizes])
            dashed = {"color": styles[name]["color"], "linestyle": (0, (4, 2)), "linewidth": 1.0}
            time_axes.plot(sizes, predicted * 1e6, alpha=0.8, **dashed)
            bus_axes.plot(sizes, sizes / predicted / 1e9 * factor, alpha=0.8, **dashed)
    if bandwidth is not None:
        _draw_limit(time_axes, bus_axes, rows, bandwidth, shared, factor)
    time_axes.set(xscale="log", yscale="log", ylabel="time (µs), median", title="Time")
    bus_axes.set(ylabel="bus bandwidth (GB/s)", title="Bus bandwidth", ylim=(0, None))
    for axes in (time_axes, bus_axes):
        axes.set_xlabel("vector size per rank")
        axes.set_xticks(sorted({row.size_bytes for row in rows}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(size)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", rotation=45)
        _tidy(axes, "both")
    for transport, model in (models or {}).items():
        label = f"cost model, {transport}\n(median error {model.median_error:.0%})"
        time_axes.plot([], [], color="#555555", linestyle=(0, (4, 2)), linewidth=1.0, label=label)
    figure.legend(*time_axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path)


def draw_scaling(path: str, strong: Sequence[Any], weak: Sequence[Any], title: str) -> None:
    """Draws the breakdown of the step time and the scaling over the number of workers.

    Args:
        path: The path of the PNG.
        strong: Runs with the same global batch, by the number of workers.
        weak: Runs with the same rows per worker.
        title: The title.
    """
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    bars, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    labels, place = [], 0.0
    for name, runs in (("strong", strong), ("weak", weak[1:])):
        for run in runs:
            for split in run.splits:
                bottom = 0.0
                for part, colour in _PARTS.items():
                    height = getattr(split, part) * 1e3
                    bars.bar(place, height, 0.8, bottom, color=colour, linewidth=0)
                    bottom += height
                labels.append((place, f"{name} {run.num_workers}\nworker {split.worker}"))
                place += 1
            place += 0.6
    bars.set_xticks([x for x, _ in labels], [text for _, text in labels], fontsize=8)
    bars.set(ylabel="ms per step", title="Where a step's time goes")
    for part, colour in _PARTS.items():
        bars.bar(0, 0, color=colour, label=part)
    bars.legend(frameon=False)
    first = strong[0]
    numbers = [run.num_workers for run in strong]
    ideal = [first.examples_per_second * number / first.num_workers for number in numbers]
    lines.plot(numbers, ideal, color="#bbbbbb", linestyle="--", label="ideal")
    for name, runs, colour in (("strong", strong, "#0072B2"), ("weak", weak, "#D55E00")):
        rates = [run.examples_per_second for run in runs]
        lines.plot([run.num_workers for run in runs], rates, "o-", color=colour, label=name)
    lines.set(xlabel="workers", ylabel="examples per second", title="Scaling", ylim=(0, None))
    lines.set_xticks(numbers)
    lines.legend(frameon=False)
    for axes in (bars, lines):
        _tidy(axes, "y")
    figure.suptitle(title, fontsize=13)
    figure.savefig(path)


def draw_schedule(axes: Any, schedule: MessageSchedule, title: str) -> None:
    """Draws a schedule of few ranks: solid arrows add, dashed arrows copy.

    A column is a rank, a row is a step. `axes` are Matplotlib's.
    """
    steps = list(schedule.steps())
    palette = colormaps["viridis"]
    for rank in range(schedule.num_ranks):
        axes.plot([rank, rank], [-0.2, len(steps)], color="#dddddd", linewidth=1, zorder=0)
    for number, step in enumerate(steps):
        if number and steps[number - 1].adds and not step.adds:
            axes.axhline(number - 0.1, color="#999999", linewidth=0.8, linestyle=":")
        for source, target, start, stop in step.messages():
            middle = (start + stop - 1) / 2 / max(schedule.num_blocks - 1, 1)
            # Bend the arrows of an exchange apart.
            bend = 0.12 if source < target else -0.12
            axes.annotate(
                "",
                xy=(target, number + 0.65),
                xytext=(source, number + 0.1),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": palette(0.9 * middle),
                    "linestyle": "-" if step.adds else (0, (3, 2)),
                    "linewidth": 0.8 + 1.6 * (stop - start) / schedule.num_blocks,
                    "connectionstyle": f"arc3,rad={bend}",
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )
    axes.set_xlim(-0.5, schedule.num_ranks - 0.5)
    axes.set_ylim(len(steps), -0.3)
    axes.set_xticks(range(schedule.num_ranks))
    axes.set_yticks([number + 0.35 for number in range(len(steps))], range(len(steps)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    blocks = f"{schedule.num_blocks} block{'s' * (schedule.num_blocks > 1)}"
    axes.set_title(f"{title}\n{len(steps)} steps, {blocks}", fontsize=10)


def _tidy(axes, lines_across):
    axes.grid(True, axis=lines_across, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _styles(names):
    styles, ours, others = {}, 0, 0
    for name in names:
        if name in ALGORITHMS:
            colour, marker = _COLOURS[ours % len(_COLOURS)], _MARKERS[ours % len(_MARKERS)]
            ours += 1
        else:
            colour, marker = _GREYS[others % len(_GREYS)], _MARKERS[-1 - others % len(_MARKERS)]
            others += 1
        styles[name] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6}
    return styles


def _draw_limit(time_axes, bus_axes, rows, bandwidth, shared, factor):
    sizes = np.array(sorted({row.size_bytes for row in rows}), float)
    times = least_bytes(rows[0].num_ranks, sizes, shared) / bandwidth
    # Cut off the limit where it is far below the measurements.
    floor = min(row.quantile_seconds(0.1) for row in rows) * 1e6 / 4
    below = {"color": "#bbbbbb", "alpha": 0.35, "linewidth": 0}
    time_axes.fill_between(sizes, times * 1e6, 1e-9, **below)
    label = f"memory limit ({bandwidth / 1e9:.0f} GB/s;\ncaches are faster)"
    time_axes.plot(sizes, times * 1e6, color="#888888", linewidth=1.0, label=label)
    time_axes.set_ylim(bottom=floor)
    best = float(sizes[0] / times[0] / 1e9 * factor)
    highest = max(row.bus_bw for row in rows)
    if best < 3 * highest:
        bus_axes.axhline(best, color="#888888", linewidth=1.0)
        bus_axes.axhspan(best, best * 1.08, **below)
    else:
        bus_axes.annotate(
            f"memory limit: {best:.1f} GB/s ↑", (0.02, 0.97), xycoords="axes fraction",
            va="top", color="#666666",
        )  # fmt: skip
