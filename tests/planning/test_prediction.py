"""The step of a mesh from the costs of its layers: by hand for small numbers."""

import dataclasses
import math

import pytest

from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import LayerCosts, Line, Machine, ModelCosts
from tfparallel.layout.schedule import make_schedule
from tfparallel.planning.prediction import Pieces, predict

ROWS = 48
ALONE = Machine()  # Each device computes by itself, and sums take no time.


def model(num_layers=4, **extra):
    """Layers that take 3 s a row, forward and backward, and hold 100 bytes and 8 a row."""
    layers = [
        LayerCosts(f"layer{i}", Line(0.0, 3.0), 50, 30, 30, 20, Line(0.0, 8.0), 4, 1)
        for i in range(num_layers)
    ]
    edges = {i: (4, [i + 1]) for i in range(num_layers - 1)}
    return ModelCosts(layers, edges, **extra)


def pieces(mesh, num_micro_batches=1, schedule="1f1b", counts=None, **options):
    planned = make_schedule(schedule, mesh.pipeline, num_micro_batches)
    counts = counts or [4 // mesh.pipeline] * mesh.pipeline
    return Pieces(mesh, ROWS, planned, counts, **options)


def passes(mesh, machine=ALONE, costs=None, **options):
    return predict(costs or model(), pieces(mesh, **options), machine).passes_seconds


WHOLE = 4 * 3.0 * ROWS


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({8: 3.0, 32: 6.0}, Line(2.0, 0.125)),
        ({8: 4.0}, Line(0.0, 0.5)),
        ({8: 4.0, 32: 2.0}, Line(3.0, 0.0)),  # Noise: more rows do not take less.
        ({8: 1.0, 32: 8.0}, Line(0.0, 0.25)),  # Noise: no rows do not take less than none.
    ],
)
def test_a_line_neither_falls_nor_begins_below_zero(values, line):
    assert Line.through(values) == line


def test_devices_of_their_own_divide_the_passes():
    assert passes(Mesh()) == WHOLE
    assert passes(Mesh(data=4)) == WHOLE / 4
    # (M + K - 1) / (M K): a bubble of one in nine.
    assert passes(Mesh(pipeline=2), num_micro_batches=8) == pytest.approx(WHOLE * 9 / 16)
    split = {f"layer{i}": "row" for i in range(4)}
    assert passes(Mesh(tensor=3), splits=split) == pytest.approx(WHOLE / 3)
    # Of a layer that is not split the other parts wait for the first.
    del split["layer0"]
    assert passes(Mesh(tensor=3), splits=split) == pytest.approx(WHOLE * (1 / 4 + 3 / 4 / 3))


def test_cores_that_one_device_keeps_busy_gain_nothing_from_more():
    shared = Machine(side_by_side=1.0)
    for mesh, number in ((Mesh(data=4), 1), (Mesh(pipeline=2), 4), (Mesh(2, 2), 4)):
        seconds = passes(mesh, shared, num_micro_batches=number)
        assert seconds == pytest.approx(WHOLE), mesh


def test_two_cores_serve_two_of_four_devices():
    shared = Machine(side_by_side=2.0)
    assert passes(Mesh(data=4), shared) == pytest.approx(WHOLE / 2)
    # While one stage stands still the other is not slowed down: the bubble stays.
    assert passes(Mesh(pipeline=2), shared, num_micro_batches=8) == pytest.approx(WHOLE * 9 / 16)


def test_the_fixed_cost_of_a_call_grows_with_the_pieces():
    fixed = ModelCosts([LayerCosts("only", Line(6.0, 0.0))])
    planned = Pieces(Mesh(), ROWS, make_schedule("1f1b", 1, 4), [1])
    assert predict(fixed, planned, ALONE).passes_seconds == pytest.approx(4 * 6.0)
    slow = Machine(call_seconds=0.5)
    assert predict(fixed, planned, slow).passes_seconds == pytest.approx(4 * (6.0 + 2 * 0.5))


def test_a_recompute_adds_the_forward_passes():
    never = passes(Mesh(pipeline=2), num_micro_batches=4)
    always = passes(Mesh(pipeline=2), num_micro_batches=4, recompute="always")
    assert always == pytest.approx(never * 4 / 3)


