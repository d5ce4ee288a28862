"""What is submitted to Kubernetes is what it and its add-ons take.

The objects are compared with the models that the projects publish; `test_pods.py` runs the pods.
"""

import json
import re

import pytest
from kubeflow_trainer_api import models
from kubernetes import client

from tests.cluster.emitted_files import (
    AWKWARD,
    KINDS,
    emitted,
    expanded,
    job_set_spec_of,
    job_spec_of,
    objects_of,
    pod_of,
)
from tfparallel.cluster.job_files import JobFile
from tfparallel.cluster.kubernetes_files import kubernetes_objects

TRAINER = "trainer.kubeflow.org/v1alpha1"
# An object's model; those of Kubeflow come with JobSet's.
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def check_known(content, kind=None):
    """Every field must be one of its model's, and of its type."""
    if kind in MODELS:
        assert MODELS[kind].from_dict(content).to_dict() == content
        return
    read = client.ApiClient().deserialize(json.dumps(content), kind, "application/json")
    assert client.ApiClient().sanitize_for_serialization(read) == content


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_objects_are_those_of_the_published_schemas(kind):
    job = JobFile(
        "train",
        AWKWARD,
        ["--nproc_per_node=2"],
        nnodes=3,
        gpus_per_node=2,
        image="example/train:1",
        volume="data:/data",
        queue="team",
        max_restarts=4,
    )
    objects = objects_of(job, kind)
    for name, content in objects.items():
        check_known(content, name if name in MODELS else f"V1{name}")
    spec, (pod, container) = job_spec_of(objects), pod_of(objects)
    check_known(spec, "V1JobSpec")
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 3
    # A policy for failures requires it.
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > job.grace_seconds
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"data": "/data", "shared-memory": "/dev/shm"}
    shared, data = pod["volumes"]
    assert shared["emptyDir"] == {"medium": "Memory"}
    assert data["persistentVolumeClaim"] == {"claimName": "data"}
    # Of the objects, only the one that Kueue admits is in a queue.
    queues = [each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for each in
              objects.values()]  # fmt: skip
    assert queues == [None] * (len(queues) - 1) + ["team"]


@pytest.mark.slow
def test_a_misspelt_field_and_a_wrong_type_are_found():
    job = JobFile("train", ["true"], nnodes=2, image="i")
    for kind, path in {
        "jobset": ["JobSet", "failurePolicy"],
        "trainjob": ["TrainJob", "trainer"],
    }.items():
        content = objects_of(job, kind)[path[0]]
        misspelt = json.loads(json.dumps(content))
        misspelt["spec"][path[1]]["maxRestart"] = 1
        with pytest.raises(AssertionError):
            check_known(misspelt, path[0])
    content["spec"]["trainer"]["numNodes"] = "2"
    with pytest.raises(ValueError, match="numNodes"):
        check_known(content, "TrainJob")


