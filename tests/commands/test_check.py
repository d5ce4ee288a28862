"""`tfparallel check`, run as users run it. It must be able to fail."""

import json

import pytest

from tests.commands.command_line import TASKS, tfparallel
from tfparallel.commands.checking import to_text
from tfparallel.diagnostics.check import CheckReport, ValueReport, VariableReport

pytestmark = pytest.mark.slow

FORM = ("--parallel=data", "--num_devices=3", "--device_type=cpu", "--global_batch_size=20")


def test_an_exact_form_passes_in_float64(tmp_path):
    path = tmp_path / "report.json"
    code, shown, errors = tfparallel(
        "check", TASKS / "blobs.py", *FORM, "--dtype=float64", f"--report={path}"
    )
    assert code == 0, shown + errors
    assert "OK: exact" in shown and "computed in float64, tolerance 1e-09" in shown
    assert "20 batches of 20, 1 of them shorter" in shown
    report = json.loads(path.read_text())
    assert report["verdict"] == "exact" and report["first_difference"] is None
    assert max(item["relative"] for item in report["variables"]) < 1e-9
    assert report["devices"] == ["CPU:0", "CPU:1", "CPU:2"]


def test_layers_on_devices_are_exact_in_float64():
    code, shown, errors = tfparallel(
        *("check", TASKS.parents[1] / "models/mlp.py", "--parallel=model", "--num_devices=2"),
        *("--device_type=cpu", "--dtype=float64", "--steps=5"),
    )
    assert code == 0, shown + errors
    assert "layers on 2 devices (CPU:0, CPU:1)" in shown and "OK: exact" in shown


@pytest.mark.parametrize(
    "task, layer", [("replica_id", "replica_scale"), ("comparing_loss", "spread")]
)
def test_a_form_that_cannot_be_exact_fails_and_names_the_layer(task, layer):
    code, shown, _ = tfparallel("check", TASKS / f"{task}.py", *FORM, "--steps=5")
    assert code == 1
    assert f"first difference: layer '{layer}'" in shown and "FAILED: differs" in shown


def test_random_layers_are_named():
    code, shown, errors = tfparallel("check", TASKS / "dropout.py", *FORM, "--steps=5")
    assert code == 0, shown + errors
    assert "random layers: drop, noise" in shown
    # Exact, where the form draws by the example's global index.
    assert "OK: reproducible" in shown or "OK: exact" in shown


def test_variables_without_a_gradient_do_not_fail():
    code, shown, errors = tfparallel("check", TASKS / "no_gradient.py", *FORM)
    assert code == 0, shown + errors
    assert "OK: exact" in shown


def test_the_tables_line_up():
    report = CheckReport(
        verdict="differs",
        dtype="float32",
        tolerance=1e-4,
        batch_sizes=(4, 4, 2),
        variables=(
            VariableReport("dense/kernel", (4, 8), 1e-8, 2e-8, "exact"),
            VariableReport("b", (8,), 0.5, 1.0, "differs"),
        ),
        values=(ValueReport("fit: loss", 1.0, 1.5, "differs"),),
        random_layers=("drop",),
        first_difference="layer 'dense'",
        notes=("a note",),
    )
    lines = to_text(report).splitlines()
    assert lines[1:5] == [
        "variable       shape  largest abs  largest rel  verdict",
        "------------  ------  -----------  -----------  -------",
        "dense/kernel  (4, 8)      1.0e-08      2.0e-08  exact",
        "b               (8,)      5.0e-01      1.0e+00  differs",
    ]
    assert lines[-4:] == [
        "random layers: drop",
        "note: a note",
        "first difference: layer 'dense'",
        "FAILED: differs (1 exact, 1 differs)",
    ]
