"""Examines this host, the cluster and the installed versions, and reports what will fail.

TensorFlow runs only in subprocesses (probes.py), with a deadline: if it crashes or hangs at import,
that becomes a finding.
"""

import concurrent.futures
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tfparallel.diagnostics.host import (
    examine_cores,
    examine_disk,
    examine_engine,
    examine_memory,
)
from tfparallel.diagnostics.ray_cluster import examine_ray, names_ray
from tfparallel.diagnostics.reach import examine_cluster
from tfparallel.diagnostics.report import Finding
from tfparallel.installed import version_of
from tfparallel.startup import has_nvidia_gpu

# The probe of each known fault of TensorFlow's own strategy, with a description.
KNOWN_FAULTS = {
    "gradient_accumulation": "gradient_accumulation_steps on 2 devices",
    "steps_per_execution": "steps_per_execution=2 on 2 devices",
    "gradient_clipping": "gradient clipping on 2 devices",
    "uneven_batches": "an uneven batch on 2 devices",
}
TWO_WORKERS = "fit with 2 workers on this host"
_CLUSTER_PROBE = "tfparallel.diagnostics.cluster_probe"
_RAY_PROBE = [sys.executable, "-m", "tfparallel.diagnostics.ray_cluster"]
# Reordered float64 sums stay well below this.
_TOLERANCE = 1e-9


