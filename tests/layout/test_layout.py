"""What is where, in plain Python: meshes, layouts, and what prints and stores them."""

import json

import pytest

from tfparallel.layout.layout import Layout, LayoutError
from tfparallel.layout.mesh import Coordinate, Mesh

FOUR = ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]


def test_each_place_of_a_mesh_has_its_number():
    mesh = Mesh(data=2, pipeline=3, tensor=4)
    assert mesh.size == 24
    assert [mesh.index(at) for at in mesh.coordinates()] == list(range(24))
    assert list(Mesh(data=2, tensor=2).coordinates())[1:3] == [
        Coordinate(0, 0, 1),
        Coordinate(1, 0, 0),
    ]


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True])
def test_a_mesh_of_no_size(size):
    with pytest.raises(ValueError, match=r"whole number .* Received: data=.*, tensor="):
        Mesh(data=size, pipeline=2, tensor=size)


def test_all_that_does_not_fit_is_said_at_once():
    with pytest.raises(LayoutError) as caught:
        Layout(Mesh(pipeline=3), ["CPU:0", "CPU:0"], {"a": 0, "b": 3}, num_micro_batches=4)
    said = str(caught.value).splitlines()
    assert len(said) == 4
    assert said[0] == "A mesh of pipeline=3 has 3 devices. Received: 2 (CPU:0, CPU:0)."
    assert "Received twice: CPU:0" in said[1] and "'b' in stage 3" in said[2]
    assert "num_micro_batches=4, chunks_per_device=1, schedule=None" in said[3]
    with pytest.raises(LayoutError, match="pipeline=2 without `stages`"):
        Layout(Mesh(pipeline=2), FOUR[:2])


def test_schedules_that_fit_nothing_and_layers_that_come_twice():
    both = Mesh(pipeline=2), FOUR[:2], [("a", 0), ("b", 1), ("a", 1)]
    with pytest.raises(LayoutError) as caught:
        Layout(*both, schedule="1f1b", chunks_per_device=2, recompute="sometimes")
    said = str(caught.value)
    assert "`chunks_per_device` requires schedule='interleaved'" in said
    assert "Received twice: 'a'." in said and "Received: recompute='sometimes'." in said
    for fields in ({"schedule": "foo"}, {"schedule": "gpipe", "num_micro_batches": 0}):
        with pytest.raises(LayoutError, match=r"must be (one of|a whole number)"):
            Layout(Mesh(pipeline=2), FOUR[:2], {"a": 0}, **fields)


def test_replicas():
    layout = Layout(Mesh(data=2), FOUR[:2], reduction="summed on GPU:0")
    assert str(layout) == (
        "data parallel: data=2\n  replica 0  GPU:0\n  replica 1  GPU:1\n"
        "  gradients: summed on GPU:0"
    )
    assert layout.device(data=1) == "GPU:1" and layout.make_schedule() is None


def test_stages_that_alternate():
    stages = {"a": 0, "b": 1, "c": 2, "d": 3}
    layout = Layout(
        Mesh(pipeline=2), FOUR[:2], stages, schedule="interleaved", num_micro_batches=4,
        chunks_per_device=2, recompute="always",
    )  # fmt: skip
    assert layout.num_stages == 4
    assert layout.placement == {"a": "GPU:0", "b": "GPU:1", "c": "GPU:0", "d": "GPU:1"}
    assert str(layout) == (
        "pipeline parallel: pipeline=2, 4 micro-batches by interleaved, recompute=always\n"
        "  stage 0, 2  GPU:0  a; c\n"
        "  stage 1, 3  GPU:1  b; d"
    )
    assert layout.make_schedule().num_stages == 4


def test_of_many_layers_of_a_stage_the_first_and_the_last_are_printed():
    names = [f"conv_{n}" for n in range(1, 31)]
    stages = {name: 0 for name in names} | {f"dense_{n}": 1 for n in range(8)}
    layout = Layout(Mesh(pipeline=2), FOUR[:2], stages)
    assert str(layout) == (
        "model parallel: pipeline=2\n"
        "  stage 0  GPU:0  conv_1 … conv_30 (30 layers)\n"
        "  stage 1  GPU:1  dense_0, dense_1, dense_2, dense_3, dense_4, dense_5, dense_6, dense_7"
    )
    assert layout.to_json()["stages"] == stages


def test_replicas_of_stages_of_parts():
    layout = Layout(
        Mesh(data=2, pipeline=2, tensor=2), [f"GPU:{i}" for i in range(8)], {"up": 0, "down": 1},
        {"up": "column", "down": "row"}, schedule="1f1b", num_micro_batches=2,
    )  # fmt: skip
    lines = str(layout).splitlines()
    assert lines[0] == "hybrid parallel: data=2, pipeline=2, tensor=2, 2 micro-batches by 1f1b"
    assert lines[7] == "  replica 1  stage 1  part 0  GPU:6  down"
    assert lines[-1] == "  split: up by column, down by row"


def test_a_stage_without_a_layer():
    layout = Layout(Mesh(pipeline=2), FOUR[:2], {"a": 0})
    assert str(layout).endswith("stage 1  GPU:1  (no layer)")


def test_a_layout_compares_and_is_stored():
    layout = Layout(
        Mesh(pipeline=2), FOUR[:2], {"a": 0, "b": 1}, schedule="1f1b", num_micro_batches=4
    )
    stored = json.loads(json.dumps(layout.to_json()))
    assert Layout.from_json(stored) == layout and len({layout, Layout.from_json(stored)}) == 1
    assert stored == {
        "mesh": {"data": 1, "pipeline": 2, "tensor": 1, "sequence": 1}, "devices": FOUR[:2],
        "stages": {"a": 0, "b": 1}, "schedule": "1f1b", "num_micro_batches": 4,
    }  # fmt: skip
    assert layout != Layout(Mesh(pipeline=2), FOUR[:2], {"a": 0, "b": 1})
    with pytest.raises(AttributeError):
        layout.schedule = "gpipe"
