"""The picture of `sync.py`: the validation loss over steps, and over the bytes sent so far."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sync_contender import EVALUATED_EVERY
from sync_results import TARGET_LOSSES, TITLES

# Colours that color-blind readers can tell apart (Okabe and Ito, 2008).
_COLOURS = (
    *("#000000", "#0072B2", "#56B4E9", "#D55E00", "#009E73"),
    *("#CC79A7", "#882255", "#E69F00", "#999933"),
)


def draw(path, runs):
    """Draws a row of two axes for each task: means over the seeds.

    Args:
        path: Where the PNG goes.
        runs: Task -> policy -> a run for each seed, as `sync_results.of_workers` returns them.
    """
    figure = Figure(figsize=(12, 4.5 * len(runs)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs), 2, sharey="row", squeeze=False)
    for (over_steps, over_bytes), (task, of_policies) in zip(rows, runs.items(), strict=True):
        for colour, (policy, of_seeds) in zip(_COLOURS, of_policies.items(), strict=False):
            losses = np.mean([run["losses"] for run in of_seeds], axis=0)
            sent = np.mean([run["sent_bytes"] for run in of_seeds], axis=0) / 1e6
            steps = EVALUATED_EVERY * np.arange(1, len(losses) + 1)
            style = {"color": colour, "linewidth": 1.4, "label": policy}
            over_steps.plot(steps, losses, **style)
            over_bytes.plot(sent, losses, **style)
        over_steps.set(xlabel="steps", ylabel="validation loss, mean of the seeds")
        over_bytes.set(xlabel="MB that a worker has sent", xscale="log")
        over_steps.set_title(TITLES[task].partition(":")[0])
        over_steps.set_yscale("log")
        for axes in (over_steps, over_bytes):
            axes.axhline(TARGET_LOSSES[task], color="#999999", linewidth=0.8, linestyle=":")
            axes.grid(alpha=0.25)
    rows[0][1].legend(fontsize=8)
    figure.savefig(path)
