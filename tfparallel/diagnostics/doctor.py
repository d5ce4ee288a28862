"""Looks at this host, this cluster and these versions, and says what will fail.

TensorFlow is loaded in processes of its own alone (probes.py), with a deadline:
where it crashes or hangs at its start, that is a finding and not the end.
"""

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tfparallel.diagnostics.finding import Finding
from tfparallel.diagnostics.host import examine_cores, examine_disk, examine_memory
from tfparallel.diagnostics.reach import examine_cluster
from tfparallel.startup import has_nvidia_gpu

__all__ = ["KNOWN_FAULTS", "examine", "run_probe"]

# The probe of each known fault, and what it is that TensorFlow's own strategy does.
KNOWN_FAULTS = {
    "gradient_accumulation": "gradient_accumulation_steps on 2 devices",
    "steps_per_execution": "steps_per_execution=2 on 2 devices",
    "gradient_clipping": "gradient clipping on 2 devices",
    "uneven_batches": "a batch that 2 devices do not divide",
    "two_workers": "fit on 2 workers of this host",
}
# In float64 the order of a sum makes no such difference.
_TOLERANCE = 1e-9


def examine(
    *,
    folder: str | None = None,
    min_free_mib: float | None = None,
    peer_timeout_seconds: float = 3.0,
    probe_timeout_seconds: float = 120.0,
    quick: bool = False,
) -> Iterator[Finding]:
    """Yields the findings one by one, as they are found.

    Args:
        folder: Where checkpoints go; by default the working folder.
        min_free_mib: How much free disk the job needs; by default little is a warning only.
        peer_timeout_seconds: How long another worker may take to answer.
        probe_timeout_seconds: How long each process with TensorFlow may take.
        quick: Whether to leave out the known faults, which are tried for seconds each.
    """
    yield from _examine_versions()
    cluster, findings = examine_cluster(peer_timeout_seconds)
    yield from findings
    yield from examine_disk(folder, min_free_mib)
    yield from examine_memory(cluster.num_local_workers)
    yield from examine_cores(cluster.num_local_workers)
    installation = _examine_installation(probe_timeout_seconds)
    yield from installation
    # Without TensorFlow every one of them fails, and says nothing new.
    if quick or installation[0].verdict == "broken":
        return
    for name, what in KNOWN_FAULTS.items():
        yield _try_fault(name, what, probe_timeout_seconds)


def _examine_versions() -> Iterator[Finding]:
    """Compares what is installed with what was tested: the ranges that setup.cfg names."""
    try:
        metadata = importlib.metadata.metadata("tfparallel")
    except importlib.metadata.PackageNotFoundError:
        text = "tfparallel runs from a folder that is not installed; no version was promised"
        yield Finding("versions", "warn", text, "install it: pip install .")
        return
    found = {"Python": platform.python_version()}
    required = {"Python": SpecifierSet(metadata["Requires-Python"] or "")}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found[requirement.name] = _version(requirement.name)
            required[requirement.name] = requirement.specifier
    all_well = []
    for name, version in found.items():
        # TensorFlow has other names too (tensorflow-cpu, tf-nightly): its start will tell.
        if version is None and name != "tensorflow":
            yield Finding(name, "broken", "not installed", f"pip install {name}")
        elif version is None or required[name].contains(version, prereleases=True):
            all_well += [f"{name} {version}"] if version else []
        else:
            yield Finding(
                name,
                "warn",
                f"{version} was not tested ({required[name]} was): results may differ, or fail",
                "another Python" if name == "Python" else f"pip install '{name}{required[name]}'",
            )
    yield Finding("versions", "ok", ", ".join(all_well))


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_installation(timeout_seconds: float) -> list[Finding]:
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        text = f"KERAS_BACKEND={backend}, and tfparallel trains on TensorFlow"
        return [Finding("TensorFlow", "broken", text, "set KERAS_BACKEND=tensorflow")]
    found, error = _probe("installation", timeout_seconds)
    if found is None:
        advice = "reinstall it: pip install --force-reinstall tensorflow keras"
        return [Finding("TensorFlow", "broken", f"it does not start: {error}", advice)]
    versions = found["versions"]
    text = f"{versions['tensorflow']} with Keras {versions['keras']} computes on "
    findings = [Finding("TensorFlow", "ok", text + ", ".join(found["devices"]))]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if has_nvidia_gpu() and not any(name.startswith("GPU") for name in found["devices"]):
        if hidden is not None:
            text = f"this host has some, and CUDA_VISIBLE_DEVICES={hidden!r} hides them"
            advice = "unset it, if that is not meant"
        elif found["cuda"] is None:
            text = "this host has some, and this TensorFlow was built without CUDA"
            advice = "pip install 'tensorflow[and-cuda]'"
        else:
            text = (
                f"this host has some, and TensorFlow, built for CUDA {found['cuda']}, cannot "
                "use them, most often for want of the CUDA libraries"
            )
            advice = "pip install 'tensorflow[and-cuda]', and compare `nvidia-smi`"
        findings.append(Finding("GPUs", "warn", text, advice))
    return findings


def _try_fault(name: str, what: str, timeout_seconds: float) -> Finding:
    found, error = _probe(name, timeout_seconds)
    if found is None:
        advice = f"see it by itself: {' '.join(_command(name))}"
        return Finding(what, "broken", f"it could not be tried: {error}", advice)
    ours, theirs = _describe(found["ours"]), _describe(found["theirs"])
    if ours is not None:
        return Finding(
            what,
            "broken",
            f"tfparallel {ours}",
            f"see it by itself: {' '.join(_command(name))}; then report it",
        )
    if theirs is not None:
        return Finding(
            what,
            "warn",
            f"TensorFlow's own strategy {theirs}; tfparallel trains to the weights of one device",
            "write tfparallel.… where you wrote tf.distribute.…",
        )
    return Finding(what, "ok", "the weights of one device, by TensorFlow's own strategy too")


def _describe(result) -> str | None:
    """Says how a training went wrong; None if it went right."""
    if "error" in result:
        return f"fails with {result['error'].partition(':')[0]}"
    if result["difference"] > _TOLERANCE:
        return (
            "trains to other weights than one device, without a word (largest difference "
            f"{result['difference']:.0e})"
        )
    return None


def _probe(name: str, timeout_seconds: float) -> tuple[dict | None, str]:
    """Runs a probe; returns what it found, or None and why it found nothing."""
    lines, error = run_probe(_command(name), timeout_seconds)
    if not error and lines:
        return lines[-1], ""
    return None, error or "it printed nothing"


def run_probe(command: Sequence[str], timeout_seconds: float) -> tuple[list[Any], str]:
    """Runs a process that prints lines of JSON.

    Returns:
        What it printed, as far as it came; and why it did not end well, or nothing.
    """
    # A session of its own, so that its children go with it.
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
        shown, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        if process.poll() is None:
            # TensorFlow survives SIGTERM.
            os.killpg(process.pid, signal.SIGKILL)
            shown, errors = process.communicate()
    lines = [json.loads(line) for line in shown.splitlines() if line.startswith(("[", "{"))]
    if timed_out:
        return lines, f"no answer in {timeout_seconds:g} s"
    if process.returncode == 0:
        return lines, ""
    if process.returncode < 0:
        reason = f"killed by {signal.Signals(-process.returncode).name}"
        if process.returncode == -signal.SIGILL:
            reason += ", as on a processor without the instructions that it was built for"
    else:
        reason = f"exit code {process.returncode}"
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return lines, ": ".join([reason, *last])


def _command(name):
    return [sys.executable, "-m", "tfparallel.diagnostics.probes", name]
