"""One step of each form: what each device holds, and what it does when. Schematic, not to scale."""

import dataclasses
import pathlib

import style

from tfparallel.layout.schedule import make_schedule
from tfparallel.layout.simulator import StageSeconds, simulate

NUM_LAYERS = 4
# Equal layers whose backward pass takes twice as long; a sum and an update, in the same unit.
FORWARD, BACKWARD, SUM, UPDATE = 1.0, 2.0, 0.8, 0.5
WHOLE, NONE = "whole", "none"


@dataclasses.dataclass
class Block:
    """What devices `first` to `last` do from `begin` to `end`, with which part of the batch."""

    first: int
    last: int
    begin: float
    end: float
    kind: str
    label: str = ""
    rows: int | None = None


@dataclasses.dataclass
class Form:
    """A form's picture.

    Attributes:
        name: Of the file and of the function.
        title: Above the picture.
        caption: Under the title.
        short: Under the form's drawing among the others.
        holds: What each device holds of each layer, the first layer first.
        rows: Which rows each device reads: the colours of the parts of the batch, or None.
        links: Arrows between devices: (from, to, what).
        blocks: The step.
        legend: What a colour of the rows stands for.
    """

    name: str
    title: str
    caption: str
    short: str
    holds: list[list[str]]
    rows: list[list[int] | None]
    links: list[tuple[int, int, str]]
    blocks: list[Block]
    legend: str


def data() -> Form:
    """Replicas: each computes its rows; one sum of gradients."""
    forward, backward = FORWARD * 2, BACKWARD * 2
    blocks, end = [], forward + backward
    for device in range(2):
        blocks += [
            Block(device, device, 0, forward, "forward", "forward"),
            Block(device, device, forward, end, "backward", "backward"),
            Block(device, device, end + SUM, end + SUM + UPDATE, "update"),
        ]
    blocks.append(Block(0, 1, end, end + SUM, "sum", "Σ"))
    return Form(
        "data_parallel", "Data parallel",
        "Each device holds the whole model and computes its rows of the batch; the gradients are "
        "summed once a step.",
        "whole model on each,\nrows divided",
        [[WHOLE] * NUM_LAYERS] * 2, [[0] * 4, [1] * 4], [(0, 1, "sum")], blocks,
        "colours: rows of the batch",
    )  # fmt: skip


def model() -> Form:
    """Layers on devices, one device at work at a time."""
    f, b = FORWARD * 2, BACKWARD * 2
    blocks = [
        Block(0, 0, 0, f, "forward", "forward"),
        Block(1, 1, f, 2 * f, "forward", "forward"),
        Block(1, 1, 2 * f, 2 * f + b, "backward", "backward"),
        Block(0, 0, 2 * f + b, 2 * f + 2 * b, "backward", "backward"),
        Block(1, 1, 2 * f + b, 2 * f + b + UPDATE, "update"),
        Block(0, 0, 2 * f + 2 * b, 2 * f + 2 * b + UPDATE, "update"),
    ]
    return Form(
        "model_parallel", "Layers on devices",
        "Each device holds some of the layers; outputs go on to the next one, gradients come "
        "back. One works at a time.",
        "layers divided,\none works at a time",
        [[WHOLE, WHOLE, NONE, NONE], [NONE, NONE, WHOLE, WHOLE]],
        [[0] * 8, None], [(0, 1, "passes")], blocks, "colours: rows of the batch",
    )  # fmt: skip


def _pipelined(first: int, shades: list[int]) -> tuple[list[Block], float]:
    """1F1B on two stages, for the micro-batches that `shades` colours."""
    schedule = make_schedule("1f1b", 2, len(shades))
    timeline = simulate(schedule, [StageSeconds(FORWARD, BACKWARD)] * 2)
    blocks = [
        Block(
            first + one.stage, first + one.stage, begin, end, one.kind, str(one.micro_batch),
            shades[one.micro_batch],
        )  # fmt: skip
        for one, (begin, end) in timeline.seconds.items()
    ]
    return blocks, timeline.makespan


def pipeline() -> Form:
    """Stages, each at work on another micro-batch."""
    blocks, end = _pipelined(0, [0, 1, 2, 3])
    for device in range(2):
        own = max(block.end for block in blocks if block.first == device)
        blocks.append(Block(device, device, own, own + UPDATE, "update"))
    return Form(
        "pipeline_parallel", "Pipeline",
        "The batch is cut into micro-batches, so that the devices work at the same time. Drawn: "
        "1F1B, four micro-batches.",
        "layers divided,\nmicro-batches keep all busy",
        [[WHOLE, WHOLE, NONE, NONE], [NONE, NONE, WHOLE, WHOLE]],
        [[0, 0, 1, 1, 2, 2, 3, 3], None], [(0, 1, "passes")], blocks,
        "colours, and numbers: micro-batches",
    )  # fmt: skip


