"""What meshes are planned for: costs of a real model, with made-up seconds."""

import dataclasses

import keras
import pytest
from keras import layers

from tfparallel.layout.balance import NoPartition
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import LayerCosts, Line, ModelCosts
from tfparallel.placement import layer_costs
from tfparallel.placement.layer_timing import measured_side_by_side
from tfparallel.planning import planner
from tfparallel.planning.calibration import TinySteps
from tfparallel.planning.candidates import Choices
from tfparallel.planning.timing import measured_loss
from tfparallel.problems import PlacementError

ROWS = 16
OF_CALL = ("batch_normalization", "progress")


@pytest.fixture(autouse=True)
def made_up_seconds(monkeypatch):
    """A millisecond a row and layer; nothing else takes time."""

    def seconds(model, rows, backward=True, progress=None):
        return {layer.name: 1e-3 * rows * (1.0 if backward else 0.25) for layer in model.layers}

    monkeypatch.setattr(layer_costs, "measured_seconds", seconds)
    monkeypatch.setattr(planner, "measured_side_by_side", lambda *args: 2.0)
    monkeypatch.setattr(planner, "measured_tiny_steps", lambda optimizer, **kwargs: TinySteps(0.0))
    monkeypatch.setattr(planner, "measured_update", lambda optimizer: {64: 0.0, 2**22: 0.0})
    monkeypatch.setattr(planner, "measured_loss", lambda model, rows: 0.0)
    monkeypatch.setattr(planner, "measured_sum", lambda: 0.0)


def build(normalized=False):
    inputs = keras.Input((8,))
    x = layers.Dense(32, activation="relu", name="up")(inputs)
    if normalized:
        x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(4, name="down")(x))


def compiled(optimizer="adam"):
    return lambda model: model.compile(optimizer, "mse")


def planned(build_model=build, compile_model=None, num_devices=4, **options):
    of_call = {name: options.pop(name) for name in OF_CALL if name in options}
    choices = Choices(ROWS, **options)
    compile_model = compile_model or compiled()
    return planner.make_plan(build_model, compile_model, num_devices, choices, **of_call)


def reasons(plan):
    return {c.mesh: c.why_not for c in plan.ranked if c.shard is None}


def reasons_of_shares(plan):
    return {c.shard: c.why_not for c in plan.ranked if c.shard is not None}


class Block(layers.Layer):
    """A composite layer, with a weight of its own."""

    def __init__(self):
        super().__init__(name="block")
        self.up, self.down = layers.Dense(30, name="up"), layers.Dense(8, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 30))
        self.weight = self.add_weight(shape=(512,), name="own")
        super().build(shape)

    def call(self, x):
        return x + self.down(self.up(x))


def test_parts_of_a_composite_layer_are_counted():
    plan = planned(lambda: keras.Sequential([keras.Input((8,)), Block()]), num_devices=2)
    # 8·30 + 30 and 30·8 + 8 of the weights are in layers that are split, 512 are the block's own.
    assert plan.share_in_parts == pytest.approx(518 / 1030)
    held_bytes = {c.mesh: c.held_bytes for c in plan.ranked if c.why_not is None}
    assert held_bytes[Mesh(tensor=2)] == pytest.approx(
        held_bytes[Mesh()] * (1 - 518 / 1030 / 2), rel=0.05
    )
    assert plan.as_json()["share_in_parts"] == plan.share_in_parts


@pytest.mark.slow
def test_every_mesh_has_a_step_or_a_reason():
    plan = planned()
    why_not = reasons(plan)
    assert len(why_not) == 7
    assert why_not[Mesh(pipeline=4)] == "4 stages, but 2 layers"
    assert all(why_not[mesh] is None for mesh in (Mesh(), Mesh(4), Mesh(tensor=4), Mesh(2, 2)))
    steps = {candidate.mesh: candidate.prediction for candidate in plan.ranked}
    assert steps[Mesh()].step_seconds == pytest.approx(2 * ROWS * 1e-3)
    # Four devices on two cores: twice as fast as one.
    assert steps[Mesh(4)].step_seconds == pytest.approx(ROWS * 1e-3)
    assert plan.as_json()["measured"]["side_by_side"] == 2.0


def test_bytes_are_those_of_the_layers():
    one = next(c for c in planned(num_devices=1).ranked if c.mesh == Mesh())
    weights = 4 * (8 * 32 + 32 + 32 * 4 + 4)
    activations, outputs = 4 * ROWS * 32, 2 * 4 * ROWS * 4
    assert one.held_bytes == pytest.approx(4 * weights + activations + outputs, rel=0.02)


@pytest.mark.slow
def test_batch_normalization_in_stages_is_a_choice():
    def with_norm():
        return build(normalized=True)

    why_not = reasons(planned(with_norm))
    said = "batch normalization, unless --batch_normalization=deferred"
    assert why_not[Mesh(2, 2)] == why_not[Mesh(2, 1, 2)] == said
    assert why_not[Mesh(4)] is None and why_not[Mesh(tensor=4)] is None
    assert reasons(planned(with_norm, batch_normalization="deferred"))[Mesh(2, 2)] is None


@pytest.mark.slow
def test_an_optimizer_that_looks_at_whole_weights_has_no_parts():
    plan = planned(compile_model=compiled(keras.optimizers.Lamb()))
    why_not, shared = reasons(plan), reasons_of_shares(plan)
    assert set(shared) == {"optimizer", "parameters"}
    said = "`shard` supports optimizers that update each"
    assert all(why.startswith(said) for why in shared.values())
    assert why_not[Mesh(tensor=4)].startswith(
        "tensor_parallel supports optimizers that update each"
    )
    assert why_not[Mesh(2, 2)] is None


