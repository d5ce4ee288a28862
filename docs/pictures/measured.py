"""Pictures of what was measured: of `benchmarks/RESULTS.md`, `timeline.json` and `floor.json`."""

import json
import pathlib
import re

import style
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
# A worker's model and batch: the heading in RESULTS.md, and what stands under the bars.
WORKLOADS = {
    "1.2 M parameters, 32 examples a worker": "CNN, 1.2 M\n32 rows",
    "1.2 M parameters, 128 examples a worker": "CNN, 1.2 M\n128 rows",
    "9.5 M parameters, 32 examples a worker": "CNN, 9.5 M\n32 rows",
    "A language model of 32,768 words, 16 rows of 64 words a worker": "language\nmodel",
}
UNJOINED = "the same, 2 processes at once that know nothing of each other"
OURS = "`tfparallel.data_parallel`, 2 workers"
RING = '`data_parallel` with `all_reduce="tensorflow"`, 2 workers'
DDP = "PyTorch DDP with gloo, 2 workers"
MACHINE = "two cores of an AMD EPYC, TensorFlow 2.21, Keras 3.15, PyTorch 2.14"


def section(heading: str) -> str:
    """The text of RESULTS.md under a heading, up to the next one."""
    page = RESULTS.read_text()
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    if found is None:
        raise ValueError(f"benchmarks/RESULTS.md must have the heading {heading!r}.")
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The rows of all tables of a text, heads included."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [cells for cells in table if set("".join(cells)) - set("-| ")]


def median(cell: str) -> float:
    """The median of a cell such as `1.18 (1.01 to 4.01)`."""
    return float(cell.split()[0])


def draw_scaling(folder: pathlib.Path) -> None:
    """Two workers: what joining them costs, and the step of each library."""
    made = style.figure(9.4, 4.1)
    left, right = made.add_axes((0.07, 0.21, 0.42, 0.54)), made.add_axes((0.57, 0.21, 0.4, 0.54))
    bars = ((OURS, "forward", "tfparallel"), (RING, "other", "the same, over TensorFlow's ring"))
    timed = (bars[0], (DDP, "backward", "PyTorch DDP, gloo"))
    for place, name in enumerate(WORKLOADS):
        cells = {row[0]: row[1] for row in rows(section(name))}
        efficiencies = [(median(cells[f"{who}, against {UNJOINED}"]), c) for who, c, _ in bars]
        _bars(left, place, efficiencies, "{:.2f}", inside=True)
        _bars(right, place, [(median(cells[w]), c) for w, c, _ in timed if w in cells], "{:.0f}")
    left.axhline(1, color=style.colour("muted"), linewidth=0.9, linestyle=(0, (4, 3)))
    left.set_ylim(0, 1.1)
    right.margins(y=0.1)
    _title(left, "Efficiency; 1 is the speed of two processes that are not joined")
    _title(right, "Step of fit, ms")
    for axes in (left, right):
        style.plain_axes(axes)
        axes.set_xticks(range(len(WORKLOADS)), WORKLOADS.values(), fontsize=8.5)
    shown = [*bars, timed[1]]
    handles = [Patch(color=style.colour(shade), label=label) for _, shade, label in shown]
    style.legend(made, handles=handles, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 0.01))
    _head(made, "Two workers, a core each", MACHINE)
    style.save(made, "scaling", "Two workers: efficiency and step", folder)


def _bars(axes, place, values, form, inside=False):
    """Draws bars side by side, each with its number in its head or above it."""
    for index, (value, shade) in enumerate(values):
        x = place + (index - (len(values) - 1) / 2) * 0.38
        axes.bar(x, value, 0.35, color=style.colour(shade))
        axes.annotate(
            form.format(value), (x, value), (0, -4 if inside else 3), ha="center",
            textcoords="offset points", va="top" if inside else "bottom", fontsize=8.5,
            color=style.colour("on_forward" if inside else "muted"),
        )  # fmt: skip


