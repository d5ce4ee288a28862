"""The plot of a check: the deviation of the parallel run and of rounding alone, by step."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tfparallel.diagnostics.check_report import CheckReport
from tfparallel.diagnostics.compare import UNITS

# Colors of Okabe and Ito (2008): safe for color-blind readers.
_FORM, _FLOOR, _TOLERANCE = "#0072B2", "#E69F00", "#555555"


def draw(path: str, report: CheckReport, *, title: str) -> None:
    """Plots the difference of the parallel run, the rounding floor and the tolerance, as a PNG.

    Lines are medians over the weights; bands extend to the maximum.
    """
    figure = Figure(figsize=(9, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = np.array([item.step for item in report.steps])
    # A log axis cannot show zero, so clip just below one unit in the last place.
    least = UNITS[report.dtype] / 4
    curves = (
        ("floor: initial weights nudged by one ULP", _FLOOR, "s", "median_floor", "floor"),
        ("difference: parallel run", _FORM, "o", "median_difference", "difference"),
    )
    for label, colour, marker, median, largest in curves:
        low, high = (
            np.maximum([getattr(item, name) for item in report.steps], least)
            for name in (median, largest)
        )
        axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(steps, high, color=colour, linewidth=0.8, alpha=0.7)
        axes.plot(steps, low, color=colour, marker=marker, markersize=5, linewidth=1.8, label=label)
    axes.axhline(
        report.tolerance, color=_TOLERANCE, linestyle=(0, (4, 2)), linewidth=1.0,
        label=f"tolerance, {report.tolerance:.0e}",
    )  # fmt: skip
    if report.sharp_until is not None:
        axes.axvspan(steps[0], report.sharp_until, color="#009E73", alpha=0.06, linewidth=0)
        axes.annotate(
            f"sharp up to step {report.sharp_until}", (report.sharp_until, 0.02), ha="right",
            xycoords=("data", "axes fraction"), color="#00664b", xytext=(-4, 0),
            textcoords="offset points",
        )  # fmt: skip
    growth = ""
    if report.growth is not None:
        growth = f"; the model amplifies rounding error by a factor of {report.growth:.2g} per step"
    axes.set(
        xscale="log", yscale="log", xlabel="step", ylabel="relative difference of a weight",
        title=report.verdict + growth,
    )  # fmt: skip
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.suptitle(f"{title}, {report.dtype}", fontsize=12)
    figure.savefig(path)
