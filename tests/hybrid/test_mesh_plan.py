"""What meshes are planned for: costs of a real model, with made-up seconds."""

import keras
import pytest
from keras import layers

from tfparallel.hybrid import mesh_plan
from tfparallel.layout.calibration import TinySteps
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.ranking import Choices
from tfparallel.placement.step_timing import measured_loss
from tfparallel.placement.timing import measured_side_by_side
from tfparallel.problems import PlacementError

ROWS = 16


@pytest.fixture(autouse=True)
def made_up_seconds(monkeypatch):
    """A millisecond a row and layer; nothing else takes time."""

    def seconds(model, rows, progress):
        return {layer.name: 1e-3 * rows for layer in model.layers}

    monkeypatch.setattr(mesh_plan, "measured_seconds", seconds)
    monkeypatch.setattr(mesh_plan, "measured_side_by_side", lambda *given: 2.0)
    monkeypatch.setattr(mesh_plan, "measured_tiny_steps", lambda *given: TinySteps(0.0))
    monkeypatch.setattr(mesh_plan, "measured_update", lambda optimizer: {64: 0.0, 2**22: 0.0})
    monkeypatch.setattr(mesh_plan, "measured_loss", lambda model, rows: 0.0)
    monkeypatch.setattr(mesh_plan, "measured_sum", lambda: 0.0)


def build(normalized=False):
    inputs = keras.Input((8,))
    x = layers.Dense(32, activation="relu", name="up")(inputs)
    if normalized:
        x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(4, name="down")(x))


def compiled(optimizer="adam"):
    return lambda model: model.compile(optimizer, "mse")


def planned(build_model=build, compile_model=None, num_devices=4, **options):
    asked = {name: options.pop(name) for name in ("device_memory",) if name in options}
    choices = Choices(ROWS, **asked)
    compile_model = compile_model or compiled()
    return mesh_plan.plan_meshes(build_model, compile_model, num_devices, choices, **options)


def reasons(plan):
    return {candidate.mesh: candidate.why_not for candidate in plan.ranked}


@pytest.mark.slow
def test_every_mesh_has_a_step_or_a_reason():
    plan = planned()
    found = reasons(plan)
    assert len(found) == 7
    assert found[Mesh(pipeline=4)] == "4 stages of 2 layers"
    assert all(found[mesh] is None for mesh in (Mesh(), Mesh(4), Mesh(tensor=4), Mesh(2, 2)))
    steps = {candidate.mesh: candidate.prediction for candidate in plan.ranked}
    assert steps[Mesh()].step_seconds == pytest.approx(2 * ROWS * 1e-3)
    # Four devices on two cores: twice as fast as one.
    assert steps[Mesh(4)].step_seconds == pytest.approx(ROWS * 1e-3)
    assert plan.as_json()["measured"]["side_by_side"] == 2.0


def test_bytes_are_those_of_the_layers():
    one = next(c for c in planned(num_devices=1).ranked if c.mesh == Mesh())
    weights = 4 * (8 * 32 + 32 + 32 * 4 + 4)
    kept, outputs = 4 * ROWS * 32, 2 * 4 * ROWS * 4
    assert one.held_bytes == pytest.approx(4 * weights + kept + outputs, rel=0.02)


@pytest.mark.slow
def test_batch_normalization_in_stages_is_a_choice():
    def with_norm():
        return build(normalized=True)

    found = reasons(planned(with_norm))
    said = "batch normalization, unless --batch_normalization=deferred"
    assert found[Mesh(2, 2)] == found[Mesh(2, 1, 2)] == said
    assert found[Mesh(4)] is None and found[Mesh(tensor=4)] is None
    assert reasons(planned(with_norm, batch_normalization="deferred"))[Mesh(2, 2)] is None


@pytest.mark.slow
def test_an_optimizer_that_looks_at_whole_weights_has_no_parts():
    found = reasons(planned(compile_model=compiled(keras.optimizers.Lamb())))
    assert found[Mesh(tensor=4)].startswith("tensor_parallel supports optimizers that update each")
    assert found[Mesh(2, 2)] is None


def test_a_model_whose_layers_cannot_be_seen_is_refused():
    class Own(keras.Model):
        pass

    with pytest.raises(PlacementError, match="needs a functional or Sequential model"):
        planned(Own)


@pytest.mark.slow
def test_what_is_measured_is_told():
    said = []
    planned(progress=said.append)
    assert "memory of the layers" in said and "layers side by side" in said


def test_one_device_needs_no_other():
    plan = planned(num_devices=1)
    assert [candidate.mesh for candidate in plan.ranked] == [Mesh()]
    assert plan.first.parallelism == "none"
    assert plan.why == "one device is the only one that can be taken"


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        pytest.param("mse", 4, marks=pytest.mark.slow),
        pytest.param("binary_crossentropy", 1, marks=pytest.mark.slow),
        ("sparse_categorical_crossentropy", 4),
    ],
)
def test_losses_of_keras_are_measured(loss, outputs):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(outputs, "sigmoid")])
    model.compile("adam", loss, metrics=["accuracy"])
    before = [variable.numpy() for variable in model.metrics_variables]
    assert measured_loss(model, 4) > 0
    assert before == [variable.numpy() for variable in model.metrics_variables]


def test_a_loss_that_no_made_up_target_suits_is_not_measured():
    def never(y_true, y_pred):
        raise ValueError("y_true must be a date")

    model = build()
    model.compile("adam", never)
    assert measured_loss(model, 4) is None


def test_more_at_once_do_as_much_as_one_at_least():
    model = keras.Sequential([keras.Input((256,)), layers.Dense(256, name="wide")])
    assert 1.0 <= measured_side_by_side(model, 64, {"wide": 1e-3}, 2) <= 2.0
