"""`tfparallel check`, run as users run it. It must be able to fail."""

import json
import re

import pytest

from tests.commands.command_line import TASKS, tfparallel
from tfparallel.diagnostics.check import CheckReport, ValueReport, VariableReport
from tfparallel.diagnostics.floor import StepReport

pytestmark = pytest.mark.slow

FORM = ("--parallel=data", "--num_devices=3", "--device_type=cpu", "--global_batch_size=20")


def test_an_exact_form_passes_in_float64(tmp_path):
    path = tmp_path / "report.json"
    code, shown, errors = tfparallel(
        "check", TASKS / "blobs.py", *FORM, "--precision=float64", f"--report={path}"
    )
    assert code == 0, shown + errors
    assert re.search("OK: match: 1[2-5] digits", shown)
    assert "computed in float64, tolerance 1e-09" in shown
    assert "20 batches of 20, 2 of them shorter" in shown
    report = json.loads(path.read_text())
    assert report["verdict"] == "match" and report["first_difference"] is None
    assert max(item["relative"] for item in report["variables"]) < 1e-9
    assert min(item["digits"] for item in report["variables"]) >= 9 <= report["digits"][1]
    assert report["devices"] == ["CPU:0", "CPU:1", "CPU:2"]


def test_one_device_divides_nothing(tmp_path):
    path = tmp_path / "report.json"
    code, shown, errors = tfparallel(
        *("check", TASKS / "blobs.py", "--parallel=data", "--num_devices=1"),
        *("--device_type=cpu", "--steps=2", f"--report={path}"),
    )
    assert code == 0, shown + errors
    note = "nothing is divided: add --num_devices=2 --device_type=cpu."
    assert note in shown and note in json.loads(path.read_text())["notes"][-1]
    assert "retracing" not in errors


def test_what_xla_compiles_is_exact():
    code, shown, errors = tfparallel(
        *("check", TASKS / "blobs.py", *FORM, "--steps=3", "--precision=float64"),
        "--jit_compile",
    )
    assert code == 0, shown + errors
    assert "OK: match" in shown


def test_half_precision_may_be_wrong_by_what_it_is_wrong_by_on_one_device():
    """TensorFlow adds up the gradient of a bias in bfloat16: as one piece it loses a tenth."""
    code, shown, errors = tfparallel(
        *("check", TASKS.parents[1] / "models/transformer.py", "--parallel=data"),
        *("--num_devices=2", "--device_type=cpu", "--precision=mixed_bfloat16", "--steps=2"),
        "--global_batch_size=16",
    )
    assert code == 0, shown + errors
    assert "computed in bfloat16" in shown


def test_layers_on_devices_are_exact_in_float64():
    code, shown, errors = tfparallel(
        *("check", TASKS.parents[1] / "models/mlp.py", "--parallel=model", "--num_devices=2"),
        *("--device_type=cpu", "--precision=float64", "--steps=5"),
    )
    assert code == 0, shown + errors
    assert "layers on 2 devices (CPU:0, CPU:1)" in shown and "OK: match" in shown


@pytest.mark.parametrize(
    "task, layer", [("replica_id", "replica_scale"), ("comparing_loss", "spread")]
)
def test_a_layer_that_mixes_examples_is_refused_by_name(task, layer):
    code, _, errors = tfparallel("check", TASKS / f"{task}.py", *FORM, "--steps=5")
    assert code == 1
    assert "A layer mixes examples" in errors and f"layer '{layer}' of class" in errors


def test_random_layers_are_named():
    code, shown, errors = tfparallel("check", TASKS / "dropout.py", *FORM, "--steps=5")
    assert code == 0, shown + errors
    assert "random layers: drop, noise" in shown
    # Exact, where the form draws by the example's global index.
    assert "OK: reproducible" in shown or "OK: match" in shown


def test_variables_without_a_gradient_do_not_fail():
    code, shown, errors = tfparallel("check", TASKS / "no_gradient.py", *FORM)
    assert code == 0, shown + errors
    assert "OK: match" in shown


def test_a_network_whose_rounding_jumps_passes(tmp_path):
    """In float32 some of its variables end beyond the tolerance: what a ReLU makes of a bit."""
    plot, report = tmp_path / "curves.png", tmp_path / "report.json"
    code, shown, errors = tfparallel(
        *("check", TASKS.parents[1] / "models/digits_cnn.py", "--parallel=data"),
        *("--num_devices=2", "--device_type=cpu", "--global_batch_size=100", "--steps=30"),
        *("--seed=7", f"--plot={plot}", f"--report={report}"),
    )
    assert code == 0, shown + errors
    assert re.search(r"OK: match: 6 digits .*\(26 match\)", shown) and f"wrote {plot}" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(report.read_text())
    assert [step["step"] for step in written["steps"]] == [1, 2, 4, 8, 16, 30]
    assert written["steps"][0]["floor"] < 1e-5 and written["sharp_until"] >= 4


def test_the_tables_line_up():
    report = CheckReport(
        verdict="differs",
        dtype="float32",
        tolerance=1e-4,
        batch_sizes=(4, 4, 2),
        steps=(
            StepReport(1, 2e-8, 1e-8, 2e-7, 1e-7, 2, 2),
            StepReport(3, 1.0, 0.5, 2e-3, 1e-3, 0, 2),
        ),
        sharp_until=1,
        growth=10.04,
        variables=(
            VariableReport("dense/kernel", (4, 8), 1e-8, 2e-8, 1e-7, "match", digits=6),
            VariableReport("b", (8,), 0.5, 1.0, 1e-3, "differs", first_step=3),
        ),
        values=(ValueReport("fit: loss", 1.0, 1.5, "differs", first_step=3),),
        random_layers=("drop",),
        first_difference="layer 'dense'",
        notes=("a note",),
    )
    lines = str(report).splitlines()
    assert lines[1:5] == [
        "variable       shape  largest abs  largest rel    floor  verdict",
        "------------  ------  -----------  -----------  -------  -------------------",
        "dense/kernel  (4, 8)      1.0e-08      2.0e-08  1.0e-07  match: 6 digits",
        "b               (8,)      5.0e-01      1.0e+00  1.0e-03  differs from step 3",
    ]
    assert lines[10:14] == [
        "step  median diff  largest diff  median floor  largest floor  sharp",
        "----  -----------  ------------  ------------  -------------  --------------",
        "1         1.0e-08       2.0e-08       1.0e-07        2.0e-07  2 of 2 weights",
        "3         5.0e-01       1.0e+00       1.0e-03        2.0e-03  0 of 2 weights",
    ]
    assert lines[-7:] == [
        "computed in float32, tolerance 1e-04 relative to the largest magnitude in a variable; "
        "3 batches of 4, 1 of them shorter",
        "the comparison is sharp up to step 1 of 3; after that, rounding alone moves "
        "most weights by more than the tolerance",
        "this model amplifies rounding error by a factor of 10 per step",
        "random layers: drop",
        "note: a note",
        "first difference: layer 'dense'",
        "FAILED: differs (1 match, 1 differs)",
    ]
