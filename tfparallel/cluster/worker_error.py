"""The error that ends a worker, told to its launcher: in a few lines, and whole for the log.

Each worker of a job fails with the same error, and a traceback through TensorFlow and Keras has
fifty lines. In a worker of `tfparallel launch` what Python calls with an error that nobody caught
writes one line for the launcher instead, which shows the first of several alike.
"""

import dataclasses
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence

__all__ = [
    "LINE",
    "LINE_BYTES",
    "WORKER_ERROR",
    "WorkerError",
    "begin_of_line",
    "say_why",
    "tell_launcher",
    "without_frames",
]

# Set by the launcher, for its workers.
WORKER_ERROR = "TFPARALLEL_WORKER_ERROR"
_MARK = b"\x1etfparallel error "
# The line for the launcher, wherever it begins: a progress bar may stand before it.
LINE = re.compile(re.escape(_MARK) + rb"[^\n]*\n")
LINE_BYTES = 1 << 20  # What such a line has at most.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))
_MOST_LINES, _MOST_CHARACTERS = 8, 30_000  # A character has up to 12 bytes in JSON.
_has_launcher = False  # Whether a launcher reads what this process writes.
_KERAS = re.compile(
    r"Exception encountered when calling (?P<where>.*?)\.\n\n(?P<what>.*?)"
    r"(?:\n\nArguments received by .*)?",
    re.DOTALL,
)
# AutoGraph gives an error in a `tf.function` its frames in words, above the message: the traceback
# has those of the code that it has made.
_USER_CODE = "in user code:\n\n"
_FRAME = re.compile(
    r'^    File "(?P<path>.+)", line (?P<line>\d+), in (?P<name>\S+).*(?:\n {8}(?P<code>.*))?',
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class WorkerError:
    """What ended a worker.

    Attributes:
        lines: The error, and where in the user's own code it came up.
        place: By which errors of several workers are the same.
        whole: The traceback; or again the lines, where Python raised nothing.
    """

    lines: Sequence[str]
    place: str
    whole: str

    @property
    def has_traceback(self) -> bool:
        """Whether `whole` says more than the lines."""
        return self.whole.splitlines() != list(self.lines)

    def to_line(self) -> bytes:
        """Returns the line for the launcher, of at most `LINE_BYTES`."""
        content = {
            "lines": "\n".join(self.lines)[:_MOST_CHARACTERS].splitlines(),
            "place": self.place[: _MOST_CHARACTERS // 3],
            "whole": self.whole[-_MOST_CHARACTERS:],
        }
        return _MARK + json.dumps(content).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "WorkerError | None":
        """Reads a line; None if it is another one, which may look like one of these."""
        if not line.startswith(_MARK):
            return None
        try:
            content = json.loads(line[len(_MARK) :])
        except (ValueError, RecursionError):
            return None
        match content:
            case {"lines": [*lines], "place": str(place), "whole": str(whole)}:
                if all(isinstance(each, str) for each in lines):
                    return cls([*map(_sendable, lines)], _sendable(place), _sendable(whole))
        return None

    @classmethod
    def of(cls, error: BaseException) -> "WorkerError":
        """Describes an error that nobody caught."""
        whole = "".join(traceback.format_exception(error))
        frames, said = _parts(error)
        frame = next(filter(_is_own, reversed(frames)), None)
        lines = [_short(said)]
        if frame is not None:
            place = f"{frame.filename}, line {frame.lineno}"
            in_function = "" if frame.name in ("<module>", "None") else f", in {frame.name}"
            lines.append(f"  {place}{in_function}: {frame.line}")
        else:
            place = ""
        return cls("\n".join(lines).splitlines(), f"{type(error).__name__} {place}", whole)


def tell_launcher() -> None:
    """Has this process tell its launcher what ends it, if it is a worker that has one."""
    # Taken away, since what a worker starts has another reader.
    if not os.environ.pop(WORKER_ERROR, "") or sys.excepthook is not sys.__excepthook__:
        return

    global _has_launcher
    _has_launcher = True

    def tell(kind, error, trace):
        if issubclass(kind, KeyboardInterrupt) or sys.stderr is None:
            sys.__excepthook__(kind, error, trace)
            return
        _tell(WorkerError.of(error.with_traceback(trace)))

    sys.excepthook = tell


def begin_of_line(text: bytes) -> int:
    """Where a line for the launcher begins in text that has no line's end; -1 if none does."""
    begin = text.find(_MARK)
    if begin < 0:  # Or its first bytes, at the end.
        begin = text.rfind(_MARK[:1])
    return begin if begin >= 0 and text[begin:].startswith(_MARK[: len(text) - begin]) else -1


def say_why(text: str) -> None:
    """Writes to stderr why this process ends, where no exception says so.

    A launcher shows it once for all of its workers that give the same reason.
    """
    if _has_launcher:
        _tell(WorkerError(text.splitlines(), text, f"{text}\n"))
    else:
        print(text, file=sys.stderr)


def _tell(error: WorkerError) -> None:
    sys.stderr.flush()
    line = error.to_line()
    while line:  # A signal may interrupt what a full pipe takes.
        line = line[os.write(2, line) :]


def _sendable(text: str) -> str:
    """The text without lone surrogates, which no stream takes and JSON can hold."""
    return text.encode(errors="backslashreplace").decode()


def without_frames(text: str) -> list[str]:
    """The lines of an error of a graph, but for the frames through which its operation was made."""
    frames = ('  File "', "    ", "Detected at node")
    return [line for line in text.splitlines() if line.strip() and not line.startswith(frames)]


def _parts(error: BaseException) -> tuple[Sequence[traceback.FrameSummary], str]:
    """The frames of an error, the innermost last, and what it says, its class before it."""
    found = traceback.extract_tb(error.__traceback__)
    text = str(error)
    if not text.startswith(_USER_CODE):
        return found, f"{type(error).__name__}: {text}"
    frames, _, said = text.removeprefix(_USER_CODE).partition("\n\n")
    named = [
        traceback.FrameSummary(each["path"], int(each["line"]), each["name"], line=each["code"])
        for each in _FRAME.finditer(frames)
    ]
    return [*found, *named], textwrap.dedent(said)


def _is_own(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of the user's code: neither this package's nor an installed one's."""
    parts = frame.filename.replace(os.sep, "/").split("/")
    return not (
        frame.filename.startswith((_PACKAGE + os.sep, _LIBRARY + os.sep, "<frozen"))
        or "site-packages" in parts
        or "dist-packages" in parts
        or parts[-1].startswith("__autograph_generated_file")
    )


def _short(said: str) -> str:
    kind, colon, text = re.sub(r"\x1b\[\d*m", "", said).strip().partition(": ")
    found = _KERAS.fullmatch(text)
    if found is not None:
        return f"{kind}: {found['what'].strip()} (in {found['where']})"
    lines = without_frames(f"{kind}{colon}{text}")
    more = [f"… and {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
    return "\n".join([*lines[:_MOST_LINES], *more])