def test_sums_and_updates():
    costs = model(update=Line(1.0, 0.1), overhead_seconds=7.0)
    adding = Machine(sum_seconds=lambda number, size: (number - 1) * size / 10)
    prediction = predict(costs, pieces(Mesh(data=3)), adding)
    assert prediction.sums_seconds == pytest.approx(2 * 4 * 30 / 10)
    assert prediction.update_seconds == pytest.approx(4 * (1.0 + 3.0))
    assert prediction.step_seconds == pytest.approx(sum(prediction.parts.values()))
    assert prediction.overhead_seconds == 7.0
    # Two stages of their own update half as much each; on shared cores all copies take turns.
    assert predict(costs, pieces(Mesh(pipeline=2), 4), ALONE).update_seconds == pytest.approx(8.0)
    shared = Machine(side_by_side=1.0)
    assert predict(costs, pieces(Mesh(data=3)), shared).update_seconds == pytest.approx(48.0)
    assert predict(costs, pieces(Mesh()), adding).sums_seconds == 0.0
    # Three micro-batches are added to the first, in each stage, and then two replicas.
    assert predict(costs, pieces(Mesh(2, 2), 4), adding).sums_seconds == pytest.approx(4 * 60 / 10)
    alone = dataclasses.replace(adding, side_by_side=1.0)
    prediction = predict(costs, pieces(Mesh(2, 2), 4), alone).sums_seconds
    assert prediction == pytest.approx(2 * (2 * 3 + 1) * 60 / 10)


def test_replicas_of_parts_add_up_their_parts():
    adding = Machine(sum_seconds=lambda number, size: (number - 1) * size / 10)
    split = {f"layer{i}": "row" for i in range(2)}
    whole = predict(model(), pieces(Mesh(2, 1, 2)), adding).sums_seconds
    in_parts = predict(model(), pieces(Mesh(2, 1, 2), splits=split), adding).sums_seconds
    assert (whole, in_parts) == pytest.approx((4 * 30 / 10, (2 * 15 + 2 * 30) / 10))


def test_parts_add_up_what_they_exchange():
    adding = Machine(sum_seconds=lambda number, size: (number - 1) * size)
    for kind, tensors in (("row", 1), ("column", 1), ("heads", 2), ("features", 0)):
        seconds = passes(Mesh(tensor=2), adding, splits={"layer1": kind})
        expected = WHOLE - 3.0 * ROWS / 2 + tensors * 4 * ROWS
        assert seconds == pytest.approx(expected), kind


def test_what_each_part_does_whole_is_not_divided():
    layer = LayerCosts("split", Line(0.0, 3.0), whole_share=0.25)
    costs = ModelCosts([layer])
    planned = Pieces(Mesh(tensor=4), ROWS, make_schedule("1f1b", 1, 1), [1], {"split": "row"})
    expected = 3.0 * ROWS * (0.25 + 0.75 / 4)
    assert predict(costs, planned, ALONE).passes_seconds == pytest.approx(expected)
    shared = Machine(side_by_side=1.0)  # All parts, one after the other.
    assert predict(costs, planned, shared).passes_seconds == pytest.approx(4 * expected)


def test_a_device_holds_its_layers_and_what_is_in_flight():
    costs = model(loss_bytes=Line(0.0, 2.0))
    (whole,) = predict(costs, pieces(Mesh()), ALONE).held_bytes
    assert whole == 4 * 100 + ROWS * (4 * 8 + 2)
    (replica,) = predict(costs, pieces(Mesh(data=2)), ALONE).held_bytes
    assert replica == 4 * 100 + ROWS // 2 * (4 * 8 + 2)
    first, last = predict(costs, pieces(Mesh(pipeline=2), 8), ALONE).held_bytes
    rows = ROWS // 8
    assert first == 2 * 100 + 2 * rows * 2 * 8  # K - 0 micro-batches under 1F1B.
    assert last == 2 * 100 + rows * (2 * 8 + 2 + 4)  # And what it is sent.
    first, _ = predict(costs, pieces(Mesh(pipeline=2), 8, "gpipe"), ALONE).held_bytes
    assert first == 2 * 100 + 8 * rows * 2 * 8
    split = {f"layer{i}": "row" for i in range(4)}
    (part,) = predict(costs, pieces(Mesh(tensor=2), splits=split), ALONE).held_bytes
    assert part == 2 * 100 + ROWS * (2 * 8 + 2)
    split = {f"layer{i}": "positions" for i in range(4)}
    (part,) = predict(costs, pieces(Mesh(sequence=2), splits=split), ALONE).held_bytes
    assert part == 4 * 100 + ROWS // 2 * (4 * 8 + 2)


