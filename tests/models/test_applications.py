"""The applications in `models/`: what their data are, that they learn, and both forms of each."""

import ast
import re
import runpy

import keras
import numpy as np
import pytest

import tfparallel
from tests.models.test_models import MODELS, learned, load

HEIGHT = {"convolutions": "height"}
# Cut by shapes: timing each layer takes longer than the steps.
MICRO_BATCHES = {"num_micro_batches": 4, "balance": "memory"}
MESH = {"mesh": tfparallel.Mesh(data=2, pipeline=2), "balance": "memory"}
SEQUENCE = {"mesh": tfparallel.Mesh(sequence=2)}
FORMS = {
    "burgers": [("data", 2, {}), ("tensor", 2, {})],
    "detection": [("model", 2, {}), ("tensor", 2, HEIGHT)],
    "genomics": [("pipeline", 2, MICRO_BATCHES), ("hybrid", 4, MESH)],
    "language_model": [("tensor", 2, {}), ("data", 2, {})],
    "masked_words": [("hybrid", 2, SEQUENCE), ("data", 2, {})],
    "medical_table": [("data", 3, {}), ("hybrid", 4, MESH)],
    "molecules": [("data", 2, {}), ("tensor", 2, {})],
    "recommender": [("tensor", 2, {}), ("data", 2, {})],
    "segmentation": [("model", 2, {}), ("tensor", 2, HEIGHT)],
    "steering": [("pipeline", 2, MICRO_BATCHES), ("data", 2, {})],
    "time_series": [("data", 2, {}), ("model", 2, {})],
    "vae": [("data", 2, {})],  # Two workers are a process each: the second form is run by hand.
}
PAIRS = [
    pytest.param(name, *form, id=f"{name}-{form[0]}")
    for name, forms in FORMS.items()
    for form in forms
]


def names_in(name):
    """Everything that a task file defines."""
    return runpy.run_path(str(MODELS / f"{name}.py"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "num_devices", "options"), PAIRS)
def test_a_form_trains_to_the_weights_of_one_device(name, form, num_devices, options, in_float64):
    task = load(name)
    train, _ = task.load_data()
    report = tfparallel.check(
        task.build_model,
        task.compile_model,
        train,
        parallel=form,
        devices=[f"CPU:{index}" for index in range(num_devices)],
        global_batch_size=16,
        steps=1,  # Of 13 examples, which no number of devices divides.
        **options,
    )
    assert report.dtype == "float64", report
    verdicts = {variable.path: variable.verdict for variable in report.variables}
    # Keys move all scores of a row alike, so their bias has no gradient but rounding.
    proven = {name: verdict for name, verdict in verdicts.items() if not re.search("key", name)}
    assert set(proven.values()) == {"match"}, report
    assert report.passed, report


@pytest.mark.parametrize("name", FORMS)
def test_its_first_lines_name_its_forms(name):
    text = ast.get_docstring(ast.parse((MODELS / f"{name}.py").read_text()))
    task, empty, form, why = text.splitlines()[:4]
    assert task.endswith(".") and not empty
    assert form.startswith("Parallelism: ") and why.startswith("Why: ")
    for kind, _, _ in FORMS[name]:
        assert f"`{kind}`" in form
        assert f"tfparallel check models/{name}.py --parallel={kind}" in text
    assert f"tfparallel train models/{name}.py --parallel={FORMS[name][0][0]}" in text


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.py")))
def test_each_file_begins_with_its_task_its_form_and_the_reason(name):
    task, empty, form, why = ast.get_docstring(
        ast.parse((MODELS / f"{name}.py").read_text())
    ).splitlines()[:4]
    assert task.endswith(".") and not empty
    assert re.match(r"Parallelism: `\w+`", form) and why.startswith("Why: ")


@pytest.mark.slow
def test_a_medical_table_learns():
    reached = learned("medical_table")
    assert reached["auc"] > 0.98 and reached["balanced_accuracy"] > 0.93


@pytest.mark.slow
def test_genomics_learns():
    """A guess among six is right in 17% of the pieces, one among the frames without a stop, 59%."""
    assert learned("genomics")["accuracy"] > 0.8


@pytest.mark.slow
def test_digits_are_detected():
    assert learned("detection")["detected"] > 0.6


@pytest.mark.slow
def test_masked_words_are_filled_in():
    """The most frequent word would be right in 6% of the places."""
    assert learned("masked_words")["accuracy"] > 0.18


@pytest.mark.slow
def test_a_car_learns_to_steer():
    """Always straight ahead is wrong by 1.8 degrees."""
    assert learned("steering")["mae"] < 0.6


@pytest.mark.slow
def test_molecules_learn_energies_and_forces():
    """The median energy, or no force at all, would be wrong by as much as these are spread."""
    _, (_, labels) = load("molecules").load_data()
    reached = learned("molecules")
    for name, values in labels.items():
        spread = np.abs(values - np.median(values)).mean()
        assert reached[f"{name}_mae"] < 0.1 * spread, (name, reached, spread)


@pytest.mark.slow
def test_a_segmentation_learns():
    """The most frequent tissue of a pixel's brightness would reach 0.52."""
    assert learned("segmentation", batch_size=8)["iou"] > 0.7


@pytest.mark.slow
def test_an_equation_is_solved():
    """Before, with what the solution is at the start, the error is 0.25."""
    assert learned("burgers")["u_mae"] < 0.02


