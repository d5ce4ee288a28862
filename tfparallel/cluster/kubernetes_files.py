"""Writes the objects of a job on Kubernetes: an indexed Job, a JobSet, or Kubeflow's TrainJob.

All three run the same pods, one per host, each with a launcher. They differ in who creates the pods
and names them:

    kubernetes   Service, Job                NAME-INDEX.NAME
    jobset       JobSet                      NAME-node-0-INDEX.NAME
    trainjob     TrainingRuntime, TrainJob   as a JobSet, which Kubeflow Trainer creates

A pod that exits with code 75, or that Kubernetes evicts, is replaced by another, and does not
count. Code 2, a mistake in the command, ends the job. After any other failure a JobSet recreates
all pods, `max_restarts` times.

References:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/, "Pod failure policy"
    https://jobset.sigs.k8s.io/docs/concepts/, and docs/tasks/failure_policy/
    https://trainer.kubeflow.org/en/latest/operator-guides/runtime.html, and ml-policy.html
    https://kueue.sigs.k8s.io/docs/tasks/run/, for the label of a queue
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.job_files import ENDS_SECONDS, VOLUME, JobFile
from tfparallel.cluster.preemption import TRY_AGAIN

# The kinds whose pods a JobSet recreates; their launchers do not restart workers.
RESTARTED_BY_JOBSET = ("jobset", "trainjob")

_PORT = 29_500  # Of a pod, which has its own address.
_TOKEN = "TFPARALLEL_JOB_TOKEN"
_TRAINER = "trainer.kubeflow.org"
_NODE = "node"  # The container and the replicated job that Kubeflow Trainer expects.
_USAGE_ERROR = 2
_MOST_ARGUMENTS = 128  # Of a TrainJob.
# Kubeflow's policy for torchrun tells a pod the number of pods and the address of the first, also
# if another TrainJob uses the runtime with another number. Kubernetes expands $(NAME).
_MEET_BY_KUBEFLOW = (
    "--nnodes=$(PET_NNODES)",
    "--rdzv_endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
)


def kubernetes_objects(job: JobFile, kind: str = "kubernetes") -> str:
    """Returns a list of objects for `kubectl apply`, as JSON.

    Args:
        job: The job.
        kind: "kubernetes" for a Service and an indexed Job, "jobset", or "trainjob" for a
            TrainingRuntime and a TrainJob.

    Raises:
        ValueError: If the job does not fit; all problems in one message.
    """
    problems = _problems(job, kind)
    if problems:
        raise ValueError("\n".join(problems))
    objects = _OBJECTS[kind](job)
    # The launchers of a TrainJob may have to meet as well, since its `numNodes` can be changed.
    if job.has_several_hosts or kind == "trainjob":
        secret = _object(job, "v1", "Secret", stringData={"token": job.token})
        secret["metadata"]["name"] = _secret_name(job)
        objects.insert(0, secret)
    if job.queue is not None:
        # Kueue looks at the outermost object only.
        objects[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = job.queue
    # JSON is valid YAML, and its strings cannot be misread as numbers.
    manifest = {"apiVersion": "v1", "kind": "List", "items": objects}
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def _problems(job: JobFile, kind: str) -> list[str]:
    problems = []
    if not job.image:
        problems.append(
            f"--emit={kind} needs --image=NAME, a container image that contains the program and "
            "tfparallel. Received: none."
        )
    if kind == "trainjob" and len(job.command) > _MOST_ARGUMENTS:
        problems.append(
            f"The command of a TrainJob must have at most {_MOST_ARGUMENTS} words. Received: "
            f"{len(job.command)}. Put them into a script, or use --emit=jobset."
        )
    return problems


def _job(job: JobFile) -> list[dict[str, Any]]:
    """A Service, whose DNS names let pods find each other before they are ready, and a Job."""
    service = {"clusterIP": "None", "selector": _labels(job), "publishNotReadyAddresses": True}
    meet = _meet(job, f"{job.name}-0.{job.name}:{_PORT}")
    spec = _job_spec(job, "kubernetes", _launch(job, meet, job.command))
    spec["template"]["spec"]["subdomain"] = job.name
    return [
        _object(job, "v1", "Service", spec=service),
        _object(job, "batch/v1", "Job", spec=spec),
    ]


def _job_set(job: JobFile) -> list[dict[str, Any]]:
    """A JobSet, which creates a headless Service of its own name for its pods."""
    meet = _meet(job, f"{job.name}-{_NODE}-0-0.{job.name}:{_PORT}")
    spec = _job_spec(job, "jobset", _launch(job, meet, job.command))
    return [_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=_job_set_spec(job, spec))]


def _train_job(job: JobFile) -> list[dict[str, Any]]:
    """The runtime, whose pods launch the arguments of a TrainJob, and the TrainJob."""
    spec = _job_spec(job, "trainjob", _launch(job, _MEET_BY_KUBEFLOW, ()))
    template = _job_set_spec(job, spec, {f"{_TRAINER}/trainjob-ancestor-step": "trainer"})
    policy = {"numNodes": job.nnodes, "torch": {}}
    runtime = {"mlPolicy": policy, "template": {"spec": template}}
    train_job = {
        "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": job.name},
        "trainer": {"numNodes": job.nnodes, "args": _literal(job.command), "env": [_token(job)]},
    }
    objects = [
        _object(job, f"{_TRAINER}/v1alpha1", "TrainingRuntime", spec=runtime),
        _object(job, f"{_TRAINER}/v1alpha1", "TrainJob", spec=train_job),
    ]
    objects[0]["metadata"]["labels"][f"{_TRAINER}/framework"] = "tensorflow"
    return objects


_OBJECTS = {"kubernetes": _job, "jobset": _job_set, "trainjob": _train_job}


def _job_set_spec(job, spec, labels=None) -> dict[str, Any]:
    template = {"spec": spec} if labels is None else {"metadata": {"labels": labels}, "spec": spec}
    mistake = {
        "name": "mistakeInTheCommand",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [mistake]},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": template}],
    }


def _job_spec(job: JobFile, kind: str, command: Sequence[str]) -> dict[str, Any]:
    """The spec of an indexed Job, with one pod per host, which runs the command."""
    container: dict[str, Any] = {
        "name": _NODE,
        "image": job.image,
        "command": command,
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    # A container has 64 MiB of shared memory by default, too little for NCCL.
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if job.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(job.gpus_per_node)}}
    if job.volume:
        claim, path = VOLUME.fullmatch(job.volume).groups()
        container["volumeMounts"].append({"name": "data", "mountPath": path})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    if job.has_several_hosts and kind != "trainjob":  # A TrainJob brings its own.
        container["env"] = [_token(job)]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace_seconds + ENDS_SECONDS),
        "containers": [container],
        "volumes": volumes,
    }
    rules = [
        _on_exit("Ignore", TRY_AGAIN),
        _on_exit("FailJob", _USAGE_ERROR),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": job.nnodes,
        "parallelism": job.nnodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(job)}, "spec": pod},
    }


def _on_exit(action, code):
    codes = {"containerName": _NODE, "operator": "In", "values": [code]}
    return {"action": action, "onExitCodes": codes}


def _meet(job, pod_0: str) -> list[str]:
    """The flags with which the launchers find each other."""
    if job.nnodes == 1:
        return []
    return [f"--nnodes={job.nnodes}", f"--rdzv_endpoint={pod_0}", f"--job_name={job.name}"]


def _launch(job, meet: Sequence[str], command: Sequence[str]) -> list[str]:
    flags = [*job.launch_flags, f"--grace_seconds={job.grace_seconds:g}"]
    return ["tfparallel", "launch", *meet, *_literal(flags), "--", *_literal(command)]


def _literal(words: Sequence[str]) -> list[str]:
    """Kubernetes expands $(NAME), and reads $$ as a literal $."""
    return [word.replace("$", "$$") for word in words]


def _object(job, api, kind, **content) -> dict[str, Any]:
    metadata = {"name": job.name, "labels": _labels(job)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _labels(job) -> dict[str, str]:
    return {"app": job.name}


def _secret_name(job) -> str:
    return f"{job.name}-token"


def _token(job) -> dict[str, Any]:
    source = {"secretKeyRef": {"name": _secret_name(job), "key": "token"}}
    return {"name": _TOKEN, "valueFrom": source}
