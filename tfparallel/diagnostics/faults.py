"""The grammar of injected faults: `kill:worker=1,step=20`."""

import dataclasses

GRAMMAR = """\
kill:worker=1,step=20        the worker gets SIGKILL
hang:worker=0,step=5         the worker stops making steps, but stays alive
exit:worker=1,step=3,code=5  the worker ends with this exit code
preempt:worker=1,step=20     the worker gets SIGTERM, as when a scheduler preempts it
slow:worker=1,ms=50          the worker waits this long before each step
corrupt_checkpoint:worker=0,step=20  the newest checkpoint is damaged, and the worker gets SIGKILL
Workers are numbered from 0. A fault strikes after `step` steps, before the next one."""

_PARTS = {
    "kill": ("worker", "step"),
    "hang": ("worker", "step"),
    "exit": ("worker", "step", "code"),
    "preempt": ("worker", "step"),
    "slow": ("worker", "ms"),
    "corrupt_checkpoint": ("worker", "step"),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject into a worker.

    Attributes:
        kind: "kill", "hang", "exit", "preempt", "slow" or "corrupt_checkpoint".
        worker: The worker's index.
        step: Number of completed steps at which it strikes; None for "slow".
        code: Exit code, for "exit".
        ms: Milliseconds to wait before each step, for "slow".
    """

    kind: str
    worker: int
    step: int | None = None
    code: int | None = None
    ms: int | None = None

    def __str__(self):
        parts = ",".join(f"{name}={getattr(self, name)}" for name in _PARTS[self.kind])
        return f"{self.kind}:{parts}"


def parse_fault(text: str) -> Fault:
    """Parses a fault.

    Args:
        text: A fault in the form of `GRAMMAR`.

    Raises:
        ValueError: If it violates the grammar; the message lists all problems.

    Example:
        >>> parse_fault("kill:worker=1,step=20")
        Fault(kind='kill', worker=1, step=20, code=None, ms=None)
    """
    kind, _, rest = text.partition(":")
    if kind not in _PARTS:
        raise ValueError(
            _message(text, [f"the kind must be one of {', '.join(_PARTS)}, not {kind!r}"])
        )
    values: dict[str, int] = {}
    problems = []
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in _PARTS[kind]:
            problems.append(f"{kind} takes no {name!r}")
        elif name in values:
            problems.append(f"{name} is given twice")
        else:
            # Recorded even if invalid, so that it is not reported as missing too.
            values[name] = int(value) if value.isascii() and value.isdigit() else -1
            if values[name] < 0 or (name == "code" and not 0 < values[name] < 256):
                range_ = "from 1 to 255" if name == "code" else "0 or more"
                problems.append(f"{name} must be a whole number, {range_}, not {value!r}")
    missing = [name for name in _PARTS[kind] if name not in values]
    if missing:
        problems.append(f"{kind} needs {' and '.join(missing)}")
    if problems:
        raise ValueError(_message(text, problems))
    return Fault(kind, **values)


def _message(text, problems):
    indented = "\n".join(f"    {line}" for line in GRAMMAR.splitlines())
    return (
        f"A fault must follow the grammar below: {'; '.join(problems)}. "
        f"Received: {text!r}.\n{indented}"
    )
