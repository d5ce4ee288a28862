"""The plot of a training on several numbers of workers: where a step's time goes, and scaling."""

from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLOURS = {
    "compute": "#0072B2",
    "input": "#E69F00",
    "reduction": "#009E73",
    "waiting": "#D55E00",
    "between": "#999999",
}


def draw(path: str, strong: Sequence[Any], weak: Sequence[Any], title: str) -> None:
    """Draws runs of `tfparallel bench train`.

    Args:
        path: Where the PNG goes.
        strong: Runs with the same batch, by the number of workers.
        weak: Runs with the same rows a worker.
        title: What was found.
    """
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    bars, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    labels, place = [], 0.0
    for name, runs in (("strong", strong), ("weak", weak[1:])):
        for run in runs:
            for split in run.splits:
                bottom = 0.0
                for part, colour in _COLOURS.items():
                    height = getattr(split, part) * 1e3
                    bars.bar(place, height, 0.8, bottom, color=colour, linewidth=0)
                    bottom += height
                labels.append((place, f"{name} {run.num_workers}\nworker {split.worker}"))
                place += 1
            place += 0.6
    bars.set_xticks([x for x, _ in labels], [text for _, text in labels], fontsize=8)
    bars.set(ylabel="ms a step", title="Where a step's time goes")
    for part, colour in _COLOURS.items():
        bars.bar(0, 0, color=colour, label=part)
    bars.legend(frameon=False)
    first = strong[0]
    numbers = [run.num_workers for run in strong]
    ideal = [first.examples_per_second * number / first.num_workers for number in numbers]
    lines.plot(numbers, ideal, color="#bbbbbb", linestyle="--", label="ideal")
    for name, runs, colour in (("strong", strong, "#0072B2"), ("weak", weak, "#D55E00")):
        rates = [run.examples_per_second for run in runs]
        lines.plot([run.num_workers for run in runs], rates, "o-", color=colour, label=name)
    lines.set(xlabel="workers", ylabel="examples a second", title="Scaling", ylim=(0, None))
    lines.set_xticks(numbers)
    lines.legend(frameon=False)
    for axes in (bars, lines):
        axes.grid(True, axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=13)
    figure.savefig(path)