def examine(
    *,
    folder: str | None = None,
    min_free_mib: float | None = None,
    peer_timeout_seconds: float = 3.0,
    probe_timeout_seconds: float = 120.0,
    quick: bool = False,
    upstream: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Yields the findings as they arise; upstream faults come last.

    Args:
        folder: The checkpoint folder; by default the working folder.
        min_free_mib: Free disk space that the job needs; by default little space is only a warning.
        peer_timeout_seconds: How long another worker may take to answer.
        probe_timeout_seconds: How long each TensorFlow subprocess may take.
        quick: Whether to skip the slow probes: known faults, two workers, and a Ray cluster.
        upstream: Whether to also try TensorFlow's own strategy on two workers.
        progress: Called with a description of each slow examination before it starts.
    """
    progress("looking at this host")
    yield from _examine_versions()
    cluster, findings = examine_cluster(peer_timeout_seconds)
    yield from findings
    yield from examine_engine(cluster)
    yield from examine_disk(folder, min_free_mib)
    yield from examine_memory(cluster.num_local_workers)
    yield from examine_cores(cluster.num_local_workers)
    if names_ray() and not quick:
        progress("asking the Ray cluster")
        yield from examine_ray(
            lambda: run_probe(_RAY_PROBE, probe_timeout_seconds), peer_timeout_seconds
        )
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        text = f"KERAS_BACKEND={backend}, but tfparallel trains on TensorFlow"
        yield Finding("TensorFlow", "broken", text, "set KERAS_BACKEND=tensorflow")
        return
    if not quick:
        progress("testing TensorFlow, and two workers on this host")
    faults = {} if quick else KNOWN_FAULTS
    of_workers = [sys.executable, "-m", _CLUSTER_PROBE, "ours", *(["theirs"] if upstream else [])]
    # Each probe keeps about one core busy.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        probe = pool.submit(run_probe, _command("installation", *faults), probe_timeout_seconds)
        workers = None if quick else pool.submit(run_probe, of_workers, probe_timeout_seconds)
    lines, error = probe.result()
    by_probe = {line["probe"]: line for line in lines}
    installation = _installation_findings(by_probe.get("installation"), error)
    yield from installation
    # Without TensorFlow every probe would fail in the same way.
    if workers is None or installation[0].verdict == "broken":
        return
    lines, error_of_workers = workers.result()
    yield _workers_finding(lines[-1] if lines else None, error_of_workers, of_workers)
    for name, what in faults.items():
        yield _fault_finding(what, by_probe.get(name), error, _command(name))


def _examine_versions() -> Iterator[Finding]:
    """Compares the installed versions with the tested ranges from setup.cfg."""
    try:
        metadata = importlib.metadata.metadata("tfparallel")
    except importlib.metadata.PackageNotFoundError:
        text = (
            "tfparallel runs from a folder and is not installed, so the tested versions are "
            "unknown"
        )
        yield Finding("versions", "warn", text, "install it: pip install .")
        return
    installed = {"Python": platform.python_version()}
    required = {"Python": SpecifierSet(metadata["Requires-Python"] or "")}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            installed[requirement.name] = version_of(requirement.name)
            required[requirement.name] = requirement.specifier
    tested = []
    for name, version in installed.items():
        # TensorFlow may be a custom build without metadata; its own probe decides.
        if version is None and name != "tensorflow":
            yield Finding(name, "broken", "not installed", f"pip install {name}")
        elif version is None or required[name].contains(version, prereleases=True):
            tested += [f"{name} {version}"] if version else []
        else:
            yield Finding(
                name,
                "warn",
                f"{version} is not a tested version ({required[name]}): training may fail or give "
                "different results",
                "use another Python"
                if name == "Python"
                else f"pip install '{name}{required[name]}'",
            )
    yield Finding("versions", "ok", ", ".join(tested))


def _installation_findings(result: dict[str, Any] | None, error: str) -> list[Finding]:
    if result is None:
        advice = "reinstall it: pip install --force-reinstall tensorflow keras"
        text = f"it does not start: {error or 'it printed nothing'}"
        return [Finding("TensorFlow", "broken", text, advice)]
    versions = result["versions"]
    text = f"{versions['tensorflow']} with Keras {versions['keras']} runs on "
    findings = [Finding("TensorFlow", "ok", text + ", ".join(result["devices"]))]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if has_nvidia_gpu() and not any(name.startswith("GPU") for name in result["devices"]):
        if hidden is not None:
            text = f"this host has some, but CUDA_VISIBLE_DEVICES={hidden!r} hides them"
            advice = "unset it if that is not intended"
        elif result["cuda"] is None:
            text = "this host has some, but this TensorFlow was built without CUDA"
            advice = "pip install 'tensorflow[and-cuda]'"
        else:
            text = (
                f"this host has some, but TensorFlow, built for CUDA {result['cuda']}, cannot use "
                "them, usually because CUDA libraries are missing"
            )
            advice = "pip install 'tensorflow[and-cuda]', and check the driver with `nvidia-smi`"
        findings.append(Finding("GPUs", "warn", text, advice))
    return findings


def _workers_finding(result, error: str, command: Sequence[str]) -> Finding:
    """Returns the finding of the two-worker probe, with TensorFlow's own strategy if tried."""
    if result is None or "theirs" in result:
        return _fault_finding(TWO_WORKERS, result, error, command)
    finding = _fault_finding(TWO_WORKERS, {**result, "theirs": {"difference": 0.0}}, error, command)
    if finding.verdict == "ok":
        return Finding(
            TWO_WORKERS, "ok", "they connect, and train to the same weights as one device"
        )
    return finding


def _fault_finding(
    what: str, result: dict[str, Any] | None, error: str, command: Sequence[str]
) -> Finding:
    alone = f"to reproduce it, run: {' '.join(command)}"
    if result is None:
        why = error or "it printed nothing"
        return Finding(what, "broken", f"the test did not complete: {why}", alone)
    ours, theirs = _describe(result["ours"]), _describe(result["theirs"])
    if ours is not None:
        return Finding(what, "broken", f"tfparallel {ours}", f"{alone}; then report it")
    if theirs is not None:
        return Finding(
            what,
            "warn",
            f"TensorFlow's own strategy {theirs}; tfparallel trains to the same weights as one "
            "device",
            "replace tf.distribute.… with tfparallel.…",
            is_upstream=True,
        )
    text = "the same weights as on one device, with TensorFlow's own strategy too"
    return Finding(what, "ok", text, is_upstream=True)


def _describe(result) -> str | None:
    """Describes how a training failed; None if it succeeded."""
    if "error" in result:
        return f"fails with {result['error'].partition(':')[0]}"
    if result["difference"] > _TOLERANCE:
        return (
            "silently trains to different weights than one device (largest difference "
            f"{result['difference']:.0e})"
        )
    return None


def run_probe(command: Sequence[str], timeout_seconds: float) -> tuple[list[Any], str]:
    """Runs a process that prints lines of JSON.

    Returns:
        The parsed output, possibly partial; and the reason of a failure, or "".
    """
    # A new session, so that its children can be killed with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = False
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        if process.poll() is None:
            # TensorFlow survives SIGTERM.
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith(("[", "{"))]
    if timed_out:
        return lines, f"no answer in {timeout_seconds:g} s"
    if process.returncode == 0:
        return lines, ""
    if process.returncode < 0:
        reason = f"killed by {signal.Signals(-process.returncode).name}"
        if process.returncode == -signal.SIGILL:
            reason += ", usually because the CPU lacks instructions that it was built for"
    else:
        reason = f"exit code {process.returncode}"
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return lines, ": ".join([reason, *last])


def _command(*names: str) -> list[str]:
    return [sys.executable, "-m", "tfparallel.diagnostics.probes", *names]
