"""What differs between workers, and how it is said."""

from hypothesis import given
from hypothesis import strategies as st

from tfparallel.cluster import differences


def test_agreeing_workers_have_no_differences():
    facts = {"seed": 7, "versions": {"tensorflow": "2.21.0"}, "flags": [1, None, True]}
    assert differences.differences({0: facts, 1: dict(reversed(facts.items()))}) == []
    assert differences.differences({0: facts}) == []


def test_groups_workers_by_value():
    facts = {0: {"seed": 7}, 1: {"seed": 8}, 2: {"seed": 7}, 3: {"seed": 8}, 4: {"seed": 8}}
    expected = "seed: 7 on workers 0 and 2; 8 on workers 1, 3 and 4"
    assert differences.differences(facts) == [expected]


def test_points_at_the_leaf():
    facts = {
        0: {"versions": {"tensorflow": "2.21.0", "keras": "3.15.1"}, "workers": ["a:1", "b:1"]},
        1: {"versions": {"tensorflow": "2.20.0", "keras": "3.15.1"}, "workers": ["a:1", "c:1"]},
    }
    assert differences.differences(facts) == [
        "versions.tensorflow: '2.21.0' on worker 0; '2.20.0' on worker 1",
        "workers[1]: 'b:1' on worker 0; 'c:1' on worker 1",
    ]


def test_a_key_that_one_worker_lacks():
    facts = {0: {"workers": ["a:1", "b:1"]}, 1: {"workers": ["a:1"], "seed": None}}
    assert differences.differences(facts) == [
        "workers[1]: 'b:1' on worker 0; nothing on worker 1",
        "seed: nothing on worker 0; None on worker 1",
    ]


def test_types_count():
    lines = differences.differences({0: {"x": 1}, 1: {"x": 1.0}, 2: {"x": True}, 3: {"x": "1"}})
    assert lines == ["x: 1 on worker 0; 1.0 on worker 1; True on worker 2; '1' on worker 3"]
    assert differences.differences({0: {"x": float("nan")}, 1: {"x": float("nan")}}) == []
    assert len(differences.differences({0: {"x": {}}, 1: {"x": []}})) == 1


def test_may_differ():
    facts = {0: {"pid": {"a": 1}, "seed": 7}, 1: {"pid": {"a": 2}, "seed": 7}}
    assert differences.differences(facts, may_differ=["pid"]) == []
    assert len(differences.differences(facts)) == 1


def test_a_long_value_is_cut_to_where_it_differs():
    start = "/home/a/" + "deep/" * 50
    facts = {0: {"file": start + "one.py"}, 1: {"file": start + "two.py"}}
    (line,) = differences.differences(facts)
    assert "one.py' on worker 0" in line and "two.py' on worker 1" in line
    assert len(line) < 200


def test_many_values_are_counted():
    lines = differences.differences({worker: {"seed": worker} for worker in range(64)})
    assert lines == [
        "seed: 0 on worker 0; 1 on worker 1; 2 on worker 2; 3 on worker 3; "
        "60 more values on the others"
    ]


def test_many_differences_are_counted():
    facts = {worker: {f"key{i}": worker for i in range(20)} for worker in range(2)}
    lines = differences.differences(facts)
    assert len(lines) == 9 and lines[-1] == "and 12 more differences"


@given(st.dictionaries(st.text("ab", min_size=1), st.integers(0, 2)), st.integers(0, 3))
def test_every_changed_key_is_told(facts, odd_one):
    other = {key: value + 10 for key, value in facts.items()}
    lines = differences.differences({i: other if i == odd_one else facts for i in range(4)})
    keys = {line.partition(":")[0] for line in lines}
    assert keys == set(facts) if len(facts) <= 8 else len(lines) == 9
    others = differences.name_workers({0, 1, 2, 3} - {odd_one})
    assert all(f"on worker {odd_one}" in line and f"on {others}" in line for line in lines[:8])


def test_names():
    assert differences.name_workers([1]) == "worker 1"
    assert differences.name_workers({2, 0}) == "workers 0 and 2"
    assert differences.name_workers([5, 0, 1]) == "workers 0, 1 and 5"
    assert differences.name_workers(range(64)) == "workers 0 to 63"
    assert differences.name_workers([9, 7, 5, 4, 3, 0]) == "workers 0, 3 to 5, 7 and 9"
    assert differences.name_worker(["a:1", "b:2"], 1) == "worker 1 (b:2)"
    assert differences.name_worker(["a:1"], 7) == "worker 7"