def tensor() -> Form:
    """Layers in parts, two sums for a pair of layers."""
    blocks, now = [], 0.0
    for kind, length in (("forward", FORWARD), ("backward", BACKWARD)):
        for _ in range(2):
            blocks += [Block(device, device, now, now + length, kind) for device in range(2)]
            now += length
            blocks.append(Block(0, 1, now, now + SUM / 2, "sum", "Σ"))
            now += SUM / 2
    blocks += [Block(device, device, now, now + UPDATE, "update") for device in range(2)]
    return Form(
        "tensor_parallel", "Split layers",
        "Each device holds a part of each layer and sees every row; the parts of the outputs are "
        "summed within the step.",
        "each layer divided,\nall rows on each",
        [["left"] * NUM_LAYERS, ["right"] * NUM_LAYERS],
        [[0] * 4, [0] * 4], [(0, 1, "sum")], blocks, "colours: rows of the batch",
    )  # fmt: skip


def hybrid() -> Form:
    """Two replicas of two stages each."""
    blocks = []
    for replica in range(2):
        own, _ = _pipelined(2 * replica, [2 * replica, 2 * replica + 1])
        blocks += own
    stages = [max(b.end for b in blocks if b.first == stage) for stage in range(2)]
    for stage, end in enumerate(stages):
        for device in (stage, 2 + stage):
            blocks.append(Block(device, device, end, end + SUM, "sum", f"Σ {stage}"))
            blocks.append(Block(device, device, end + SUM, end + SUM + UPDATE, "update"))
    below, above = [WHOLE, WHOLE, NONE, NONE], [NONE, NONE, WHOLE, WHOLE]
    return Form(
        "hybrid_parallel", "Hybrid: two replicas of two stages",
        "Each replica is a pipeline for its rows; each stage sums its gradients with the same "
        "stage of the other replica.",
        "replicas of several\ndevices each",
        [below, above, below, above], [[0, 0, 1, 1], None, [2, 2, 3, 3], None],
        [(0, 1, "passes"), (2, 3, "passes"), (0, 2, "sum"), (1, 3, "sum")], blocks,
        "colours: micro-batches of the two replicas",
    )  # fmt: skip


FORMS = (data, model, pipeline, tensor, hybrid)

WIDTH, HEIGHT, GAP, UP = 1.25, 1.42, 0.62, 1.0  # A device's box, and the room between two.


def _draw_devices(axes, form, left, bottom):
    """Draws the devices of a form, two in a row; returns the width."""
    corners = []
    for device, holds in enumerate(form.holds):
        row, column = divmod(device, 2)
        x = left + column * (WIDTH + GAP)
        y = bottom - row * (HEIGHT + UP)
        corners.append((x, y))
        style.box(axes, x, y, WIDTH, HEIGHT, "device", edge="edge", radius=0.09)
        style.text(axes, x + WIDTH / 2, y + HEIGHT - 0.16, f"device {device}", ink="muted", size=9)
        for layer, part in enumerate(holds):
            _draw_layer(axes, x + 0.15, y + 0.14 + 0.27 * layer, WIDTH - 0.3, part)
        if form.rows[device]:
            _draw_rows(axes, x + WIDTH / 2, y - 0.12, form.rows[device])
    for source, target, what in form.links:
        _draw_link(axes, corners[source], corners[target], what)
    return 2 * WIDTH + GAP


def _draw_layer(axes, x, y, width, part):
    height = 0.18
    dashed = {"linestyle": (0, (2, 2)), "alpha": 0.9}
    if part != WHOLE:
        style.box(axes, x, y, width, height, "device", edge="weight", radius=0.03, **dashed)
    if part == WHOLE:
        style.box(axes, x, y, width, height, "weight", radius=0.03)
    elif part in ("left", "right"):
        start = x if part == "left" else x + width / 2
        style.box(axes, start, y, width / 2, height, "weight", radius=0.03)


def _draw_rows(axes, middle, top, rows):
    width, height = 0.6, 0.062
    for index, shade in enumerate(rows):
        y = top - (index + 1) * (height + 0.018)
        style.box(axes, middle - width / 2, y, width, height, f"rows_{shade}", radius=0.015)


def _draw_link(axes, source, target, what):
    (x, y), (x_to, y_to) = source, target
    if what == "sum" and x == x_to:  # One above the other.
        at = x + (0.22 if x_to == source[0] else 0)
        style.arrow(axes, (at, y), (at, y_to + HEIGHT), ink="sum", style="<|-|>", width=1.6)
    elif what == "sum":
        style.arrow(
            axes, (x + WIDTH, y + HEIGHT / 2), (x_to, y + HEIGHT / 2), ink="sum", style="<|-|>",
            width=1.6,
        )  # fmt: skip
        style.text(axes, (x + WIDTH + x_to) / 2, y + HEIGHT / 2 + 0.16, "Σ", ink="sum", size=11)
    else:
        high, low = y + HEIGHT / 2 + 0.13, y + HEIGHT / 2 - 0.13
        style.arrow(axes, (x + WIDTH, high), (x_to, high), ink="forward", width=1.6)
        style.arrow(axes, (x_to, low), (x + WIDTH, low), ink="backward", width=1.6)