def test_the_pods_of_a_job_are_named_by_its_service():
    objects = objects_of(JobFile("train", ["a"], nnodes=2, image="i"), "kubernetes")
    service, pod = objects["Service"], pod_of(objects)[0]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == job_spec_of(objects)["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_counts_as_a_failure(kind):
    objects = objects_of(JobFile("train", ["a"], nnodes=2, image="i", max_restarts=4), kind)
    spec, container = job_spec_of(objects), pod_of(objects)[1]
    saved, mistake, evicted = spec["podFailurePolicy"]["rules"]
    assert spec["backoffLimit"] == 0
    for rule, action, code in ((saved, "Ignore", 75), (mistake, "FailJob", 2)):
        assert (rule["action"], rule["onExitCodes"]["values"]) == (action, [code])
        assert rule["onExitCodes"]["containerName"] == container["name"]
    assert evicted["action"] == "Ignore"
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    if kind != "kubernetes":
        policy = job_set_spec_of(objects)["failurePolicy"]
        (rule,) = policy["rules"]
        # Of the reasons for which a Job fails, `PodFailurePolicy` is that of `FailJob`.
        assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == [
            "PodFailurePolicy"
        ]
        assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        assert policy["maxRestarts"] == 4


def test_what_kubeflow_trainer_requires_of_a_runtime():
    """Its webhooks and its policy `torch` know these by name."""
    objects = objects_of(JobFile("train", ["a"], nnodes=3, image="i"), "trainjob")
    runtime, train_job = objects["TrainingRuntime"], objects["TrainJob"]
    assert list(objects) == ["Secret", "TrainingRuntime", "TrainJob"]  # A runtime comes first.
    reference = train_job["spec"]["runtimeRef"]
    assert reference["name"] == runtime["metadata"]["name"]
    assert (f"{reference['apiGroup']}/v1alpha1", reference["kind"]) == (TRAINER, "TrainingRuntime")
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "tensorflow"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3, "torch": {}}
    (replicated,) = job_set_spec_of(objects)["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["replicas"] == 1
    assert replicated["name"] == pod_of(objects)[1]["name"] == "node"
    # With another kind it is a runtime for all namespaces.
    cluster_wide = {**runtime, "kind": "ClusterTrainingRuntime"}
    read = models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(cluster_wide)
    assert read.to_dict() == cluster_wide


@pytest.mark.parametrize(
    "word",
    ["yes", "NO", "null", "3", "1e3", "0o7", "a: b", "# c", "", "é", "plain/word.py", "&a", "*a"]
    + ["\U0001f600.py", "two\nlines", "\x07\x85\u2028\ufeff", "a" * 300 + " b", "~", "=", "<<"]
    + ["$(HOME)", "$$", "$$(HOME)", "$HOME", "$", "{a: b}", "- a", "!!int 3", "2026-01-02", " a "],
)
def test_every_word_comes_out_of_kubernetes_as_it_was(word):
    for kind in KINDS:
        objects = objects_of(JobFile("on", ["a", word, "b"], image="i"), kind)
        words = pod_of(objects)[1]["command"]
        if kind == "trainjob":
            words += objects["TrainJob"]["spec"]["trainer"]["args"]
        assert expanded(words, HOME="a value")[-3:] == ["a", word, "b"]
        assert {each["metadata"]["name"] for each in objects.values()} <= {"on", "on-token"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_name_leaves_room_for_that_of_a_pod(kind):
    objects = objects_of(JobFile("a" * 46, ["true"], nnodes=1000, image="i"), kind)
    pod = f"{objects['Secret']['metadata']['labels']['app']}-node-0-999-abcde"
    assert len(pod) == 63
    with pytest.raises(ValueError, match="at most 46 characters"):
        JobFile("a" * 47, ["true"], image="i")


def test_a_train_job_has_a_limit_of_words():
    words = ["python", *map(str, range(128))]
    with pytest.raises(ValueError, match="at most 128 words. Received: 129"):
        kubernetes_objects(JobFile("a", words, image="i"), "trainjob")
    kubernetes_objects(JobFile("a", words, image="i"), "jobset")


def test_the_command_prints_the_objects():
    """By default JobSet restarts three times; launchers do so only where nobody else does."""
    for kind, flags, restarts in (
        ("kubernetes", ["--max_restarts=2"], None),
        ("jobset", [], 3),
        ("jobset", ["--max_restarts=0"], 0),
        ("trainjob", ["--max_restarts=7"], 7),
    ):
        flags = ["--nnodes=2", "--nproc_per_node=gpu", "--image=a/b:1", *flags]
        code, text, errors = emitted(f"--emit={kind}", *flags)
        assert code == 0, errors
        objects = {each["kind"]: each for each in json.loads(text)["items"]}
        words = pod_of(objects)[1]["command"]
        assert {"--nproc_per_node=gpu", "--grace_seconds=60", "--start_timeout=600.0"} <= set(words)
        assert ("--max_restarts=2" in words) == (restarts is None)
        if restarts is not None:
            assert not any("max_restarts" in word for word in words)
            assert job_set_spec_of(objects)["failurePolicy"]["maxRestarts"] == restarts
