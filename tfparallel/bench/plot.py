"""The plot of a sweep: time and bus bandwidth over size, a line an algorithm.

Measured points are joined by solid lines, in bands from the 10th to the 90th percentile; the cost
model is dashed; what does not fit into the caches cannot be below the memory's limit.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from tfparallel.bench.limit import least_bytes
from tfparallel.bench.model import modelled_as
from tfparallel.bench.row import Row, bus_factor
from tfparallel.collectives.algorithms.catalog import ALGORITHMS
from tfparallel.collectives.cost_model import CostModel
from tfparallel.texts import size_text

# Ours in colours that differ in the dark, too (Okabe and Ito, 2008); others in greys.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#882255", "#999933")
_GREYS = ("#222222", "#777777", "#aaaaaa", "#cccccc")
_MARKERS = "osD^vP*X"


def draw(
    path: str,
    rows: Sequence[Row],
    *,
    title: str,
    models: Mapping[str, CostModel] | None = None,
    bandwidth: float | None = None,
    shared: bool = True,
) -> None:
    """Draws a sweep.

    Args:
        path: Where the PNG goes.
        rows: The measurement, of one collective and one number of ranks.
        title: What was measured.
        models: By transport, as `tfparallel.bench.model.fitted` returns; draws what they predict.
        bandwidth: Bytes a second of the memory; draws the limit, too.
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
        own = sorted((row for row in rows if row.algorithm == name), key=lambda r: r.size_bytes)
        sizes = np.array([row.size_bytes for row in own], float)
        times = np.array([row.median_seconds for row in own])
        low, high = ([row.quantile_seconds(q) for row in own] for q in (0.1, 0.9))
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
        axes.set_xlabel("size of the vector of each rank")
        axes.set_xticks(sorted({row.size_bytes for row in rows}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(size)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", rotation=45)
        axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for transport, model in (models or {}).items():
        label = f"cost model, {transport}\n(median error {model.median_error:.0%})"
        time_axes.plot([], [], color="#555555", linestyle=(0, (4, 2)), linewidth=1.0, label=label)
    figure.legend(*time_axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path)


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
    # Where it is far below what was measured, it says nothing.
    floor = min(row.quantile_seconds(0.1) for row in rows) * 1e6 / 4
    below = {"color": "#bbbbbb", "alpha": 0.35, "linewidth": 0}
    time_axes.fill_between(sizes, times * 1e6, 1e-9, **below)
    label = f"memory's limit ({bandwidth / 1e9:.0f} GB/s;\ncaches are faster)"
    time_axes.plot(sizes, times * 1e6, color="#888888", linewidth=1.0, label=label)
    time_axes.set_ylim(bottom=floor)
    best = float(sizes[0] / times[0] / 1e9 * factor)
    highest = max(row.bus_bw for row in rows)
    if best < 3 * highest:
        bus_axes.axhline(best, color="#888888", linewidth=1.0)
        bus_axes.axhspan(best, best * 1.08, **below)
    else:
        bus_axes.annotate(
            f"memory's limit: {best:.1f} GB/s ↑", (0.02, 0.97), xycoords="axes fraction",
            va="top", color="#666666",
        )  # fmt: skip
