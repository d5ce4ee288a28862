"""The axes of a job."""

import dataclasses
import inspect
import pickle

import pytest

from tfparallel.layout.layout import Layout, LayoutError
from tfparallel.layout.mesh import Coordinate, Mesh


@pytest.mark.parametrize(
    "mesh", [Mesh(data=2), Mesh(pipeline=3, tensor=2), Mesh(2, 2, 2)], ids=str
)
def test_a_mesh_is_read_as_it_is_written(mesh):
    assert Mesh.parse(str(mesh)) == mesh
    assert [mesh.index(at) for at in mesh.coordinates()] == list(range(mesh.size))


@pytest.mark.parametrize("text", ["", "data", "data=x", "rows=2", "data=2,data=3", "data=-1"])
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ValueError, match="such as data=2,pipeline=2. Received: "):
        Mesh.parse(text)


def test_an_axis_of_another_name_is_told():
    with pytest.raises(ValueError, match="Received: 'dp=2,x=3'. Here, dp is data.$"):
        Mesh.parse("dp=2,x=3")
    with pytest.raises(TypeError, match="Received: pp=2, rows=3. Here, pp is pipeline.$"):
        Mesh(data=2, pp=2, rows=3)
    with pytest.raises(ValueError, match="Received: data='2'. Drop the quotes"):
        Mesh(data="2")
    assert dataclasses.replace(Mesh(2), tensor=3) == pickle.loads(pickle.dumps(Mesh(2, 1, 3)))
    assert list(inspect.signature(Mesh).parameters) == list(Coordinate._fields)


def test_workers_have_devices_of_the_same_names():
    layout = Layout(Mesh(data=4, pipeline=2), ["CPU:0", "CPU:1", "CPU:2", "CPU:3"],
                    {"a": 0, "b": 1}, workers=2)  # fmt: skip
    assert [layout.device(data=k, pipeline=1) for k in range(4)] == ["CPU:1", "CPU:3"] * 2
    assert Layout.from_json(layout.to_json()) == layout
    assert str(layout).splitlines()[-1].split() == (
        "worker 1 replica 3 stage 1 CPU:3 b".split()
    )
    assert next(iter(Mesh(2).coordinates())) == Coordinate()


def test_workers_share_replicas_evenly():
    with pytest.raises(LayoutError, match="the same number of replicas.*for 2 workers"):
        Layout(Mesh(data=3), ["CPU:0", "CPU:1"], workers=2)
