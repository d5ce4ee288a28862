"""The packages of tfparallel, floor by floor: each imports from the floors below it alone.

The floors are read from `tests/test_layers_of_imports.py`, which holds the source to them.
"""

import ast
import pathlib

import style

TOP = pathlib.Path(__file__).parents[2]
HEAVY = {"tensorflow", "keras"}


def floors() -> list[list[str]]:
    """The literal ROWS of the test, from the ground up, without the modules' dunders."""
    tree = ast.parse((TOP / "tests" / "test_layers_of_imports.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "ROWS":
            rows = ast.literal_eval(node.value)
            return [kept for row in rows if (kept := [n for n in row if n[0] != "_"])]
    raise ValueError("tests/test_layers_of_imports.py must have the list ROWS.")


def is_plain(name: str) -> bool:
    """Whether no module of a package imports TensorFlow or Keras."""
    place = TOP / "tfparallel" / name
    paths = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    return not any(_imports(ast.parse(path.read_text())) & HEAVY for path in paths)


def _imports(tree) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Attribute) and node.attr == "import_tensorflow":
            names.add("tensorflow")  # `startup` does it without its chatter.
    return names


def main(folder: pathlib.Path = style.FOLDER) -> None:
    """Draws the house."""
    rows = floors()
    pitch, height, left, width = 0.37, 0.29, 0.95, 8.1
    total = 1.15 + pitch * len(rows) + 0.35
    made, axes = style.canvas(9.4, total)
    style.text(axes, 0.3, total - 0.32, "The packages, floor by floor", size=13, ha="left",
               weight="bold")  # fmt: skip
    style.text(axes, 0.3, total - 0.62, "A package imports from the floors below its own. A test "
               "reads every import, and fails where one leads up.", ink="muted", size=9.5,
               ha="left")  # fmt: skip
    for floor, names in enumerate(rows):
        y = 0.55 + pitch * floor
        room = width / len(names)
        for index, name in enumerate(names):
            plain = is_plain(name)
            x = left + index * room
            style.box(axes, x + 0.03, y, room - 0.06, height, "sum" if plain else "device",
                      edge="sum" if plain else "weight", radius=0.05)  # fmt: skip
            ink = "on_forward" if plain else "ink"
            style.text(axes, x + room / 2, y + height / 2, name, ink=ink, size=9)
    bottom, top = 0.55, 0.55 + pitch * len(rows) - 0.08
    style.arrow(axes, (0.6, top), (0.6, bottom), ink="muted")
    axes.text(0.42, (bottom + top) / 2, "imports", rotation=90, ha="center", va="center",
              fontsize=9, color=style.colour("muted"))  # fmt: skip
    style.box(axes, left + 0.03, 0.2, 0.14, 0.12, "sum", radius=0.02)
    style.text(axes, left + 0.24, 0.26, "no module of it imports TensorFlow or Keras", ink="muted",
               size=9, ha="left")  # fmt: skip
    style.save(made, "house", "The packages of tfparallel by their imports", folder)


if __name__ == "__main__":
    main()