def draw_all_reduce(folder: pathlib.Path) -> None:
    """The time of a sum over its size."""
    head, *body = rows(section("All-reduce between 2 workers of one host, a core each"))
    body = [cells for cells in body if len(cells) == len(head) and "iB" in cells[0]][:6]
    sizes = [_bytes(cells[0]) for cells in body]
    made = style.figure(9.4, 4.1)
    axes = made.add_axes((0.075, 0.14, 0.6, 0.64))
    lines = {
        "`mpi`": ("forward", "mpi, the default on one host"),
        "PyTorch's gloo": ("backward", "PyTorch's gloo"),
        "`ring_tuned`": ("sum", "ring_tuned"),
        "TensorFlow's ring": ("other", "TensorFlow's ring"),
    }
    for name, (shade, label) in lines.items():
        values = [median(cells[head.index(name)]) for cells in body]
        axes.plot(sizes, values, "o-", color=style.colour(shade), linewidth=2, markersize=5)
        style.text(axes, sizes[-1] * 1.3, values[-1], f"{label}: {values[-1]:.0f} ms", ink=shade,
                   size=9.5, ha="left", clip_on=False)  # fmt: skip
    axes.set(xscale="log", yscale="log", ylabel="ms")
    axes.set_xticks(sizes, [cells[0] for cells in body])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    style.plain_axes(axes)
    _head(made, "An all-reduce between two workers of one host", MACHINE)
    style.save(made, "all_reduce", "Milliseconds of an all-reduce over its size", folder)


def draw_pipeline(folder: pathlib.Path) -> None:
    """A pipeline's speed-up over one core, by micro-batches."""
    text = section("Pipeline: 2 stages in 2 processes, a core each")
    measured = [cells for cells in rows(text) if "(" in cells[1]]
    table = [cells for cells in measured if cells[0].isdigit()]
    alone = {cells[0]: median(cells[1]) for cells in measured if not cells[0].isdigit()}
    numbers = [int(cells[0]) for cells in table]
    of_ours = [alone["plain Keras"] / median(cells[1]) for cells in table]
    of_torch = [alone["PyTorch"] / median(cells[4]) for cells in table]
    made = style.figure(9.4, 3.9)
    axes = made.add_axes((0.075, 0.15, 0.6, 0.62))
    lines = (
        ("other", "no bubble but 1F1B's: 2M/(M + 1)", [2 * m / (m + 1) for m in numbers]),
        ("backward", "PyTorch, over PyTorch on one core", of_torch),
        ("forward", "tfparallel, over plain Keras on one core", of_ours),
    )
    spread = _spread([values[-1] for _, _, values in lines], 0.09)
    for (shade, label, values), y in zip(lines, spread, strict=True):
        dashes = (0, (4, 3)) if shade == "other" else "-"
        axes.plot(
            numbers, values, "o", linestyle=dashes, color=style.colour(shade), linewidth=2,
            markersize=5,
        )  # fmt: skip
        style.text(axes, numbers[-1] + 0.25, y, f"{label}: {values[-1]:.2f}", ink=shade, size=9,
                   ha="left", clip_on=False)  # fmt: skip
    axes.set(xlabel="micro-batches M", ylabel="speed-up", ylim=(1, 1.9))
    axes.set_xticks(numbers)
    style.plain_axes(axes)
    _head(made, "A transformer of 10.8 M parameters on two cores instead of one", MACHINE)
    style.save(made, "pipeline_speed", "Speed-up of a pipeline by micro-batches", folder)


def draw_timeline(folder: pathlib.Path) -> None:
    """The step that `measure_timeline.py` measured."""
    measured = json.loads(style.FOLDER.joinpath("timeline.json").read_text())
    made, axes = style.canvas(9.4, 2.75)
    ends = [end for *_, end in measured["instructions"]]
    left, width, scale = 0.95, 8.1, 8.1 / max(ends)
    for device in range(2):
        y = 1.32 - device * 0.56
        style.box(axes, left, y, width, 0.44, "device", radius=0.04)
        style.text(axes, left - 0.1, y + 0.22, f"device {device}", ink="muted", size=9, ha="right")
    for kind, stage, number, begin, end in measured["instructions"]:
        x, length, y = left + begin * scale, (end - begin) * scale, 1.32 - stage * 0.56
        radius = min(0.035, length / 3)
        style.box(axes, x + 0.008, y, length - 0.016, 0.44, kind, radius=radius)
        if length > 0.12:
            style.text(axes, x + length / 2, y + 0.22, str(number), ink=f"on_{kind}", size=8.5)
    style.arrow(axes, (left, 0.58), (left + width, 0.58), ink="muted", width=0.9)
    style.text(axes, left + width, 0.42, f"{1e3 * max(ends):.0f} ms", ink="muted", size=9,
               ha="right")  # fmt: skip
    x = left
    for kind in ("forward", "backward"):
        style.box(axes, x, 0.36, 0.14, 0.12, kind, radius=0.02)
        style.text(axes, x + 0.2, 0.42, kind, ink="muted", size=9, ha="left")
        x += 0.95
    where = measured["environment"]
    _head(
        made, "1F1B as measured: two stages in two processes, eight micro-batches",
        f"{measured['parameters'] / 1e6:.1f} M parameters, {where['CPU']}, a core a process, "
        f"bubble {measured['bubble']:.0%}; the fastest of {measured['num_steps']} steps, other "
        "programs ran on the same cores",
    )  # fmt: skip
    style.save(made, "timeline_1f1b", "A step of 1F1B as measured", folder)


