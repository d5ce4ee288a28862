"""Which mesh comes first, and why the others do not."""

import dataclasses

import pytest

from tests.planning.test_prediction import ROWS, model
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import Line, Machine
from tfparallel.planning.candidates import (
    Choices,
    meshes_of,
    parallelism_of,
    rank,
    with_trials,
)
from tfparallel.planning.reasons import remedies, why_first
from tfparallel.texts import parse_bytes

ALONE = Machine(sum_seconds=lambda number, size: (number - 1) * size / 100)


def whole_alone(mesh, shard):
    return "not asked for" if shard is not None else None


def ranked(num_devices=4, machine=ALONE, costs=None, splits=(), refusal=whole_alone, **choices):
    return rank(
        costs or model(),
        num_devices,
        Choices(ROWS, **choices),
        machine,
        splits_of=lambda mesh: dict.fromkeys(splits, "row"),
        refusal=refusal,
    )


def by_mesh(candidates):
    return {candidate.mesh: candidate for candidate in candidates if candidate.shard is None}


def by_name(candidates):
    return {candidate.name: candidate for candidate in candidates}


def shared_out(**extra):
    """The model, half of each of whose layers' bytes are in a weight that may be shared out."""
    costs = model(**extra)
    layers = [dataclasses.replace(layer, shared_bytes=(25,)) for layer in costs.layers]
    return dataclasses.replace(costs, layers=layers)


def with_shares(*arguments, costs=None, **choices):
    costs = costs or shared_out()
    return ranked(*arguments, costs=costs, refusal=lambda mesh, shard: None, **choices)


def test_every_mesh_of_all_devices_and_one_device():
    assert [str(mesh) for mesh in meshes_of(4)] == [
        "data=4",
        "data=2, pipeline=2",
        "data=2, tensor=2",
        "data=2, sequence=2",
        "pipeline=4",
        "pipeline=2, tensor=2",
        "pipeline=2, sequence=2",
        "tensor=4",
        "sequence=4",
    ]
    assert all(mesh.size == 12 for mesh in meshes_of(12))
    assert len(list(meshes_of(8))) == 16
    assert [candidate.mesh for candidate in ranked(1)] == [Mesh()]
    names = [name for name in by_name(with_shares()) if "shard" in name]
    assert sorted(names) == ["data=4, shard=optimizer", "data=4, shard=parameters"]
    by_layers = with_shares(parallelism="model")
    assert {candidate.shard for candidate in by_layers} == {None}


@pytest.mark.parametrize(
    ("mesh", "form"),
    [
        (Mesh(), "none"),
        (Mesh(data=2), "data"),
        (Mesh(pipeline=2), "pipeline"),
        (Mesh(tensor=2), "tensor"),
        (Mesh(sequence=2), "hybrid"),
        (Mesh(2, 1, 2), "hybrid"),
        (Mesh(1, 2, 2), "hybrid"),
    ],
    ids=str,
)
def test_the_parallelism_of_a_mesh(mesh, form):
    assert parallelism_of(mesh) == form


def test_the_fastest_comes_first_and_says_why():
    ranking = ranked()
    steps = [c.prediction.step_seconds for c in ranking if c.prediction is not None]
    assert steps == sorted(steps)
    first, second = ranking[:2]
    assert first.mesh == Mesh(data=4) and first.why_not is None
    assert second.mesh == Mesh(data=2, pipeline=2)
    said = why_first(ranking)
    assert said.startswith("data=4 takes 8")  # 144 s and sums, of 180 s and sums.
    assert "the next, data=2, pipeline=2, whose passes take 36 s longer" in said
    assert "(its stages idle 20% of the time)" in said


def test_on_cores_that_are_busy_one_device_is_the_fastest():
    costs = model(update=Line(1.0, 0.1))
    busy = dataclasses.replace(ALONE, side_by_side=1.0, call_seconds=0.1)
    first, *_ = ranking = ranked(machine=busy, costs=costs)
    assert first.mesh == Mesh() and first.parallelism == "none"
    assert why_first(ranking).startswith("one device is predicted to be the fastest, but within")


