"""`Cluster` and TF_CONFIG: what is read, what is refused, and that nothing else happens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel import Cluster


def tf_config(cluster=None, task=None, **extra):
    parts = {"cluster": cluster, "task": task, **extra}
    return json.dumps({name: part for name, part in parts.items() if part is not None})


def refusal(text):
    with pytest.raises(ValueError) as caught:
        Cluster.from_tf_config(text)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "  \n", "{}", '{"cluster": {}}', '{"cluster": null}', '{"cluster": {}, "task": {}}'],
)
def test_no_workers_is_a_single_process(text):
    cluster = Cluster.from_tf_config(text)
    assert cluster == Cluster()
    assert (cluster.num_workers, cluster.is_chief, cluster.address) == (1, True, None)
    assert cluster.to_tf_config() == "{}"


@pytest.mark.parametrize("task", [None, {}, {"type": "worker", "index": 0}])
def test_one_worker_is_valid(task):
    cluster = Cluster.from_tf_config(tf_config({"worker": ["host:2222"]}, task))
    assert cluster.workers == ("host:2222",)
    assert (cluster.num_workers, cluster.is_chief, cluster.address) == (1, True, "host:2222")


def test_a_task_without_a_cluster():
    assert Cluster.from_tf_config(tf_config(task={"type": "worker", "index": 0})) == Cluster()
    message = refusal(tf_config(task={"type": "worker", "index": 1}))
    assert "task's index must be from 0 to 0 for a worker, not 1" in message


def test_workers():
    text = tf_config(
        {"worker": ["a:1", "b:1", "b:2"]},
        {"type": "worker", "index": 2, "trial": "7"},
        environment="cloud",
        rpc_layer="grpc",
        job={"job_name": "x"},
    )
    cluster = Cluster.from_tf_config(text)
    assert cluster.workers == ("a:1", "b:1", "b:2")
    assert (cluster.worker_index, cluster.num_workers, cluster.address) == (2, 3, "b:2")
    assert (cluster.local_rank, cluster.num_local_workers) == (1, 2)
    assert not cluster.is_chief
    assert (cluster.task_type, cluster.task_index, cluster.source) == ("worker", 2, "TF_CONFIG")


def test_the_chief_is_worker_0():
    jobs = {"chief": ["c:1"], "worker": ["w:1", "w:2"]}
    chief = Cluster.from_tf_config(tf_config(jobs, {"type": "chief", "index": 0}))
    second = Cluster.from_tf_config(tf_config(jobs, {"type": "worker", "index": 1}))
    assert chief.workers == second.workers == ("c:1", "w:1", "w:2")
    assert (chief.worker_index, chief.is_chief, chief.task_type) == (0, True, "chief")
    assert (second.worker_index, second.is_chief, second.task_index) == (2, False, 1)
    assert json.loads(second.to_tf_config()) == {
        "cluster": jobs,
        "task": {"type": "worker", "index": 1},
    }


def test_the_evaluator_is_no_worker():
    jobs = {"worker": ["w:1", "w:2"], "evaluator": ["e:1"]}
    cluster = Cluster.from_tf_config(tf_config(jobs, {"type": "evaluator", "index": 0}))
    assert (cluster.num_workers, cluster.is_evaluator, cluster.is_chief) == (2, True, False)
    assert cluster.address == "e:1"
    # TensorFlow lets it be left out of the cluster that it watches.
    outside = Cluster.from_tf_config(
        tf_config({"worker": ["w:1"]}, {"type": "evaluator", "index": 0})
    )
    assert (outside.is_evaluator, outside.address) == (True, None)
    assert Cluster.from_tf_config(outside.to_tf_config()) == outside


TASK = {"type": "worker", "index": 0}
TWO = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{'cluster': {}}", "it is not valid JSON: Expecting property name"),
        ("[1]", "it must be an object in braces, not [1]"),
        ("[" * 100_000, "it is not valid JSON"),
        ('{"cluster": {}, "cluster": {}}', "the key 'cluster' appears 2 times"),
        (tf_config(TWO), "task has no 'type'"),
        (tf_config(TWO, {"type": "worker"}), "task has no 'index'"),
        (tf_config(TWO, {"index": 0}), "task has no 'type'"),
        (tf_config(TWO, {**TASK, "id": 3}), "task has unknown keys: 'id'; known ones are type"),
        (tf_config(TWO, TASK, clusters={}), "the text has unknown keys: 'clusters'; known ones"),
        (tf_config(TWO, "worker"), "task must be an object in braces, not 'worker'"),
        (tf_config(["a:1"], TASK), "cluster must be an object in braces, not ['a:1']"),
        (tf_config(TWO, TASK, rpc_layer="verbs"), "rpc_layer must be 'grpc', not 'verbs'"),
        (tf_config(TWO, {"type": "ps", "index": 0}), "not 'ps': parameter servers are only for"),
        (tf_config(TWO, {"type": "master", "index": 0}), "'master': TensorFlow now calls it"),
        (tf_config(TWO, {"type": ["worker"], "index": 0}), "task's type must be one of chief"),
        (tf_config({**TWO, "ps": ["p:1"]}, TASK), "cluster has 'ps': parameter servers are only"),
        (tf_config({**TWO, "tpu": ["p:1"]}, TASK), "cluster has 'tpu': an unknown job; known"),
        (tf_config(TWO, {"type": "worker", "index": 2}), "from 0 to 1 for a worker, not 2"),
        (tf_config(TWO, {"type": "worker", "index": -1}), "from 0 to 1 for a worker, not -1"),
        (tf_config(TWO, {"type": "worker", "index": "0"}), "without quotes, not '0'"),
        (tf_config(TWO, {"type": "worker", "index": True}), "a whole number without quotes"),
        (tf_config(TWO, {"type": "chief", "index": 0}), "task is a chief, but cluster lists none"),
        (tf_config({"worker": []}, TASK), "cluster['worker'] is empty; list at least one"),
        (tf_config({"evaluator": ["e:1"]}, TASK), "cluster lists no worker; 'worker' must list"),
        (tf_config({"worker": "a:1"}, TASK), "cluster['worker'] must be a list of 'host:port'"),
        (tf_config({"worker": {"0": "a:1"}}, TASK), "cluster['worker'] must be a list of"),
        (tf_config({"chief": ["a:1", "b:1"]}, TASK), "cluster has 2 chiefs; there can be only one"),
        (tf_config({**TWO, "evaluator": ["c:1", "d:1"]}, TASK), "cluster has 2 evaluators"),
        (tf_config({"worker": ["a:1", 5]}, TASK), "cluster['worker'][1] must be a string"),
        (tf_config({"worker": ["a:1", "A:1"]}, TASK), "[1] and cluster['worker'][0] have the same"),
        (tf_config({"worker": ["localhost:1", "127.0.0.1:1"]}, TASK), "have the same address"),
        (tf_config({"chief": ["a:1"], "worker": ["a:1"]}, TASK), "['worker'][0] and cluster['chi"),
        (tf_config({**TWO, "evaluator": ["b:1"]}, TASK), "cluster['evaluator'][0] and cluster"),
    ],
)  # fmt: skip
def test_what_is_refused(text, words):
    message = refusal(text)
    assert words in message
    assert message.startswith("TF_CONFIG cannot be used:")
    assert "Received: TF_CONFIG=" in message
    assert message.endswith('"task": {"type": "worker", "index": 0}}.')


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("host", "it has no port"),
        (":80", "it has no host"),
        ("host:", "its port must be a number from 1 to 65535, not ''"),
        ("host:0", "not '0'"),
        ("host:65536", "not '65536'"),
        ("host:+80", "not '+80'"),
        ("host:080", "not '080'"),
        ("host:٣", "not '٣'"),
        ("grpc://host:80", "without a protocol prefix"),
        ("::1:80", "write an IPv6 address in brackets, as in '[::1]:80'"),
        ("[::1]", "it has no port"),
        ("[::g]:80", "'::g' is not a valid IPv6 address"),
        ("10.0.0.256:80", "'10.0.0.256' is not a valid host name or IPv4 address"),
        ("a b:80", "'a b' is not a valid host name"),
        ("-a:80", "'-a' is not a valid host name"),
        ("a..b:80", "'a..b' is not a valid host name"),
        ("a" * 64 + ":80", "is not a valid host name"),
        (" a:80", "' a' is not a valid host name"),
        ("a:80\n", "its port must be"),
    ],
)
def test_malformed_addresses(address, words):
    assert words in refusal(tf_config({"worker": ["ok:1", address]}, TASK))
    with pytest.raises(ValueError, match=r"workers\[1\]"):
        Cluster(workers=("ok:1", address))


@pytest.mark.parametrize(
    "address",
    ["host:1", "a.b-c_d.example.com:65535", "10.0.0.1:2222", "[::1]:80", "[fe80::1%eth0]:80",
     "h.:1", "xn--bcher-kva.example:80"],
)
def test_well_formed_addresses(address):
    assert Cluster((address,)).address == address


def test_all_problems_come_in_one_error():
    message = refusal(
        tf_config(
            {"worker": ["a", "b:1", "b:1"], "ps": ["p:1"]}, {"type": "worker", "index": 9}, foo=1
        )
    )
    assert message.count("\n  - ") == 5
    for words in ("unknown keys: 'foo'", "'ps'", "no port", "same address", "from 0 to 2"):
        assert words in message


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        tf_config({"worker": ["a" * 100_000]}, TASK),
        tf_config({"worker": ["a"] * 10_000}, TASK),
        tf_config(TWO, TASK, **{f"key{index}": index for index in range(10_000)}),
    ],
    ids=["no JSON", "long address", "many addresses", "many keys"],
)
def test_a_long_text_is_cut(text):
    message = refusal(text)
    assert f"({len(text)} characters)" in message
    assert len(message) < 5000


@pytest.mark.parametrize("text", [None, b"{}", {"cluster": {}}])
def test_only_text_is_read(text):
    assert "use json.dumps()" in refusal(text)


def test_the_constructor_checks_too():
    with pytest.raises(ValueError) as caught:
        Cluster(("a:1", "a:1"), 2, local_rank=1, evaluators=("e",), names_chief=True)
    message = str(caught.value)
    for words in ("same address", "evaluators[0], 'e'", "worker_index must be a whole number from "
                  "0 to 1", "local_rank must be a whole number from 0 to 0"):
        assert words in message
    assert "Received: workers=('a:1', 'a:1'), worker_index=2" in message
    for wrong in ({"workers": "a:1"}, {"worker_index": True}, {"num_local_workers": 0},
                  {"names_chief": True}, {"is_evaluator": True, "workers": ("a:1", "b:1"),
                                          "worker_index": 1}):
        with pytest.raises(ValueError, match="Received:"):
            Cluster(**wrong)


def test_it_is_frozen_and_hashable():
    cluster = Cluster(["a:1", "b:1"], 1)
    assert cluster in {Cluster(("a:1", "b:1"), 1, source="Slurm")}
    with pytest.raises(AttributeError):
        cluster.worker_index = 0


hosts = st.sampled_from(["a", "b.example", "10.0.0.1", "[::1]", "localhost"])
addresses = st.builds("{}:{}".format, hosts, st.integers(1, 65535))


@st.composite
def clusters(draw):
    named = draw(
        st.lists(addresses, min_size=1, max_size=6, unique_by=lambda address: address[-5:])
    )
    has_evaluator = len(named) > 1 and draw(st.booleans())
    workers = tuple(named[:-1] if has_evaluator else named)
    is_evaluator = draw(st.booleans())
    return Cluster(
        workers=workers,
        worker_index=0 if is_evaluator else draw(st.integers(0, len(workers) - 1)),
        evaluators=tuple(named[-1:]) if has_evaluator else (),
        is_evaluator=is_evaluator,
        names_chief=draw(st.booleans()),
    )


def taking_part(cluster):
    names = ("workers", "worker_index", "evaluators", "is_evaluator", "names_chief")
    return {name: getattr(cluster, name) for name in names}


@settings(deadline=None, max_examples=200)
@given(clusters())
def test_round_trip(cluster):
    text = cluster.to_tf_config()
    again = Cluster.from_tf_config(text)
    assert taking_part(again) == taking_part(cluster)
    assert Cluster.from_tf_config(again.to_tf_config()) == again
    # What TensorFlow itself reads is the same.
    jobs = json.loads(text)["cluster"]
    assert [*jobs.get("chief", []), *jobs.get("worker", [])] == list(cluster.workers)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | addresses,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=5,
)


def mostly(good):
    return st.one_of(good, good, good, junk)


jobs = mostly(st.lists(mostly(addresses), max_size=4))


def spoiled(config, path, value):
    """A good TF_CONFIG with one thing in it replaced."""
    config = json.loads(config)
    part = config
    for step in path[:-1]:
        part = part.setdefault(step, {})
    part[path[-1]] = value
    return json.dumps(config)


paths = st.sampled_from(
    [("cluster",), ("task",), ("cluster", "worker"), ("cluster", "chief"), ("cluster", "ps"),
     ("task", "type"), ("task", "index"), ("rpc_layer",), ("other",)]
)  # fmt: skip
good = clusters().map(Cluster.to_tf_config)
texts = st.one_of(
    good,
    st.builds(spoiled, good, paths, junk),
    st.text(max_size=40),
    st.dictionaries(
        st.sampled_from(["cluster", "task", "rpc_layer", "environment", "foo"]), junk
    ).map(json.dumps),
    st.fixed_dictionaries(
        {
            "cluster": mostly(
                st.dictionaries(
                    st.sampled_from(["worker", "worker", "chief", "evaluator", "ps"]), jobs
                )
            ),
            "task": mostly(
                st.fixed_dictionaries(
                    {
                        "type": mostly(st.sampled_from(["worker", "chief", "evaluator", "ps"])),
                        "index": mostly(st.integers(-1, 3)),
                    }
                )
            ),
        }
    ).map(json.dumps),
)
cut = st.tuples(texts, st.integers(0, 400)).map(lambda pair: pair[0][: pair[1]])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(texts | cut)
def test_every_text_is_read_or_refused(text):
    try:
        cluster = Cluster.from_tf_config(text)
    except ValueError as error:
        assert "Received: TF_CONFIG=" in str(error)
    else:
        assert 0 <= cluster.worker_index < cluster.num_workers
        assert Cluster.from_tf_config(cluster.to_tf_config()) == cluster
