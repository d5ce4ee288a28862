"""One look for all pictures: an SVG on a card of its own, for light pages and for dark ones.

Colours are CSS variables, which a reader's browser sets by the scheme that the reader prefers; the
card changes with them, so a picture stays readable on any page. Text is text, in the reader's font.
"""

import io
import pathlib
import re

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FOLDER = pathlib.Path(__file__).parent
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

# Name -> in the light, in the dark. Told apart by readers who see no red or green, too.
COLOURS = {
    "card": ("#fcfcfa", "#1f232b"),
    "edge": ("#dfe1e6", "#3a404c"),
    "ink": ("#22262e", "#eceff4"),
    "muted": ("#646b78", "#a9b1bf"),
    "device": ("#f0f2f5", "#2a303a"),
    "weight": ("#c9d0dc", "#4a5364"),
    "forward": ("#3f78b8", "#6fa3dc"),
    "backward": ("#e8963a", "#f0ac5c"),
    "sum": ("#1f9480", "#45bda8"),
    "update": ("#8b5fb0", "#b58cd8"),
    "other": ("#9aa3b1", "#7d8796"),
    "on_forward": ("#ffffff", "#10151c"),
    "on_backward": ("#2a1b08", "#1c1206"),
    "rows_0": ("#c2477f", "#e07fae"),
    "rows_1": ("#d9a400", "#f0c84b"),
    "rows_2": ("#6a9f2b", "#9bcb62"),
    "rows_3": ("#5d5fbf", "#9496ee"),
}

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "tfparallel",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.linewidth": 0.8,
    }
)


def colour(name: str) -> str:
    """The colour that stands for a name until the picture is written."""
    return COLOURS[name][0]


def figure(width: float, height: float, **options) -> Figure:
    """A figure of `width` × `height` inches without a background."""
    made = Figure(figsize=(width, height), **options)
    FigureCanvasSVG(made)
    made.patch.set_visible(False)
    return made


def canvas(width: float, height: float):
    """A figure whose one axes count in inches from its lower left corner, and shows none."""
    made = figure(width, height)
    axes = made.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return made, axes


def plain_axes(axes, grid: str = "y") -> None:
    """Gives the axes of a plot the house's look."""
    axes.patch.set_visible(False)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(colour("edge"))
    axes.tick_params(colors=colour("muted"), labelsize=9, length=0)
    axes.xaxis.label.set_color(colour("muted"))
    axes.yaxis.label.set_color(colour("muted"))
    if grid:
        axes.grid(True, axis=grid, which="major", color=colour("edge"), linewidth=0.7)
    axes.set_axisbelow(True)


def legend(of, *arguments, **options) -> None:
    """A legend without a frame, in the colour of the text."""
    of.legend(*arguments, frameon=False, labelcolor=colour("ink"), fontsize=9, **options)


def box(axes, x, y, width, height, fill, *, edge=None, radius=0.06, linewidth=0.9, **more):
    """Draws a box with round corners."""
    axes.add_patch(
        FancyBboxPatch(
            (x + radius, y + radius), width - 2 * radius, height - 2 * radius,
            boxstyle=f"round,pad={radius},rounding_size={radius}",
            facecolor=colour(fill), edgecolor=colour(edge or fill), linewidth=linewidth, **more,
        )
    )  # fmt: skip


def text(axes, x, y, words, *, ink="ink", size=10, ha="center", va="center", **more):
    """Writes words."""
    axes.text(x, y, words, color=colour(ink), fontsize=size, ha=ha, va=va, **more)


def arrow(axes, start, end, *, ink="ink", bend=0.0, style="-|>", width=1.3, **more):
    """Draws an arrow."""
    axes.annotate(
        "", xy=end, xytext=start,
        arrowprops={
            "arrowstyle": style, "color": colour(ink), "linewidth": width, "shrinkA": 0,
            "shrinkB": 0, "mutation_scale": 11, "connectionstyle": f"arc3,rad={bend}", **more,
        },
    )  # fmt: skip


def save(made: Figure, name: str, title: str, folder: pathlib.Path = FOLDER) -> None:
    """Writes `name`.svg on its card.

    Args:
        made: The figure.
        name: Of the file.
        title: What a screen reader says.
        folder: Where the file goes.
    """
    written = io.StringIO()
    made.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    for key, (light, _) in COLOURS.items():
        svg = re.sub(
            rf"\b(fill|stroke): {light}", rf"\1: {light}; \1: var(--{key})", svg, flags=re.I
        )
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", FONT.replace('"', "'"), svg)
    light, dark = (
        "".join(f"--{key}: {pair[index]}; " for key, pair in COLOURS.items()) for index in (0, 1)
    )
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    head = (
        f"<title>{title}</title>\n<style>:root {{ {light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}</style>\n"
        f'<rect x="0.5" y="0.5" width="{float(size[1]) - 1:g}" height="{float(size[2]) - 1:g}" '
        f'rx="10" style="fill: {colour("card")}; fill: var(--card); '
        f'stroke: {colour("edge")}; stroke: var(--edge)"/>\n'
    )
    end = svg.index(">", svg.index("<svg")) + 1
    svg = svg[:end] + "\n" + head + svg[end:].lstrip()
    lines = [line.rstrip() for line in svg.splitlines()]
    (folder / f"{name}.svg").write_text("\n".join(lines) + "\n")
