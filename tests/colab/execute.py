"""Executes the notebooks of `colab/` and stores them with their outputs.

    python -m tests.colab.execute                  all (`make notebooks`)
    python -m tests.colab.execute data_parallel    one
    python -m tests.colab.execute --check          stores nothing; compares with what is stored

What differs from run to run, such as time stamps, is left out of what is stored.
"""

import base64
import io
import itertools
import os
import pathlib
import re
import sys

import nbclient
import nbformat
import PIL.Image

from tests.named import parse_names

TOP = pathlib.Path(__file__).resolve().parents[2]
FOLDER = TOP / "colab"
DEADLINE_SECONDS = 400  # For each cell, the start of TensorFlow included.
MOST_PICTURE_BYTES = 60_000

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "29/29 - 1s - 40ms/step - accuracy: 0.9" of `fit(verbose=2)`.
_STEP_TIMES = re.compile(r"(\d+/\d+ - )\d+m?s - \d+[mµu]?s/\w+ - ")
_CHATTER = re.compile(
    r"^[IWEF]\d{4} \d\d:|^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|^(INFO|WARNING):|oneDNN|absl::|cuda",
    re.M | re.I,
)
_MACHINE_PATHS = re.compile(
    r"(?<![\w:.])/(?!job:|replica:|device:)[\w.-]+/[\w.-]|site-packages|\\Users\\"
)
# What tfparallel itself says, once: "data_parallel: 2 replicas on CPU:0, CPU:1; …".
_NOTICES = re.compile(r"((\[\d+\] )?(\w+_parallel|all-reduce): .*\n)*")


def read(path: pathlib.Path) -> nbformat.NotebookNode:
    """A notebook as it is stored."""
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list:
    """The cells that a kernel executes."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(path: pathlib.Path) -> nbformat.NotebookNode:
    """Executes a notebook in a kernel of this Python, and cleans it.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises; the cells assert what they show.
    """
    # The kernel, and what it starts, use this checkout and not what is installed.
    places = [str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])]
    small_pools = {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2"}
    os.environ |= small_pools | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook,
        timeout=DEADLINE_SECONDS,
        startup_timeout=DEADLINE_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    clean(notebook)
    return notebook


def clean(notebook: nbformat.NotebookNode) -> None:
    """Leaves out what another run would store otherwise, although nothing has changed."""
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            output.get("metadata", {}).pop("needs_background", None)
        # How streams are cut up and mixed depends on the time: of each run of them stderr, where
        # tfparallel says what it does, comes first, and then stdout.
        joined = []
        for has_text, run in itertools.groupby(cell.outputs, lambda output: "text" in output):
            for output in sorted(run, key=lambda output: output["name"]) if has_text else run:
                if has_text and joined and joined[-1].get("name") == output["name"]:
                    joined[-1]["text"] += output["text"]
                else:
                    joined.append(output)
        for output in joined:
            if "text" in output:
                text = _ESCAPES.sub("", output["text"])
                output["text"] = _STEP_TIMES.sub(r"\1", text)
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = in_few_colours(output["data"]["image/png"])
        cell.outputs = joined


def in_few_colours(picture: str) -> str:
    """A picture of at most 256 colours, which is a third as large; in base64, as given."""
    image = PIL.Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode == "P":
        return picture
    written = io.BytesIO()
    image.convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE).save(
        written, format="png", optimize=True
    )
    return base64.b64encode(written.getvalue()).decode()


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What sort of outputs each code cell has: a stream's name, or the types of what is shown."""
    return [
        [
            output.get("name") or " ".join([output.output_type, *sorted(output.get("data", {}))])
            for output in cell.outputs
        ]
        for cell in code_cells(notebook)
    ]


def problems(notebook: nbformat.NotebookNode) -> list[str]:
    """What must not be stored, a line each."""
    lines = []
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        lines.append(f"cells must be executed once, from top to bottom. Received: {counts}")
    if not any("image/" in kind for cell in kinds(notebook) for kind in cell):
        lines.append("there is no picture")
    for cell in cells:
        for output in cell.outputs:
            where = f"cell {cell.execution_count}: "
            if output.output_type == "error":
                lines.append(f"{where}{output.ename}: {output.evalue}")
            if output.get("name") == "stderr" and not _NOTICES.fullmatch(output.text):
                lines.append(f"{where}stderr: {output.text[:200]!r}")
            data = output.get("data", {})
            text = output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
            for what, pattern in (("chatter", _CHATTER), ("a path", _MACHINE_PATHS)):
                if match := pattern.search(text):
                    around = text[max(match.start() - 40, 0) : match.end() + 40]
                    lines.append(f"{where}{what}: {around!r}")
            if "image/png" in data:
                size = len(base64.b64decode(data["image/png"]))
                if size > MOST_PICTURE_BYTES:
                    lines.append(
                        f"{where}a picture must have at most {MOST_PICTURE_BYTES} bytes. "
                        f"Received: {size}"
                    )
    return lines


def main() -> int:
    """Executes the notebooks that are named; returns how many have problems."""
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    args = parse_names(__doc__, "notebook", names, "--check", "stores nothing")
    failed = 0
    for name in args.names:
        path = FOLDER / f"{name}.ipynb"
        notebook = executed(path)
        lines = problems(notebook)
        if args.check and kinds(notebook) != kinds(read(path)):
            lines.append(f"kinds of outputs: {kinds(notebook)}; stored: {kinds(read(path))}")
        if not args.check:
            nbformat.write(notebook, path)
        print(f"{name}: {'; '.join(lines) or 'ok'}", flush=True)
        failed += bool(lines)
    return failed


if __name__ == "__main__":
    sys.exit(main())