@pytest.mark.parametrize(
    ("schedule", "recompute", "in_flight_bytes"),
    [
        ("gpipe", "never", 8 * 6 * 16),
        ("1f1b", "never", 2 * 6 * 16),
        # Of each what the stage was sent, which is nothing, and one micro-batch's activations.
        ("gpipe", "always", 6 * 16),
        ("1f1b", "always", 6 * 16),
    ],
)
def test_the_first_device_holds_what_is_in_flight(schedule, recompute, in_flight_bytes):
    planned = pieces(Mesh(pipeline=2), 8, schedule, recompute=recompute)
    first, last = predict(model(), planned, ALONE).held_bytes
    assert first == 2 * 100 + in_flight_bytes
    if recompute == "always":
        assert last == 2 * 100 + 6 * 16 + 6 * 4 * (8 if schedule == "gpipe" else 1)


def test_a_device_of_two_stages_holds_both():
    planned = pieces(Mesh(pipeline=2), 8, "interleaved", [1, 1, 1, 1])
    prediction = predict(model(), planned, ALONE)
    assert [stage.device for stage in prediction.stages] == [0, 1, 0, 1]
    assert prediction.held_bytes[0] > 2 * 100 + planned.schedule.most_in_flight()[0] * 6 * 8


def test_layers_on_devices_take_turns_in_one_step():
    slow = Machine(call_seconds=0.5)
    planned = dataclasses.replace(pieces(Mesh(pipeline=2)), is_placed=True)
    prediction = predict(model(), planned, slow)
    assert prediction.passes_seconds == pytest.approx(WHOLE)  # No calls of stages.
    assert prediction.bubble == pytest.approx(0.5)
    assert prediction.held_bytes[0] == 2 * 100 + 48 * 2 * 8
    stage = prediction.stages[1].as_json()
    assert stage["layers"] == ["layer2", "layer3"] and stage["received_bytes"] == 48 * 4
    assert stage["forward_seconds"] == pytest.approx(stage["backward_seconds"] / 2)


def test_large_gradients_are_held_one_at_a_time_where_none_is_added_to_another():
    large = LayerCosts("large", Line(), 50, 30, 0, 20, Line(0.0, 1.0), 0, 1, update_bytes=90)
    costs = ModelCosts([large, large])

    def bytes_of(mesh, counts):
        planned = Pieces(mesh, ROWS, make_schedule("1f1b", mesh.pipeline, 1), counts)
        return predict(costs, planned, ALONE).held_bytes[0]

    assert (
        bytes_of(Mesh(), [2]) == bytes_of(Mesh(tensor=2), [2]) == 2 * 70 + 2 * ROWS
    )  # More than 90.
    assert bytes_of(Mesh(data=2), [2]) == 2 * 100 + 2 * ROWS // 2
    assert bytes_of(Mesh(pipeline=2), [1, 1]) == 100 + ROWS
    few = Pieces(Mesh(), 2, make_schedule("1f1b", 1, 1), [2])
    assert predict(costs, few, ALONE).held_bytes == (2 * 70 + 90,)


def test_nothing_at_work_slows_nothing():
    assert Machine(side_by_side=1.5).slowed(0) == 1.0
    assert Machine().slowed(10) == 1.0 and math.isinf(Machine().side_by_side)


def in_shares(**extra):
    """The model, 20 bytes of each of whose layers are in two weights that may be shared out."""
    layers = [dataclasses.replace(layer, shared_bytes=(12, 8)) for layer in model().layers]
    return ModelCosts(layers, **extra)