def test_a_model_whose_layers_cannot_be_seen_is_refused():
    class Subclassed(keras.Model):
        pass

    with pytest.raises(PlacementError, match="needs a functional or Sequential model"):
        planned(Subclassed)


@pytest.mark.slow
def test_progress_names_what_is_measured():
    said = []
    planned(progress=said.append)
    assert "memory of the layers" in said and "layers side by side" in said


def test_one_device_needs_no_other():
    said = []
    plan = planned(num_devices=1, progress=said.append)
    assert [candidate.mesh for candidate in plan.ranked] == [Mesh()]
    assert "loss and updates" in said and not {"sums", "layers side by side"}.intersection(said)
    assert plan.first.parallelism == "none"
    assert plan.why == "one device is the only usable mesh"


def deep(num_layers=4):
    return keras.Sequential(
        [keras.Input((8,)), *(layers.Dense(8, name=f"layer{i}") for i in range(num_layers))]
    )


def test_the_last_stage_holds_the_loss_too():
    """The outputs and their gradient: the cut moves towards the end."""
    layer = LayerCosts("one", parameter_bytes=100)
    costs = ModelCosts([layer] * 4)
    assert costs.cut(2, 1, "memory") == [2, 2]
    with_loss = dataclasses.replace(costs, loss_bytes=Line(0.0, 150.0))
    assert with_loss.cut(2, 1, "memory") == [3, 1]
    with pytest.raises(NoPartition):
        with_loss.cut(4, 1, "memory", device_memory=240)


@pytest.mark.slow
def test_layers_go_to_as_few_devices_as_fit():
    all_of_them = planned(deep, parallelism="model", balances=("memory",))
    first = all_of_them.first
    assert (first.mesh, first.parallelism) == (Mesh(pipeline=4), "model")
    assert first.step_seconds == pytest.approx(4 * ROWS * 1e-3)  # One after the other.
    held_bytes = {candidate.mesh.size: candidate.held_bytes for candidate in all_of_them.ranked}
    assert sorted(held_bytes) == [1, 2, 3, 4] and held_bytes[1] > held_bytes[2] > held_bytes[4]
    few = planned(deep, parallelism="model", balances=("time",), device_memory=held_bytes[2])
    assert few.first.mesh.size == 2 and few.first.layers_per_stage == (2, 2)
    assert few.as_json()["meshes"][0]["stages"][1]["layers"] == ["layer2", "layer3"]
    none = planned(deep, parallelism="model", balances=("time",), device_memory=100)
    assert none.first is None and {each.balance for each in none.ranked} <= {None, "memory"}
    one = planned(deep, parallelism="model", balances=("memory",), device_memory=held_bytes[1])
    assert one.first.parallelism == "none"


@pytest.mark.slow
def test_a_pipeline_that_is_asked_for_is_planned_whatever_it_takes():
    (candidate,) = planned(deep, num_devices=2, parallelism="pipeline", num_micro_batches=4).ranked
    first, last = candidate.prediction.stages
    assert first.forward_seconds == pytest.approx(2 * 4 * 0.25e-3)  # Measured by itself.
    assert last.backward_seconds == pytest.approx(2 * 4 * 0.75e-3)
    timeline = candidate.prediction.timeline
    assert timeline.makespan == pytest.approx((4 + 1) * 2 * 4e-3)
    assert candidate.step_seconds == pytest.approx(timeline.makespan)
    with pytest.raises(PlacementError, match="in this pipeline: batch normalization, unless"):
        planned(lambda: build(normalized=True), num_devices=2, parallelism="pipeline")
    # More stages than layers: the last pass on what they are given.
    (empty,) = planned(deep, num_devices=5, parallelism="pipeline", num_micro_batches=2).ranked
    assert empty.layers_per_stage == (1, 1, 1, 1, 0) and empty.why_not is None


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


def test_weights_that_are_worth_it_are_shared_out():
    """Of 4,096 elements and more."""

    def build():
        words = keras.Input((4,), dtype="int32")
        x = layers.Embedding(100, 64, name="table")(words)
        x = layers.Dense(128, name="large")(layers.Flatten()(x))
        return keras.Model(words, layers.Dense(8, name="small")(x))

    plan = planned(build, num_devices=2)
    held_bytes = {c.shard: c.held_bytes for c in plan.ranked if c.mesh == Mesh(data=2)}
    trained = 4 * (100 * 64 + 256 * 128 + 128 + 128 * 8 + 8)
    large = 4 * (100 * 64 + 256 * 128)
    # Half of two slots, and half of what they update, which is whole in place of it.
    assert held_bytes[None] - held_bytes["optimizer"] == pytest.approx(
        trained * (2 / 2 - 1 / 2), abs=8
    )
    # Weights, gradients and the shares that are updated; halves of two, and both for a moment.
    saved = (1 + 1 + 1 / 2) * large - (1 / 2 + 1 / 2 + 2) * large
    assert held_bytes["optimizer"] - held_bytes["parameters"] == pytest.approx(saved, abs=8)


def test_a_plan_without_a_fit_says_what_would_fit():
    plan = planned(deep, num_devices=2, device_memory=100)
    assert plan.first is None
    least = min(c.held_bytes for c in plan.ranked if c.held_bytes is not None)
    (memory,) = [each for each in plan.would_fit if each.name == "device_memory"]
    assert least <= memory.value <= 1.1 * least
    assert plan.as_json()["would_fit"][-1]["device_memory"] == memory.value
    assert not planned(num_devices=1).would_fit
