"""Who is who in a job with servers of weights."""

import json

import pytest

from tfparallel.cluster.roles import Roles

JOBS = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}


def config(task, **jobs):
    return {"TF_CONFIG": json.dumps({"cluster": {**JOBS, **jobs}, "task": task})}


def test_what_is_written_is_read():
    roles = Roles.from_env(config({"type": "worker", "index": 1}))
    assert roles == Roles("c:1", ("w:1", "w:2"), ("p:1",), "worker", 1)
    assert not roles.is_chief and roles.place_on_host == (1, 2) and roles.jobs == JOBS
    assert Roles.from_env({"TF_CONFIG": roles.to_tf_config()}) == roles


@pytest.mark.parametrize("text", ["", "{", '{"cluster": {"worker": ["w:1"]}}', "[]"])
def test_without_servers_there_are_none(text):
    assert Roles.from_env({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (config({"type": "ps", "index": 1}), "index must be from 0 to 0 for a ps"),
        (config({"type": "evaluator", "index": 0}), "type must be one of chief, worker, ps"),
        (config({"type": "ps", "index": 0}, evaluator=["e:1"]), "cluster has 'evaluator'"),
        (config({"type": "ps", "index": 0}, chief=["c:1", "c:2"]), "cluster has 2 chiefs"),
        (config({"type": "ps", "index": 0}, worker=[]), "cluster['worker'] is empty"),
        (config({"type": "ps", "index": 0}, ps=["w:1"]), "have the same address"),
    ],
)
def test_an_invalid_cluster_with_servers_raises(environ, message):
    with pytest.raises(ValueError, match="TF_CONFIG cannot be used with servers") as caught:
        Roles.from_env(environ)
    assert message in str(caught.value)
