"""Sends a worker's fatal error to its launcher: a short form, and the full traceback for the log.

All workers of a job usually fail with the same error, and a traceback through TensorFlow and Keras
has fifty lines. In a worker of `tfparallel launch`, `sys.excepthook` instead writes one line for
the launcher, which shows the first of several equal errors.
"""

import dataclasses
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence

# Set by the launcher for its workers.
WORKER_ERROR = "TFPARALLEL_WORKER_ERROR"
_MARK = b"\x1etfparallel error "
# The line for the launcher. It may start anywhere: a progress bar may precede it.
LINE = re.compile(re.escape(_MARK) + rb"[^\n]*\n")
LINE_BYTES = 1 << 20  # The maximum length of such a line.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))
_MOST_LINES, _MOST_CHARACTERS = 8, 30_000  # A character has up to 12 bytes in JSON.
_has_launcher = False  # Whether a launcher reads this process's output.
_KERAS = re.compile(
    r"Exception encountered when calling (?P<where>.*?)\.\n\n(?P<what>.*?)"
    r"(?:\n\nArguments received by .*)?",
    re.DOTALL,
)
# Keras's `ValueError` about a file that is missing, and what HDF5 says.
_MISSING = re.compile(
    r"File not found: filepath=(.+?)\. |unable to open file: name = '(.+?)', errno"
)
# AutoGraph writes the frames of an error in a `tf.function` as text above the message: the
# traceback itself has the frames of the generated code.
_USER_CODE = "in user code:\n\n"
_FRAME = re.compile(
    r'^    File "(?P<path>.+)", line (?P<line>\d+), in (?P<name>\S+).*(?:\n {8}(?P<code>.*))?',
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class WorkerError:
    """The error that ended a worker.

    Attributes:
        lines: The error, and where it was raised in the user's code.
        place: The error's type and location; errors with the same place are the same.
        whole: The traceback; or the lines again if no exception was raised.
    """

    lines: Sequence[str]
    place: str
    whole: str

    @property
    def has_traceback(self) -> bool:
        """Whether `whole` has more than the lines."""
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
        """Parses a line; None if it is not such a line, even if it looks like one."""
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
        """Describes an uncaught exception."""
        whole = "".join(traceback.format_exception(error))
        frames, message = _parts(error)
        frame = next(filter(_is_user_code, reversed(frames)), None)
        lines = [_short(message)]
        if frame is not None:
            place = f"{frame.filename}, line {frame.lineno}"
            in_function = "" if frame.name in ("<module>", "None") else f", in {frame.name}"
            lines.append(f"  {place}{in_function}: {frame.line}")
        else:
            place = ""
        if hint := _about_missing_file(error):
            lines.append(hint)
            whole += f"{hint}\n"
        return cls("\n".join(lines).splitlines(), f"{type(error).__name__} {place}", whole)


def tell_launcher() -> None:
    """Makes this process report its fatal error to its launcher, if it has one."""
    # Removed from the environment: the worker's child processes have another reader.
    if not os.environ.pop(WORKER_ERROR, "") or sys.excepthook is not sys.__excepthook__:
        return

    global _has_launcher
    _has_launcher = True

    def tell(kind, error, trace):
        if issubclass(kind, KeyboardInterrupt) or sys.stderr is None:
            sys.__excepthook__(kind, error, trace)
            return
        _write_line(WorkerError.of(error.with_traceback(trace)))

    sys.excepthook = tell


def begin_of_line(text: bytes) -> int:
    """Returns where an unfinished line for the launcher begins in text; -1 if there is none."""
    begin = text.find(_MARK)
    if begin < 0:  # The text may end within the mark.
        begin = text.rfind(_MARK[:1])
    return begin if begin >= 0 and text[begin:].startswith(_MARK[: len(text) - begin]) else -1


def say_why(text: str) -> None:
    """Writes to stderr why this process ends without an exception.

    A launcher shows the same reason of several workers once.
    """
    if _has_launcher:
        _write_line(WorkerError(text.splitlines(), text, f"{text}\n"))
    else:
        print(text, file=sys.stderr)


def _write_line(error: WorkerError) -> None:
    sys.stderr.flush()
    line = error.to_line()
    while line:  # A signal may interrupt a write to a full pipe.
        line = line[os.write(2, line) :]


def _sendable(text: str) -> str:
    """Escapes lone surrogates, which JSON can hold but streams cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def without_frames(text: str) -> list[str]:
    """Returns the lines of a graph error without the frames that created its operation."""
    frames = ('  File "', "    ", "Detected at node")
    return [line for line in text.splitlines() if line.strip() and not line.startswith(frames)]


def _parts(error: BaseException) -> tuple[Sequence[traceback.FrameSummary], str]:
    """Returns an error's frames, innermost last, and its message, prefixed with its class."""
    traceback_frames = traceback.extract_tb(error.__traceback__)
    text = str(error)
    if not text.startswith(_USER_CODE):
        return traceback_frames, f"{type(error).__name__}: {text}"
    frames, _, message = text.removeprefix(_USER_CODE).partition("\n\n")
    named = [
        traceback.FrameSummary(each["path"], int(each["line"]), each["name"], line=each["code"])
        for each in _FRAME.finditer(frames)
    ]
    return [*traceback_frames, *named], textwrap.dedent(message)


def _about_missing_file(error: BaseException) -> str:
    """Returns what a worker other than the chief must know if it did not find a file; or ""."""
    worker = os.environ.get("RANK", "0")
    match = _MISSING.search(str(error))
    if worker == "0" or not (isinstance(error, FileNotFoundError) or match):
        return ""
    path = getattr(error, "filename", None) or (match and (match[1] or match[2]))
    if path and os.path.exists(path):
        return (
            "  The file exists now: another worker wrote it a moment later. Call "
            "`tfparallel.barrier()` on every worker between writing and reading."
        )
    return (
        f"  This is worker {worker}. Files of callbacks, and those under `if worker_index() == 0`, "
        "are written by worker 0 alone. Read such a file on worker 0 and `tfparallel.broadcast` "
        "its content; or use a folder that all hosts share, and call `tfparallel.barrier()` on "
        "every worker between writing and reading."
    )


def _is_user_code(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is in the user's code: neither in this package nor in an installed one."""
    parts = frame.filename.replace(os.sep, "/").split("/")
    return not (
        frame.filename.startswith((_PACKAGE + os.sep, _LIBRARY + os.sep, "<frozen"))
        or "site-packages" in parts
        or "dist-packages" in parts
        or parts[-1].startswith("__autograph_generated_file")
    )


def _short(message: str) -> str:
    kind, colon, text = re.sub(r"\x1b\[\d*m", "", message).strip().partition(": ")
    match = _KERAS.fullmatch(text)
    if match is not None:
        return f"{kind}: {match['what'].strip()} (in {match['where']})"
    lines = without_frames(f"{kind}{colon}{text}")
    more = [f"… and {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return "\n".join([*lines[:_MOST_LINES], *more])
