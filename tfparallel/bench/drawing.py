"""A schedule as a picture: time runs down, an arrow is a message, a colour is a block."""

from typing import Any

from matplotlib import colormaps

from tfparallel.collectives.algorithms.schedule import MessageSchedule


def draw_schedule(axes: Any, schedule: MessageSchedule, title: str) -> None:
    """Draws a schedule of few ranks: solid arrows add, dashed ones copy.

    Ranks stand in columns, a row is a step. `axes` are Matplotlib's.
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
            # Two that exchange would lie on each other.
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
    for side in axes.spines.values():
        side.set_visible(False)
    axes.xaxis.tick_top()
    blocks = f"{schedule.num_blocks} block{'s' * (schedule.num_blocks > 1)}"
    axes.set_title(f"{title}\n{len(steps)} steps, {blocks}", fontsize=10)
