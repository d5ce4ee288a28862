"""Trains four task files, each on two devices, and draws what they predict: `applications.png`.

    .venv/bin/python docs/pictures/applications.py

Takes some minutes; `make pictures` leaves it out.
"""

import importlib
import pathlib
import sys

import keras
import numpy as np
import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import tfparallel
from tfparallel.task import load_task

MODELS = pathlib.Path(__file__).parents[2] / "models"
BUILDERS = {
    "segmentation": (tfparallel.model_parallel, 8),
    "detection": (tfparallel.model_parallel, 64),
    "time_series": (tfparallel.data_parallel, 64),
    "burgers": (tfparallel.data_parallel, 64),
}
SLICE, PICTURES = 20, (3, 12)
TIMES = (0.0, 0.25, 0.5, 1.0)


def main(folder: pathlib.Path = style.FOLDER) -> None:
    """Trains the models, and draws all into one picture."""
    devices = tfparallel.devices.split_cpu(2)
    sys.path.insert(0, str(MODELS))
    picture = Figure(figsize=(9.4, 4.6), facecolor=style.colour("card"))
    FigureCanvasAgg(picture)
    top, bottom = picture.subfigures(2, 1, height_ratios=(1, 1.15))
    for each in (top, bottom):
        each.patch.set_visible(False)
    images = top.subplots(1, 5)
    top.subplots_adjust(left=0.02, right=0.98, bottom=0.0, top=0.9, wspace=0.06)
    plots = bottom.subplots(1, 2)
    bottom.subplots_adjust(left=0.06, right=0.98, bottom=0.18, top=0.97, wspace=0.17)
    draw_brain(images[:3], *trained("segmentation", devices))
    draw_detection(images[3:], *trained("detection", devices))
    draw_sunspots(plots[0], *trained("time_series", devices))
    draw_burgers(plots[1], *trained("burgers", devices))
    picture.savefig(folder / "applications.png", dpi=144, facecolor=style.colour("card"))


def trained(name, devices):
    """Returns a task's module, its model after training, and its validation data."""
    keras.utils.set_random_seed(7)
    task = load_task(str(MODELS / f"{name}.py"))
    builder, batch_size = BUILDERS[name]
    model = builder(task.build_model, devices=devices)
    with model.distribute_strategy.scope():
        task.compile_model(model)
    (x, y), validation = task.load_data()
    model.fit(x, y, batch_size=batch_size, epochs=task.epochs, verbose=2)
    return importlib.import_module(name), model, validation


def draw_brain(axes, task, model, validation):
    """A slice, what the model sees in it, and the truth."""
    slices, tissues = (part[SLICE : SLICE + 1] for part in validation)
    predicted = model.predict(slices, verbose=0).argmax(axis=-1)
    named = ListedColormap([style.colour(name) for name in ("card", "other", "forward")])
    axes[0].imshow(slices[0, ..., 0], cmap="gray", vmax=1)
    axes[1].imshow(predicted[0], cmap=named)
    axes[2].imshow(tissues[0], cmap=named)
    titles = ("a slice of a brain", "gray, white matter", "truth")
    for each, title in zip(axes, titles, strict=True):
        title_of(each, title)


def draw_detection(axes, task, model, validation):
    """Pictures with the two digits that the model is surest of, boxed and named."""
    for each, index in zip(axes, PICTURES, strict=True):
        picture = validation[0][index : index + 1]
        outputs = model.predict(picture, verbose=0)
        digits, boxes = task.strongest(
            outputs[..., : task.NUM_CLASSES], outputs[..., task.NUM_CLASSES :]
        )
        each.imshow(picture[0])
        for digit, box in zip(np.array(digits)[0], task.CELL * np.array(boxes)[0], strict=True):
            line = {"edgecolor": style.colour("backward"), "fill": False, "linewidth": 1.8}
            each.add_patch(Rectangle(box[:2], *(box[2:] - box[:2]), **line))
            each.text(*box[:2], str(digit), color=style.colour("backward"), va="bottom")
        title_of(each, "digits, boxed")


def draw_sunspots(axes, task, model, validation):
    """The year after each window, and what it was."""
    past, future = validation
    axes.plot(future[:, 0], color=style.colour("other"), label="observed")
    predicted = model.predict(past, verbose=0)[:, 0]
    axes.plot(predicted, color=style.colour("forward"), label="forecast a year before")
    axes.set(xlabel="years after 1920", ylabel="sunspots, hundreds", ylim=(0, 2.4))
    finish(axes)


def draw_burgers(axes, task, model, validation):
    """The solution at some times, and the exact one below it."""
    x = np.linspace(-1, 1, 101)
    for time, name in zip(TIMES, ("muted", "sum", "backward", "update"), strict=True):
        axes.plot(x, task.exact(x, 0 * x + time), color=style.colour("edge"), linewidth=5)
        points = np.stack([x, 0 * x + time], axis=1).astype("float32")
        u = model.predict(points, verbose=0)["u"]
        axes.plot(x, u[:, 0], color=style.colour(name), label=f"t = {time:g}")
    axes.set(xlabel="x; the exact solution is the broad line", ylabel="u")
    finish(axes)


def finish(axes):
    """Gives a plot the look of the others, and a legend."""
    style.plain_axes(axes)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def title_of(axes, text):
    """Gives an image a title, and no axes."""
    axes.set_title(text, fontsize=9, color=style.colour("ink"))
    axes.axis("off")


if __name__ == "__main__":
    main()