def test_close_predictions_suggest_a_measurement():
    costs = model()
    same = [dataclasses.replace(layer, seconds=Line(1.0, 0.0)) for layer in costs.layers]
    costs = dataclasses.replace(costs, layers=same, overhead_seconds=1000.0)
    assert why_first(ranked(2, costs=costs)) == (
        "one device is predicted to be the fastest, but within 5% of it are data=2; pipeline=2: "
        "compare them with --num_trials=3"
    )


def test_sequences_are_divided_where_a_layer_can_be():
    assert not [mesh for mesh in by_mesh(ranked()) if mesh.sequence > 1]
    candidates = by_mesh(ranked(splits=[layer.layer for layer in model().layers]))
    assert set(candidates) == {Mesh(), *meshes_of(4)}
    whole, divided = candidates[Mesh()].prediction, candidates[Mesh(sequence=4)].prediction
    (one,), (part,) = whole.stages, divided.stages
    assert part.activation_bytes < one.activation_bytes and part.state_bytes >= one.state_bytes
    assert divided.passes_seconds < whole.passes_seconds


def test_what_was_tried_comes_by_what_was_measured():
    predicted = ranked()
    tried = {"data=4": 0.2, "data=2, pipeline=2": 0.1, "pipeline=4": "no such loss"}
    ranking = with_trials(predicted, tried)
    assert [c.mesh for c in ranking[:2]] == [Mesh(data=2, pipeline=2), Mesh(data=4)]
    assert [c.step_seconds for c in ranking[:2]] == [0.1, 0.2]
    assert why_first(ranking) == (
        "data=2, pipeline=2 took 50% of the step time of the next one tried, data=4"
    )
    refused = by_mesh(ranking)[Mesh(pipeline=4)]
    assert refused.why_not == "no such loss" and "step_seconds" not in refused.as_json()
    assert ranking[-1] is refused or ranking[-1].prediction is None
    others = [c.mesh for c in predicted if c.why_not is None and c.name not in tried]
    assert [c.mesh for c in ranking if c.why_not is None][2:] == others
    (first, *_) = ranking = with_trials(predicted, {"data=4": 0.2})
    assert first.as_json()["measured_seconds"] == 0.2
    assert why_first(ranking) == "data=4 is the only mesh that was tried"
    alike = with_trials(predicted, {"data=4": 0.2, "pipeline=4": 0.199})
    assert why_first(alike) == (
        "pipeline=4 and data=4 were the fastest in the trials, and equally fast"
    )


def test_what_does_not_fit_stands_behind_with_its_excess():
    whole = by_mesh(ranked())[Mesh(data=4)].held_bytes
    ranking = ranked(device_memory=whole - 100)
    assert ranking[0].mesh != Mesh(data=4) and ranking[0].why_not is None
    late = by_mesh(ranking)[Mesh(data=4)]
    assert late.why_not == "100 B too much for a device" and late.prediction is not None
    fits = [candidate.why_not is None for candidate in ranking]
    assert fits == sorted(fits, reverse=True)
    assert why_first(ranked(device_memory=1)) == "no mesh fits"


def test_another_cut_is_taken_where_the_one_by_time_does_not_fit():
    costs = model()
    layers = list(costs.layers)
    layers[0] = dataclasses.replace(layers[0], seconds=Line(0.0, 9.0))
    layers[3] = dataclasses.replace(layers[3], parameter_bytes=500)
    costs = dataclasses.replace(costs, layers=layers)
    by_time = by_mesh(ranked(2, costs=costs))[Mesh(pipeline=2)]
    assert (by_time.balance, by_time.layers_per_stage) == ("time", (1, 3))
    taken = by_mesh(ranked(2, costs=costs, device_memory=by_time.held_bytes - 1))[Mesh(pipeline=2)]
    assert taken.why_not is None
    assert (taken.balance, taken.layers_per_stage) == ("both", (2, 2))  # Not the (3, 1) of memory.
    alone = ranked(2, costs=costs, device_memory=by_time.held_bytes - 1, balances=("time",))
    assert by_mesh(alone)[Mesh(pipeline=2)].why_not == "1 B too much for a device"


