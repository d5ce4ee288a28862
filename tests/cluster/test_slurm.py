"""Slurm's shorthand, written out."""


import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfparallel.cluster import slurm


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("a,b-1,c", ["a", "b-1", "c"]),
        ("node[01-04,07],gpu-a1", ["node01", "node02", "node03", "node04", "node07", "gpu-a1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[0-1]n[2,4]", ["r0n2", "r0n4", "r1n2", "r1n4"]),
        ("n[1-2]-ib,m[3].site", ["n1-ib", "n2-ib", "m3.site"]),
    ],
)
def test_node_lists(text, nodes):
    assert slurm.expand_node_list(text) == nodes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has an empty name between commas"),
        ("a,,b", "it has an empty name between commas"),
        ("a[1-2", "its brackets do not match in 'a[1-2'"),
        ("a1]", "its brackets do not match"),
        ("a[[1]]", "its brackets do not match"),
        ("a[]", "'' in its brackets is not a range"),
        ("a[x-y]", "'x-y' in its brackets is not a range"),
        ("a[4-2]", "the range 4-2 in its brackets runs backwards"),
        ("a[1-99999999999]", "more than 100000 nodes"),
        ("a[1-999][1-999]", "more than 100000 nodes"),
        ("a[" * 30_000, "its brackets do not match"),
        ("," * 100_000, "empty"),
    ],
)
def test_what_is_no_node_list(text, words):
    with pytest.raises(ValueError) as caught:
        slurm.expand_node_list(text)
    assert words in str(caught.value)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True), st.integers(1, 6))
def test_a_list_in_brackets_is_the_list(numbers, width):
    nodes = [f"n{number:0{width}d}" for number in numbers]
    inside = ",".join(node[1:] for node in nodes)
    assert slurm.expand_node_list(f"n[{inside}]") == nodes == slurm.expand_node_list(
        ",".join(nodes)
    )


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_tasks_per_node(text, counts):
    assert slurm.expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x3", "-1", "1,,1", "1(x999999)"])
def test_an_invalid_count_of_tasks_raises(text):
    with pytest.raises(ValueError):
        slurm.expand_tasks_per_node(text)


def test_places():
    assert slurm.place_tasks([2, 1, 2], "") == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert slurm.place_tasks([2, 1, 2], "block:cyclic") == slurm.place_tasks([2, 1, 2], "block")
    assert slurm.place_tasks([2, 1, 2], "cyclic") == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)]
    with pytest.raises(ValueError, match="--distribution=plane=2"):
        slurm.place_tasks([2, 2], "plane=2")


def test_ports_of_jobs_that_share_a_node_differ():
    taken = [
        slurm.base_port(job, step, 8) + local
        for job in range(77_000, 77_100)
        for step in range(3)
        for local in range(8)
    ]
    assert len(set(taken)) == len(taken)
    assert min(taken) >= 13_000
    # Below the ports of Kubernetes' services and of Linux's outgoing connections.
    assert max(taken) < 29_000