def _draw_step(axes, form, left, top, width):
    """Draws the timeline, a row a device."""
    span = max(block.end for block in form.blocks)
    scale, height, pitch = width / span, 0.42, 0.56
    devices = len(form.holds)
    for device in range(devices):
        y = top - device * pitch - height
        style.box(axes, left, y, width, height, "device", radius=0.04)
        style.text(axes, left - 0.1, y + height / 2, f"{device}", ink="muted", size=9, ha="right")
    for block in form.blocks:
        y = top - block.last * pitch - height
        tall = height + (block.last - block.first) * pitch
        x = left + block.begin * scale
        style.box(
            axes, x + 0.012, y, (block.end - block.begin) * scale - 0.024, tall, block.kind,
            radius=0.04,
        )  # fmt: skip
        if block.rows is not None:
            length = (block.end - block.begin) * scale
            style.box(axes, x + 0.07, y + 0.05, length - 0.14, 0.06, f"rows_{block.rows}",
                      radius=0.015)  # fmt: skip
        ink = "on_backward" if block.kind == "backward" else "on_forward"
        raised = 0.0 if block.rows is None else 0.04
        style.text(axes, x + (block.end - block.begin) * scale / 2, y + tall / 2 + raised,
                   block.label, ink=ink, size=9)  # fmt: skip
    bottom = top - (devices - 1) * pitch - height - 0.2
    style.arrow(axes, (left, bottom), (left + width, bottom), ink="muted", width=0.9)
    style.text(axes, left + width, bottom - 0.16, "time", ink="muted", size=9, ha="right")
    x = left
    for kind, label in (
        ("forward", "forward"), ("backward", "backward"), ("sum", "sum"), ("update", "update"),
    ):  # fmt: skip
        if any(block.kind == kind for block in form.blocks):
            style.box(axes, x, bottom - 0.22, 0.14, 0.12, kind, radius=0.02)
            style.text(axes, x + 0.2, bottom - 0.16, label, ink="muted", size=9, ha="left")
            x += 0.32 + 0.085 * len(label)


def draw(form: Form, folder: pathlib.Path) -> None:
    """Writes a form's picture."""
    rows = -(-len(form.holds) // 2)
    height = 1.05 + rows * (HEIGHT + UP) - 0.12
    made, axes = style.canvas(9.4, height)
    style.text(axes, 0.3, height - 0.32, form.title, size=13, ha="left", weight="bold")
    style.text(axes, 0.3, height - 0.62, form.caption, ink="muted", size=9.5, ha="left")
    bottom = height - 0.88 - HEIGHT
    width = _draw_devices(axes, form, 0.35, bottom)
    style.text(axes, 0.35 + width / 2, 0.14, form.legend, ink="muted", size=8.5)
    top = height - 1.2 if rows == 1 else height - 1.6
    _draw_step(axes, form, 4.2, top, 4.85)
    style.save(made, form.name, f"{form.title}: one step", folder)


def draw_all(forms: list[Form], folder: pathlib.Path) -> None:
    """Writes the picture of all forms, side by side."""
    small = 0.62
    panel = 2 * WIDTH + GAP
    pitch = panel + 0.75
    height = 2 * (HEIGHT + UP) + 1.1
    made, axes = style.canvas(pitch * len(forms) * small, height * small)
    axes.set(xlim=(0, pitch * len(forms)), ylim=(0, height))
    for index, form in enumerate(forms):
        left = index * pitch + 0.375
        rows = -(-len(form.holds) // 2)
        bottom = height - 0.75 - HEIGHT - (0.5 * (HEIGHT + UP) - 0.2 if rows == 1 else 0)
        _draw_devices(axes, form, left, bottom)
        middle = left + panel / 2
        title = form.title.partition(":")[0]
        style.text(axes, middle, height - 0.35, title, size=13, weight="bold")
        style.text(axes, middle, 0.42, form.short, ink="muted", size=10.5, linespacing=1.3)
        if index:
            axes.plot([index * pitch] * 2, [0.3, height - 0.3], color=style.colour("edge"), lw=0.8)
    style.save(made, "parallelism", "Five ways to train one model on several devices", folder)


def main(folder: pathlib.Path = style.FOLDER) -> None:
    """Writes a picture for each form, and one of all."""
    forms = [make() for make in FORMS]
    for form in forms:
        draw(form, folder)
    draw_all(forms, folder)


if __name__ == "__main__":
    main()
