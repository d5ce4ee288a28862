"""Every notebook in `colab/` runs from top to bottom, and is stored without outputs."""

import pathlib

import nbclient
import nbformat
import pytest

TOP = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((TOP / "colab").glob("*.ipynb"))
DEADLINE_SECONDS = 400  # For each cell, the start of TensorFlow included.


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_a_notebook():
    assert [path.stem for path in NOTEBOOKS] == [
        "all_reduce",
        "data_parallel",
        "hybrid",
        "model_parallel",
        "multi_worker",
        "pipeline",
        "synchronization",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert code_cells(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_starts_with_a_title_and_the_button(path):
    first = read(path).cells[0].source
    assert first.startswith("# ")
    assert f"/blob/main/colab/{path.name})" in first
    assert "What you will learn" in first


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_installs_on_colab_alone(path):
    for cell in code_cells(read(path)):
        lines = cell.source.splitlines()
        for number, line in enumerate(lines):
            if "pip install" in line:
                assert line.startswith("    %pip install")
                assert lines[number - 1] == 'if "google.colab" in sys.modules:'


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook,
        timeout=DEADLINE_SECONDS,
        startup_timeout=DEADLINE_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()  # A cell that raises, and these assert what they show, raises here.
    assert all(cell.execution_count for cell in code_cells(notebook))
    printed = "".join(
        output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs
    )
    assert "largest difference from one device" in printed
    if path.stem == "multi_worker":
        # Both workers' output, in the cell that started them.
        assert "[0] Epoch 3/3" in printed and "[1] process " in printed