def draw_floor(folder: pathlib.Path) -> None:
    """What `tfparallel check` found of one network in two precisions."""
    measured = json.loads(style.FOLDER.joinpath("floor.json").read_text())
    made = style.figure(9.4, 4.1)
    places = ((0.085, 0.24, 0.4, 0.51, 1e-8), (0.575, 0.24, 0.4, 0.51, 1e-17))
    muted = style.colour("muted")
    dashed = {"color": muted, "linewidth": 0.9, "linestyle": (0, (4, 3))}
    words = {"color": muted, "fontsize": 8.5}
    for (*place, least), (dtype, report) in zip(places, measured["reports"].items(), strict=True):
        axes = made.add_axes(place)
        steps = [item["step"] for item in report["steps"]]
        for shade, name in (("backward", "floor"), ("forward", "difference")):
            low = [item[f"median_{name}"] for item in report["steps"]]
            high = [item[name] for item in report["steps"]]
            axes.fill_between(steps, low, high, color=style.colour(shade), alpha=0.18, linewidth=0)
            axes.plot(steps, low, "o-", color=style.colour(shade), linewidth=2, markersize=4.5)
        tolerance, sharp = report["tolerance"], report["sharp_until"]
        axes.axhline(tolerance, **dashed)
        axes.text(steps[0], tolerance * 1.3, f"tolerance, {tolerance:.0e}", **words)
        if sharp is not None and sharp < steps[-1]:
            axes.axvline(sharp, **dashed)
            axes.text(sharp * 1.1, least * 2, "from here on, rounding\nalone may decide", **words)
        axes.set(xscale="log", yscale="log", xlabel="step", ylim=(least, least * 1e9))
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        _title(axes, dtype)
        style.plain_axes(axes)
    made.axes[0].set_ylabel("relative difference of a weight")
    handles = [
        Patch(color=style.colour("forward"), label="3 replicas against one device"),
        Patch(color=style.colour("backward"), label="one device, first weights moved by one unit"),
    ]
    style.legend(made, handles=handles, loc="lower center", ncols=2, bbox_to_anchor=(0.5, 0.0))
    _head(
        made, "The rounding floor: how far rounding alone carries the weights",
        f"models/digits_cnn.py, {measured['versions']}; lines: the median weight, bands: up to "
        "the largest",
    )  # fmt: skip
    style.save(made, "rounding_floor", "Differences of weights, and the rounding floor", folder)


def _title(axes, words):
    axes.set_title(words, fontsize=10, loc="left", color=style.colour("ink"))


def _head(made, title, below):
    width, height = made.get_size_inches()
    at = {"x": 0.3 / width, "ha": "left", "va": "center"}
    made.text(y=1 - 0.32 / height, s=title, fontsize=13, weight="bold",
              color=style.colour("ink"), **at)  # fmt: skip
    made.text(y=1 - 0.6 / height, s=below, fontsize=9, color=style.colour("muted"), **at)


def _bytes(size: str) -> int:
    number, unit = size.split()
    return int(number) * {"KiB": 2**10, "MiB": 2**20}[unit]


def _spread(values, least):
    """Moves values apart, in order, until neighbours are `least` from each other."""
    order = sorted(range(len(values)), key=values.__getitem__)
    moved = list(values)
    for below, above in zip(order, order[1:], strict=False):
        moved[above] = max(moved[above], moved[below] + least)
    return moved


def main(folder: pathlib.Path = style.FOLDER) -> None:
    """Writes all of them."""
    for draw in (draw_scaling, draw_all_reduce, draw_pipeline, draw_timeline, draw_floor):
        draw(folder)


if __name__ == "__main__":
    main()
