"""Every notebook in `colab/` runs from top to bottom, and is stored as it ran."""

import base64
import copy
import io
import re

import nbformat
import numpy as np
import PIL.Image
import pytest

from tests.colab import execute

NOTEBOOKS = sorted(execute.FOLDER.glob("*.ipynb"))
INSTALL = "%pip install --quiet --no-deps git+https://github.com/tfparallel/tfparallel"

of_each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_is_a_notebook():
    assert [path.stem for path in NOTEBOOKS] == [
        "all_reduce",
        "data_parallel",
        "hybrid",
        "large_models",
        "model_parallel",
        "multi_worker",
        "pipeline",
        "synchronization",
    ]


@of_each
def test_it_is_stored_with_outputs_that_are_fit_to_be_read(path):
    notebook = execute.read(path)
    nbformat.validate(notebook)
    assert execute.problems(notebook) == []
    cleaned = copy.deepcopy(notebook)
    execute.clean(cleaned)
    assert cleaned == notebook, "stored by another program; run `make notebooks`"


@of_each
def test_it_starts_with_a_title_and_the_button(path):
    first = execute.read(path).cells[0].source
    assert first.startswith("# ")
    assert f"/blob/main/colab/{path.name})" in first
    assert "What you will learn" in first


@of_each
def test_the_button_stands_in_the_readme(path):
    readme = (execute.TOP / "README.md").read_text()
    assert f"/blob/main/colab/{path.name})" in readme


@of_each
def test_it_installs_on_colab_alone_and_nothing_that_colab_has(path):
    above, *_ = (cell for cell in execute.read(path).cells if "Colab's own" in cell.source)
    assert "TensorFlow 2.19 to 2.21 and Keras 3.10 to 3.15" in above.source
    cells = execute.code_cells(execute.read(path))
    assert cells[0].source == f'import sys\n\nif "google.colab" in sys.modules:\n    {INSTALL}'
    assert all("pip install" not in cell.source for cell in cells[1:])


@of_each
def test_it_uses_whatever_devices_there_are(path):
    source = "\n".join(cell.source for cell in execute.code_cells(execute.read(path)))
    if path.stem in ("multi_worker", "synchronization"):  # Processes cannot share a GPU.
        calls = ["set_memory_growth()", "hide_gpus()"]
    else:
        number = 4 if path.stem in ("all_reduce", "hybrid", "large_models") else 2
        calls = [f"split_gpu({number})", f"split_cpu({number})"]
    for call in calls:
        assert f"tfparallel.devices.{call}" in source


@of_each
def test_it_imports_what_there_is(path):
    source = "\n".join(cell.source for cell in execute.code_cells(execute.read(path)))
    for line in re.findall(r"^(?:from|import) tfparallel.*$", source, re.MULTILINE):
        exec(line, {})


@pytest.mark.slow
@of_each
def test_it_runs(path):
    notebook = execute.executed(path)  # The cells assert what they show.
    assert execute.problems(notebook) == []
    assert execute.kinds(notebook) == execute.kinds(execute.read(path))
    printed = "".join(
        output.get("text", "")
        for cell in execute.code_cells(notebook)
        for output in cell.outputs
    )
    assert "largest difference from one device" in printed
    if path.stem == "multi_worker":
        # Both workers' output, in the cell that started them.
        assert "[0] Epoch 3/3" in printed and "[1] replica 1 of 2" in printed


def png(size, mode):
    written = io.BytesIO()
    noise = np.random.default_rng(0).integers(256, size=(size, size, 3), dtype="uint8")
    PIL.Image.fromarray(noise).convert(mode).save(written, format="png")
    return base64.b64encode(written.getvalue()).decode()


def a_notebook():
    picture = png(8, "P")
    outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="on /job:localhost/device:CPU:0\n"),
        nbformat.v4.new_output("stream", name="stderr", text="data_parallel: 2 replicas\n"),
        nbformat.v4.new_output("display_data", data={"image/png": picture}),
    ]
    cell = nbformat.v4.new_code_cell("1", outputs=outputs, execution_count=1)
    return nbformat.v4.new_notebook(cells=[cell])


def test_what_is_fit_to_be_read_passes():
    assert execute.problems(a_notebook()) == []


@pytest.mark.parametrize(
    "text",
    [
        "INFO:tensorflow:Using MirroredStrategy",
        "2026-01-02 03:04:05.678: I tensorflow/core/util/port.cc:153] oneDNN custom operations",
        "E0000 00:00:1.2 cuda_dnn.cc:8310] Unable to register cuDNN factory",
        "saved to /tmp/a_folder/digits.keras",
        'File "/usr/lib/python3.12/ast.py"',
    ],
)
def test_chatter_and_paths_are_found(text):
    notebook = a_notebook()
    notebook.cells[0].outputs[0].text += f"{text}\n"
    assert len(execute.problems(notebook)) == 1


def test_an_error_and_a_warning_are_found():
    notebook = a_notebook()
    notebook.cells[0].outputs[1].text += "UserWarning: no\n"
    notebook.cells[0].outputs.append(
        nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    )
    lines = execute.problems(notebook)
    assert len(lines) == 2 and "UserWarning" in lines[0] and "ValueError: no" in lines[1]


def test_a_large_picture_is_found():
    notebook = a_notebook()
    notebook.cells[0].outputs[2].data["image/png"] = large = png(200, "RGB")
    (line,) = execute.problems(notebook)
    size = len(base64.b64decode(large))
    assert f"at most 60000 bytes. Received: {size}" in line
    execute.clean(notebook)  # In few colours it fits.
    assert execute.problems(notebook) == []


def test_a_notebook_that_was_not_executed_is_found():
    notebook = a_notebook()
    notebook.cells[0].execution_count, notebook.cells[0].outputs = None, []
    lines = execute.problems(notebook)
    assert len(lines) == 2 and "from top to bottom" in lines[0] and "no picture" in lines[1]


def test_what_changes_from_run_to_run_is_left_out():
    notebook = a_notebook()
    (cell,) = notebook.cells
    cell.metadata["execution"] = {"iopub.execute_input": "2026-01-02T03:04:05Z"}
    line = "29/29 - 1s - 40ms/step - loss: 0.5\n"
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text=part)
        for part in ("\x1b[1mEpoch 1/3\x1b[0m\n", line)
    ]
    execute.clean(notebook)
    (output,) = cell.outputs
    assert output.text == "Epoch 1/3\n29/29 - loss: 0.5\n"
    assert cell.metadata == {}
