"""Tries this host's GPUs: `make test-gpu`, or `python -m tests.gpu.run`.

Each trial (trials.py) is a process of its own with a deadline: one that crashes or hangs is
a finding, and the next one runs.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfparallel.diagnostics.doctor import run_probe
from tfparallel.diagnostics.report import Finding, versions, worst, write_report
from tfparallel.startup import has_nvidia_gpu

TRIALS = (
    "hardware",
    "sums",
    "parity",
    "compiled",
    "summed_by_xla",
    "precision",
    "workers",
    "lost_workers",
    "speed_of_resnet50",
    "speed_of_transformer",
    "profile",
)
MISSING = (
    "skipped: an NVIDIA GPU that TensorFlow sees is required, and this host shows none "
    "(--device_type=cpu runs the trials on logical CPUs)"
)
_VERDICTS = {"ok": "ok", "skipped": "ok", "broken": "broken"}


def gpu_is_missing(device_type: str) -> bool:
    """Returns whether there is nothing to try."""
    return device_type != "cpu" and not has_nvidia_gpu()


def examine_gpus(
    device_type: str,
    timeout_seconds: float,
    names: Sequence[str] = TRIALS,
    total_seconds: float = math.inf,
) -> Iterator[Finding]:
    """Yields a finding for each row of each trial, and for each trial that was left out.

    Args:
        device_type: `"gpu"`; or `"cpu"`, to run the trials on logical CPUs.
        timeout_seconds: How long each trial may take.
        names: Which of `TRIALS`.
        total_seconds: How long all of them may take. What is left then is a warning.
    """
    end = time.monotonic() + total_seconds
    for name in names:
        alone = f"run it by itself: python -m tests.gpu.run --trials={name}"
        seconds = min(timeout_seconds, end - time.monotonic())
        if seconds <= 0:
            text = f"left out: all trials may take {total_seconds:g} s together"
            yield Finding(name, "warn", text, alone)
            continue
        command = [sys.executable, "-m", "tests.gpu.trials", name, device_type]
        lines, error = run_probe(command, seconds)
        begun, last = "", ""
        for line in lines:
            what, *came = line
            if not came:
                begun = what
                continue
            begun, last = "", what
            verdict, text = came
            meaning = f"skipped: {text}" if verdict == "skipped" else text
            yield Finding(f"{name}: {what}", _VERDICTS[verdict], meaning)
        if not error and last:
            continue
        what = f"{name}: {begun}" if begun else name
        if error and time.monotonic() >= end:
            text = f"cut off: all trials may take {total_seconds:g} s together"
            yield Finding(what, "warn", text, alone)
        else:
            after = f" after '{last}'" if last and not begun else ""
            advice = f"see it by itself: {' '.join(command)}"
            yield Finding(what, "broken", f"it did not end{after}: {error or 'no rows'}", advice)


def page(report: dict[str, Any]) -> str:
    """Returns a report as a page of Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        "# tfparallel on these GPUs",
        "",
        f"`make test-gpu`: {report['verdict']}. {versions}.",
        "",
        "| trial | verdict | what came of it |",
        "| --- | --- | --- |",
    ]
    for finding in report["findings"]:
        text = json.dumps(finding["meaning"], ensure_ascii=False)[1:-1].replace("|", "\\|")
        lines.append(f"| {finding['check']} | {finding['verdict']} | {text[:300]} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries what the arguments say; returns 1 if something is broken."""
    parser = argparse.ArgumentParser(description="Tries every parallelism on this host's GPUs.")
    parser.add_argument("--trials", default=",".join(TRIALS), help="which, by commas")
    parser.add_argument("--device_type", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--trial_timeout", type=float, default=600.0, help="seconds of each")
    parser.add_argument("--total_timeout", type=float, default=900.0, help="seconds of all")
    parser.add_argument("--report", type=pathlib.Path, help="a file (.json), and a page beside it")
    options = parser.parse_args(arguments)
    names = options.trials.split(",")
    if unknown := set(names) - set(TRIALS):
        parser.error(f"--trials must be of {', '.join(TRIALS)}. Received: {', '.join(unknown)}.")
    if gpu_is_missing(options.device_type):
        print(MISSING)
        return 0
    findings = []
    for finding in examine_gpus(
        options.device_type, options.trial_timeout, names, options.total_timeout
    ):
        findings.append(finding)
        print(f"{finding.verdict:<6}  {finding.check}: {finding.meaning}", flush=True)
        if finding.advice:
            print(f"        -> {finding.advice}", flush=True)
    verdict = worst(findings)
    print(f"verdict: {verdict}")
    if options.report is not None:
        report = {
            "versions": versions(),
            "verdict": verdict,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        write_report(str(options.report), report)
        options.report.with_suffix(".md").write_text(page(report), encoding="utf-8")
    return 1 if verdict == "broken" else 0


if __name__ == "__main__":
    sys.exit(main())
