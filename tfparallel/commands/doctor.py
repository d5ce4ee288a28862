"""`tfparallel doctor`: says what will fail on this host, in this cluster, with these versions."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from absl import flags

from tfparallel.activity import Activity
from tfparallel.commands.flags import (
    Command,
    UsageError,
    parse_flags_alone,
    path_problems,
    resolved,
    run_command,
)
from tfparallel.diagnostics import gpu
from tfparallel.diagnostics.doctor import examine
from tfparallel.diagnostics.finding import VERDICTS, Finding, worst
from tfparallel.diagnostics.report import versions, write_report
from tfparallel.diagnostics.suggestion import suggested, this_machine

__all__ = ["main"]

_COMMAND = Command(
    name="doctor",
    summary="Looks at versions, devices, the cluster that the environment names, ports, peers, "
    "disk, memory and cores, starts TensorFlow and two workers, and says first whether training "
    "works here; known faults of TensorFlow's own strategies come last. With --gpu, tries this "
    "host's GPUs instead. Exit code 1 if something is broken.",
    example="tfparallel doctor --checkpoint_dir=ckpt --report=doctor.json",
    arguments="[--flags]",
)
# Green, yellow, red.
_COLOURS = {"ok": 32, "warn": 33, "broken": 31}


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command("doctor", lambda: _main(arguments), ())


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_bool(
        "quick", False, "Leave out what is tried for seconds each.", flag_values=values
    )
    flags.DEFINE_bool(
        "suggest",
        False,
        "Print the command for this machine instead, with the reason in a line.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "upstream",
        False,
        "Try TensorFlow's own strategy on two workers, too; some ten seconds.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "checkpoint_dir", None, "Where checkpoints will go; else the folder here.", values
    )
    flags.DEFINE_float(
        "min_free_mib", None, "Free disk that the job needs, in MiB; less is broken.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_float(
        "peer_timeout", 3.0, "Seconds that another worker may take to answer.", flag_values=values
    )
    flags.DEFINE_float(
        "probe_timeout",
        None,
        "Seconds that each trial may take; by default 120, and 600 with --gpu.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "total_timeout",
        900.0,
        "With --gpu: seconds that all trials may take; the report names those left out.",
        flag_values=values,
    )
    flags.DEFINE_string("report", None, "Write a report here (.json).", flag_values=values)
    flags.DEFINE_bool(
        "gpu", False, "Try every parallelism on the GPUs, for minutes; with --report, a page, too.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_list("trials", list(gpu.TRIALS), "Which of them, with --gpu.", flag_values=values)
    flags.DEFINE_enum(
        "device_type",
        "gpu",
        ("gpu", "cpu"),
        "With --gpu: cpu runs the trials on logical CPUs.",
        flag_values=values,
    )
    return values


def _problems(values: flags.FlagValues) -> list[str]:
    problems = path_problems("report", values.report, ".json")
    for name in ("peer_timeout", "probe_timeout", "total_timeout"):
        value = values[name].value
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"--{name} must be positive. Received: --{name}={value}.")
    if values.min_free_mib is not None and not 0 <= values.min_free_mib < float("inf"):
        problems.append(
            f"--min_free_mib must not be negative. Received: --min_free_mib={values.min_free_mib}."
        )
    unknown = [name for name in values.trials if name not in gpu.TRIALS]
    if unknown:
        problems.append(
            f"--trials must be of {', '.join(gpu.TRIALS)}. Received: --trials={','.join(unknown)}."
        )
    if not values.gpu:
        problems += [
            f"--{name} is for --gpu. Received: --{name}, without it."
            for name in ("trials", "device_type", "total_timeout")
            if values[name].present
        ]
    return problems


def _main(arguments: Sequence[str]) -> int:
    values = _flags()
    if not parse_flags_alone(_COMMAND, values, _problems, arguments):
        return 0
    if values.suggest:
        return _suggest()
    if values.gpu and gpu.gpu_is_missing(values.device_type):
        print(gpu.MISSING)
        return 0
    findings = []
    if values.gpu:  # For minutes.
        for finding in _examined(values):
            findings.append(finding)
            print(_line(finding), flush=True)
        print(_verdict(findings))
    else:
        with Activity("looking at this host") as activity:
            findings += _examined(values, activity.say)
        print("\n".join(_told(findings)))
    if values.report is not None:
        report = {
            "command": "doctor",
            "configuration": resolved(values),
            "versions": versions(),
            "verdict": worst([finding for finding in findings if not finding.is_upstream]),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        write_report(values.report, report)
        print(f"wrote {values.report}")
        if values.gpu:
            path = values.report.removesuffix(".json") + ".md"
            with open(path, "w", encoding="utf-8") as file:
                file.write(gpu.page(report))
            print(f"wrote {path}")
    return 1 if worst(findings) == "broken" else 0


def _suggest() -> int:
    try:
        found = suggested(this_machine())
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(f"{found.command}\n  why: {found.why}\n{found.then}")
    return 0


def _told(findings: list[Finding]) -> Iterator[str]:
    """The verdict, what is wrong and what is well; then what TensorFlow's strategies do wrong."""
    of_host = [finding for finding in findings if not finding.is_upstream]
    yield _verdict(of_host)
    of_host.sort(key=lambda finding: -VERDICTS.index(finding.verdict))
    yield from map(_line, of_host)
    upstream = [finding for finding in findings if finding.is_upstream]
    faults = [finding for finding in upstream if finding.verdict != "ok"]
    if faults:
        yield ""
        yield (
            "faults of TensorFlow's own strategies, tried here; tfparallel's train to the weights "
            "of one device (write tfparallel.… where you wrote tf.distribute.…):"
        )
        for finding in faults:
            text = finding.meaning.partition(";")[0].removeprefix("TensorFlow's own strategy ")
            yield f"  {finding.check}: {text}"
    for finding in upstream:
        if finding.verdict == "ok":
            yield f"  {finding.check}: {finding.meaning}"


def _verdict(findings: list[Finding]) -> str:
    counts = {name: sum(finding.verdict == name for finding in findings) for name in VERDICTS}
    counted = ", ".join(f"{count} {name}" for name, count in counts.items())
    told = {
        "ok": "ready: training works here",
        "warn": "ready, with warnings",
        "broken": "broken: " + ", ".join(f.check for f in findings if f.verdict == "broken"),
    }
    return f"verdict: {told[worst(findings)]} ({counted})"


def _examined(values, progress: Callable[[str], None] = lambda text: None) -> Iterator[Finding]:
    if values.gpu:
        return gpu.examine_gpus(
            values.device_type, values.probe_timeout or 600.0, values.trials, values.total_timeout
        )
    return examine(
        folder=values.checkpoint_dir,
        min_free_mib=values.min_free_mib,
        peer_timeout_seconds=values.peer_timeout,
        probe_timeout_seconds=values.probe_timeout or 120.0,
        quick=values.quick,
        upstream=values.upstream,
        progress=progress,
    )


def _line(finding: Finding) -> str:
    width = max(map(len, VERDICTS))
    verdict = f"{finding.verdict:<{width}}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        verdict = f"\x1b[{_COLOURS[finding.verdict]}m{verdict}\x1b[0m"
    advice = f" -> {finding.advice}" if finding.advice else ""
    # An error of several lines stays one finding.
    text = f"\n{' ' * (width + 2)}".join(f"{finding.meaning}{advice}".splitlines())
    return f"{verdict}  {finding.check}: {text}"