def test_what_the_model_cannot_use_says_why():
    candidates = by_mesh(ranked(64))
    assert candidates[Mesh(data=64)].why_not == "64 pieces, but a batch of 48 rows"
    assert candidates[Mesh(pipeline=64)].why_not == "64 stages, but 4 layers"
    assert candidates[Mesh(tensor=64)].why_not == "no layer can be split into 64 parts"
    assert candidates[Mesh(tensor=64)].prediction is None
    refused = ranked(2, refusal=lambda mesh, shard: "no stages" if mesh.pipeline > 1 else None)
    assert by_mesh(refused)[Mesh(pipeline=2)].why_not == "no stages"
    interleaved = by_mesh(ranked(3, schedule="interleaved", chunks_per_device=2))
    assert interleaved[Mesh(pipeline=3)].why_not == "6 stages, but 4 layers"


def test_micro_batches_are_those_of_the_form():
    candidates = by_mesh(ranked(4))
    assert candidates[Mesh(pipeline=4)].num_micro_batches == 8
    assert candidates[Mesh(2, 2)].num_micro_batches == 4
    assert candidates[Mesh(data=4)].num_micro_batches == 1
    assert by_mesh(ranked(4, num_micro_batches=3))[Mesh(2, 2)].num_micro_batches == 3
    # A replica with three rows has no more micro-batches than that.
    assert by_mesh(ranked(32))[Mesh(16, 2)].num_micro_batches == 3


def test_a_ranking_is_told_as_json():
    rows = [c.as_json() for c in ranked(2, device_memory=2000) if c.shard is None]
    assert rows[0]["mesh"] == {"data": 2, "pipeline": 1, "tensor": 1, "sequence": 1}
    assert rows[0]["step_seconds"] == pytest.approx(sum(rows[0]["seconds"].values()))
    assert rows[-1]["why_not"] == "no layer can be split into 2 parts"
    assert "step_seconds" not in rows[-1]


def test_shares_are_taken_where_memory_needs_them():
    candidates = by_name(with_shares())
    whole, optimizer, parameters = (
        candidates[f"data=4{shard}"] for shard in ("", ", shard=optimizer", ", shard=parameters")
    )
    assert whole.held_bytes > optimizer.held_bytes > parameters.held_bytes
    alone = dict.fromkeys(["pipeline=4", "data=2, pipeline=2"], "refused")

    def first(device_memory):
        refused = with_shares(device_memory=device_memory)
        return with_trials(refused, alone)[0]

    assert first(whole.held_bytes).name == "data=4"
    assert first(whole.held_bytes - 1).name == "data=4, shard=optimizer"
    needed = first(optimizer.held_bytes - 1)
    assert (needed.name, needed.parallelism) == ("data=4, shard=parameters", "data")
    assert needed.as_json()["shard"] == "parameters" and "shard" not in whole.as_json()


def test_shares_that_are_hardly_faster_stay_behind():
    """An update of 16 s for each of four copies, beside passes of 576 s on cores that are busy."""
    busy = dataclasses.replace(ALONE, side_by_side=1.0)
    ranking = with_shares(machine=busy, costs=shared_out(update=Line(1.0, 0.1)))
    names, steps = list(by_name(ranking)), {c.name: c.step_seconds for c in ranking if c.prediction}
    assert 0.95 < steps["data=4, shard=optimizer"] / steps["data=4"] < 1
    slow = with_shares(machine=busy, costs=shared_out(update=Line(1.0, 0.2)))
    assert names.index("data=4") < names.index("data=4, shard=parameters")
    faster = [c.name for c in slow if c.mesh == Mesh(data=4)]
    assert faster[-1] == "data=4"  # By more than 5%.


