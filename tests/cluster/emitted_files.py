"""`launch --emit`, workers for the jobs that it describes, and the parts of Kubernetes' objects."""

import json
import re
import subprocess
import sys

from tests.commands.command_line import ROOT
from tfparallel.cluster.kubernetes_files import kubernetes_objects

KINDS = ("kubernetes", "jobset", "trainjob")

LAUNCH = [sys.executable, "-m", "tfparallel", "launch"]
AWKWARD = ["python", "my train.py", "--name=it's", "$HOME", "--epochs=3"]
WORKER = """
import os, sys
from tfparallel.cluster.cluster_spec import Cluster
cluster = Cluster.from_env()
print("worker", cluster.worker_index, "of", cluster.num_workers, sys.argv[1:], flush=True)
sys.exit(int(os.environ.get("ENDS_WITH", 0)))
"""


def emitted(*flags, command=("tfparallel", "train", "models/digits_cnn.py")):
    """The exit code, the file, and the errors."""
    done = subprocess.run(
        [*LAUNCH, *flags, "--", *command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def objects_of(job, kind):
    return {each["kind"]: each for each in json.loads(kubernetes_objects(job, kind))["items"]}


def job_set_spec_of(objects):
    job_set = objects.get("JobSet") or objects["TrainingRuntime"]["spec"]["template"]
    return job_set["spec"]


def job_spec_of(objects):
    if "Job" in objects:
        return objects["Job"]["spec"]
    (replicated,) = job_set_spec_of(objects)["replicatedJobs"]
    return replicated["template"]["spec"]


def pod_of(objects):
    """The pod's spec and its only container."""
    pod = job_spec_of(objects)["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def token_of(objects, variables):
    (variable,) = variables
    source = variable["valueFrom"]["secretKeyRef"]
    assert variable["name"] == "TFPARALLEL_JOB_TOKEN"
    assert source["name"] == objects["Secret"]["metadata"]["name"]
    return objects["Secret"]["stringData"][source["key"]]


def expanded(command, **variables):
    """What Kubernetes makes of a command: of `$$` one `$`, of `$(NAME)` a variable's value."""
    return [
        re.sub(r"\$(\$|\((\w+)\))", lambda match: variables.get(match[2], "$"), part)
        for part in command
    ]