@pytest.mark.slow
def test_a_recommender_learns():
    """Popularity alone would reach 0.5."""
    assert learned("recommender", batch_size=512)["auc"] > 0.75


@pytest.mark.slow
def test_a_time_series_is_forecast():
    """Better than what was eleven years before, a cycle of the sun."""
    _, (past, future) = load("time_series").load_data()
    cycle_before = np.abs(past[:, -11:-8, 0] - future).mean()
    assert learned("time_series")["mae"] < 0.9 * cycle_before


@pytest.mark.slow
def test_a_vae_learns():
    untrained = load("vae").build_model()
    load("vae").compile_model(untrained)
    _, validation = load("vae").load_data()
    start = untrained.evaluate(*validation, verbose=0, return_dict=True)["loss"]
    assert learned("vae")["loss"] < 0.7 * start


@pytest.mark.slow
def test_a_language_model_learns():
    """Uniform guesses have a loss of log 8192, 9.0."""
    assert learned("language_model", steps_per_epoch=60)["loss"] < 6.0


def test_words_continue_and_rare_ones_share_a_number():
    (x, y), _ = load("language_model").load_data()
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert x.min() == 0 and x.max() == 8191
    assert 0 < np.mean(x == 0) < 0.05


def test_slices_of_a_brain_are_bright_where_white_matter_is():
    for slices, tissues in load("segmentation").load_data():
        assert slices.shape == (*tissues.shape, 1) and set(np.unique(tissues)) == {0, 1, 2}
        none, gray, white = (slices[tissues == tissue].mean() for tissue in range(3))
        assert none < gray < white
        # Two hemispheres; and no brain at the corners, where only noise is.
        left, right = np.split(slices, 2, axis=2)
        np.testing.assert_allclose(left.mean(), right.mean(), rtol=0.02)
        assert not tissues[:, :8, :8].any()


@pytest.mark.slow
def test_popularity_does_not_tell_whether_a_function_uses_a_name():
    (x, y), (validation_x, validation_y) = load("recommender").load_data()
    counts = np.bincount(x["name"], minlength=8192)
    positive = counts[validation_x["name"]][validation_y[:, 0] == 1]
    negative = counts[validation_x["name"]][validation_y[:, 0] == 0]
    # The mean of 0 and 1 where a positive example's name is rarer, or more frequent.
    order = np.sign(positive[:, np.newaxis] - negative[np.newaxis]).mean() / 2 + 0.5
    assert order < 0.6
    assert 0.4 < y.mean() < 0.6
    assert not np.any(x["used"] == x["name"][:, np.newaxis])


def test_both_classes_of_a_medical_table_weigh_the_same():
    (_, labels, weights), _ = load("medical_table").load_data()
    malignant = labels[:, 0] == 1
    assert malignant.sum() < (~malignant).sum()
    np.testing.assert_allclose(weights[malignant].sum(), weights[~malignant].sum(), rtol=1e-6)


def test_a_gene_begins_and_ends_as_genes_do():
    """Read three letters at a time, and none of the codons between ends it."""
    stops = {"taa", "tag", "tga"}
    for gene, _ in names_in("genomics")["read_genes"]():
        text = "".join("acgt"[letter] for letter in gene)
        first, *inside, last = [text[start : start + 3] for start in range(0, len(text), 3)]
        assert first in ("atg", "gtg") and last in stops and not stops.intersection(inside)


def test_the_exact_solution_solves_the_equation():
    task, step = names_in("burgers"), 1e-4
    exact, viscosity = task["exact"], task["VISCOSITY"]
    x, t = np.random.default_rng(0).uniform((-0.9, 0.1), (0.9, 0.9), size=(50, 2)).T
    u, right, left = exact(x, t), exact(x + step, t), exact(x - step, t)
    u_t = (exact(x, t + step) - exact(x, t - step)) / (2 * step)
    u_x, u_xx = (right - left) / (2 * step), (right - 2 * u + left) / step**2
    np.testing.assert_allclose(u_t + u * u_x, viscosity * u_xx, atol=1e-5)
    np.testing.assert_allclose(exact(x, 0 * t), -np.sin(np.pi * x), atol=1e-12)


def test_every_reading_frame_is_as_frequent():
    for letters, frames in load("genomics").load_data():
        assert letters.shape[1:] == (99,) and set(np.unique(letters)) == {0, 1, 2, 3}
        assert np.ptp(np.bincount(frames)) <= 3


def test_no_year_to_be_forecast_was_trained_on():
    (past, future), (later_past, later_future) = load("time_series").load_data()
    assert past.shape[1:] == (24, 1) and later_future.shape[1:] == (3,)
    np.testing.assert_array_equal(past[1, -1, 0], future[0, 0])
    # The sunspot numbers of 1700 and 2008; of 1920, the last to be trained on, and of 1921.
    ends = [past[0, 0, 0], later_future[-1, -1], future[-1, -1], later_future[0, 0]]
    np.testing.assert_allclose(ends, [0.05, 0.029, 0.376, 0.261], rtol=1e-6)


def test_a_vae_reconstructs_and_generates():
    model = load("vae").build_model()
    (images, _), _ = load("vae").load_data()
    pictures = keras.ops.convert_to_numpy(model(images[:5]))
    assert pictures.shape == (5, 8, 8, 1) and 0 < pictures.min() and pictures.max() < 1
    assert model.decoder(np.zeros((3, 4), "float32")).shape == (3, 8, 8, 1)