def test_shares_are_not_taken_for_speed_where_what_is_sent_was_not_measured():
    ranking = with_shares(costs=shared_out(update=Line(10.0, 10.0)))
    steps = {c.name: c.step_seconds for c in ranking if c.prediction is not None}
    assert steps["data=4, shard=optimizer"] < 0.5 * steps["data=4"]
    assert [c.name for c in ranking if c.mesh == Mesh(data=4)][0] == "data=4"


def test_what_is_faster_only_as_predicted_is_to_be_measured():
    ranking = [c for c in with_shares(costs=shared_out(update=Line(1.0, 0.1))) if c.mesh.data == 4]
    assert [c.name for c in ranking][0] == "data=4"
    share = ranking[1].step_seconds / ranking[0].step_seconds
    assert why_first(ranking) == (
        f"data=4 keeps weights whole; {ranking[1].name} is predicted to take {share:.0%} of its "
        "step time: compare them with --num_trials=3"
    )


def test_trials_tell_shares_from_wholes():
    ranking = with_trials(with_shares(), {"data=4": 0.2, "data=4, shard=parameters": 0.1})
    assert [c.name for c in ranking[:2]] == ["data=4, shard=parameters", "data=4"]
    assert [c.measured_seconds for c in ranking[:3]] == [0.1, 0.2, None]


def would_fit(device_memory, costs=None, num_devices=4, refusal=lambda mesh, shard: None, **more):
    choices = Choices(ROWS, device_memory=device_memory, **more)

    def ranked_as(changed, number):
        return rank(costs or shared_out(), number, changed, ALONE, refusal=refusal)

    ranking = ranked_as(choices, num_devices)
    assert ranking[0].why_not is not None
    suggested = remedies(ranking, choices, num_devices, ranked_as)
    for remedy in suggested:  # Each is enough by itself.
        values, number = {}, num_devices
        if remedy.name == "global_batch_size":
            values = {"batch_size": remedy.value}
        elif remedy.name == "num_devices":
            number = remedy.value
        elif remedy.name == "device_memory":
            values = {"device_memory": parse_bytes(str(remedy).split(" per device")[0][5:])}
        elif remedy.name == "recompute":
            values = {"recompute": remedy.value}
        else:
            values = {"parallelism": "auto"}
        (first, *_) = ranked_as(dataclasses.replace(choices, **values), number)
        assert first.why_not is None, remedy
    return {remedy.name: remedy for remedy in suggested}


def test_what_would_fit_is_computed():
    by_flag = would_fit(300)
    assert {name: remedy.value for name, remedy in by_flag.items()} == {
        "recompute": "always",
        "global_batch_size": 24,
        "num_devices": 8,
        "device_memory": 316,
    }
    assert str(by_flag["device_memory"]) == "with 316 B per device (pipeline=4)"
    assert str(by_flag["num_devices"]).startswith("on 8 devices (")
    assert str(by_flag["global_batch_size"]).startswith("with --global_batch_size=24 (")
    assert by_flag["recompute"].as_json()["recompute"] == "always"
    assert set(would_fit(60)) == {"device_memory"}  # A layer's weights alone are more.


def test_layers_on_devices_may_fit_as_shares():
    """One layer, whose weight no two stages divide."""
    costs = shared_out()
    large = dataclasses.replace(
        costs.layers[0], parameter_bytes=4000, trained_bytes=4000, shared_bytes=(25,) * 160
    )
    costs = dataclasses.replace(costs, layers=[large, *costs.layers[1:]])
    by_flag = would_fit(2800, costs, parallelism="model", balances=("memory",))
    assert by_flag["shard"].candidate.name == "data=4, shard=parameters"
    assert str(by_flag["shard"]).startswith("with --shard=parameters (data=4, shard=parameters: ")
    assert "recompute" not in by_flag and "num_devices" not in by_flag