def test_a_replica_holds_its_share():
    def bytes_of(shard, number=2):
        prediction = predict(in_shares(), pieces(Mesh(data=number), shard=shard), ALONE)
        return prediction.held_bytes[0] - 4 * 8 * ROWS // number  # Without activations.

    assert bytes_of(None) == 4 * (50 + 30 + 20)
    # Weights and gradients are whole; of slots there is a half, and of what is updated by them.
    assert bytes_of("optimizer") == 4 * (50 + 30 + 20 / 2 + 30 / 2)
    # Of 50 bytes 20 are shared out, and of 30 of gradients; the two largest are whole at a time.
    assert bytes_of("parameters") == 4 * (30 + 10 + (20 + 20 + 20 + 10) / 2) + 2 * (12 + 12)
    assert bytes_of("parameters", 4) == 4 * (30 + 10 + (20 + 20 + 20 + 10) / 4) + 2 * (12 + 12)


def test_shares_of_large_gradients_are_used_up_one_by_one():
    """But for those of a clipping by the norm of all, which are held at once."""
    clipped = LayerCosts("clipped", Line(), 50, 50, 50, 20, shared_bytes=(40,))
    large = dataclasses.replace(clipped, gradient_bytes=10)

    def bytes_of(layer, shard):
        planned = pieces(Mesh(data=2), counts=[1], shard=shard)
        return predict(ModelCosts([layer]), planned, ALONE).held_bytes[0]

    assert bytes_of(clipped, "parameters") - bytes_of(large, "parameters") == 40 / 2
    assert (
        bytes_of(clipped, "optimizer") == bytes_of(large, "optimizer") == 50 + 50 + 20 / 2 + 50 / 2
    )


def test_frozen_weights_are_kept_whole_and_have_no_gradients():
    frozen = LayerCosts("frozen", Line(), 50, 0, 0, 0, shared_bytes=(50,))
    planned = pieces(Mesh(data=2), counts=[1], shard="parameters")
    prediction = predict(ModelCosts([frozen]), planned, ALONE)
    assert prediction.held_bytes == (25 + 50,)
    assert prediction.sums_seconds == 0.0


def test_shares_are_updated_once_and_copied():
    costs = in_shares(update=Line(1.0, 0.1))
    adding = Machine(sum_seconds=lambda number, size: (number - 1) * size / 10, share_seconds=0.5)

    def prediction_of(shard, machine=adding):
        return predict(costs, pieces(Mesh(data=2), shard=shard), machine)

    whole, optimizer, parameters = map(prediction_of, (None, "optimizer", "parameters"))
    assert whole.copies_seconds == 0.0
    assert whole.sums_seconds == optimizer.sums_seconds == pytest.approx(4 * 30 / 10)
    # Each adds up its half of what is shared out; one device the rest.
    assert parameters.sums_seconds == pytest.approx(4 * (10 + 20 / 2) / 10)
    assert whole.update_seconds == pytest.approx(4 * (1.0 + 3.0))
    for each in (optimizer, parameters):
        assert each.update_seconds == pytest.approx(4 * (1.0 + 1.5))
    assert optimizer.copies_seconds == pytest.approx(2 * 4 * 0.5 + 4 * 30 / 10)
    # Forward and backward 20 bytes of each; and what stays whole, once.
    assert parameters.copies_seconds == pytest.approx(2 * 4 * 0.5 + 4 * (2 * 20 + 10) / 10)
    assert whole.passes_seconds == parameters.passes_seconds
    # On cores that are busy all replicas' copies take turns, and of the update there is one.
    busy = dataclasses.replace(adding, side_by_side=1.0)
    assert prediction_of(None, busy).update_seconds == pytest.approx(2 * 4 * (1.0 + 3.0))
    assert prediction_of("optimizer", busy).update_seconds == pytest.approx(4 * (2 * 1.0 + 3.0))
    assert prediction_of("optimizer", busy).copies_seconds == pytest.approx(4.0 + 2 * 4 * 30 / 10)
    assert prediction_of("parameters", busy).sums_seconds == whole.sums_seconds
