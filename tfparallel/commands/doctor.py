"""`tfparallel doctor`: diagnoses this host, cluster and set of versions."""

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from tfparallel.activity import Activity
from tfparallel.command_line.exits import UsageError
from tfparallel.command_line.flag_parsing import resolved
from tfparallel.diagnostics.doctor import examine
from tfparallel.diagnostics.report import VERDICTS, Finding, versions, worst, write_report
from tfparallel.diagnostics.suggestion import suggested, this_machine

# Green, yellow, red.
_COLOURS = {"ok": 32, "warn": 33, "broken": 31}


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Prints the findings; returns 1 if something is broken."""
    if values.suggest:
        return _suggest()
    with Activity("checking this host") as activity:
        findings = list(
            examine(
                folder=values.checkpoint_dir,
                min_free_mib=values.min_free_mib,
                peer_timeout_seconds=values.peer_timeout,
                probe_timeout_seconds=values.probe_timeout,
                quick=values.quick,
                upstream=values.upstream,
                progress=activity.say,
            )
        )
    print("\n".join(_report_lines(findings)))
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
    return 1 if worst(findings) == "broken" else 0


def _suggest() -> int:
    try:
        suggestion = suggested(this_machine())
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(f"{suggestion.command}\n  why: {suggestion.why}\n{suggestion.then}")
    return 0


def _report_lines(findings: list[Finding]) -> Iterator[str]:
    """Yields the verdict and the findings, problems first; then faults of TensorFlow's own."""
    of_host = [finding for finding in findings if not finding.is_upstream]
    yield _verdict(of_host)
    of_host.sort(key=lambda finding: -VERDICTS.index(finding.verdict))
    yield from map(_line, of_host)
    upstream = [finding for finding in findings if finding.is_upstream]
    faults = [finding for finding in upstream if finding.verdict != "ok"]
    if faults:
        yield ""
        yield (
            "bugs in TensorFlow's own strategies, reproduced here; with tfparallel's strategies "
            "(replace tf.distribute.… by tfparallel.…) training matches one device:"
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
    texts = {
        "ok": "ready: training works here",
        "warn": "ready, with warnings",
        "broken": "broken: " + ", ".join(f.check for f in findings if f.verdict == "broken"),
    }
    return f"verdict: {texts[worst(findings)]} ({counted})"


def _line(finding: Finding) -> str:
    width = max(map(len, VERDICTS))
    verdict = f"{finding.verdict:<{width}}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        verdict = f"\x1b[{_COLOURS[finding.verdict]}m{verdict}\x1b[0m"
    advice = f" -> {finding.advice}" if finding.advice else ""
    # Indent the further lines of a finding.
    text = f"\n{' ' * (width + 2)}".join(f"{finding.meaning}{advice}".splitlines())
    return f"{verdict}  {finding.check}: {text}"
