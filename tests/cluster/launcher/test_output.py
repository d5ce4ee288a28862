"""Prefixes: whole lines, progress bars, questions, and never two halves in one line."""

import io
import os
import pty
import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfparallel.cluster.launcher.output import Prefixer, last_lines


def shown(*pieces):
    """What stands in one file that both streams lead to."""
    stream = io.BytesIO()
    prefixer = Prefixer(stream, stream)
    for worker, text in pieces:
        prefixer.write(worker, "stdout", text)
    return stream.getvalue()


@pytest.mark.parametrize(
    "pieces, expected",
    [
        ([(0, b"a\nb\n"), (1, b"c\n")], b"[0] a\n[0] b\n[1] c\n"),
        ([(0, b"a\r\n")], b"[0] a\r\n"),
        ([(0, b"\n")], b"[0]\n"),
        # A line in parts; another worker's line ends it.
        ([(0, b"a"), (0, b"b\n")], b"[0] ab\n"),
        ([(0, b"a"), (1, b"b\n"), (0, b"c\n")], b"[0] a\n[1] b\n[0] c\n"),
        # Progress bars, with the carriage return at either end.
        ([(0, b"1%\r"), (0, b"2%\r"), (0, b"\n")], b"[0] 1%\r[0] 2%\r\n"),
        ([(0, b"\r"), (0, b"1%"), (0, b"\r"), (0, b"2%\n")], b"[0] 1%\r[0] 2%\n"),
        ([(0, b"1%\r"), (1, b"b\n"), (0, b"2%\r")], b"[0] 1%\r\n[1] b\n[0] 2%\r"),
        ([(0, b"\xff\x00\n")], b"[0] \xff\x00\n"),
        ([(0, b"a"), (0, b"b\nc\n\n"), (0, b"\n\nd\n")], b"[0] ab\n[0] c\n[0]\n[0]\n[0]\n[0] d\n"),
        ([(0, b"a"), (1, b"b\n\nc\n")], b"[0] a\n[1] b\n[1]\n[1] c\n"),
    ],
)
def test_prefixes(pieces, expected):
    assert shown(*pieces) == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab\n", min_size=1)), max_size=20))
def test_no_line_holds_two_workers(pieces):
    """Each worker's text comes back from the screen, but for line ends that were added."""
    lines = shown(*((worker, (text.replace("a", "aa")).encode()) for worker, text in pieces))
    for line in lines.split(b"\n"):
        assert line.count(b"[") <= 1 and (not line or line.startswith(b"["))
    for worker in range(3):
        written = "".join(text for index, text in pieces if index == worker)
        text_of_worker = b"".join(
            line.partition(b"] ")[2]
            for line in lines.split(b"\n")
            if line.startswith(b"[%d]" % worker)
        )
        assert text_of_worker.decode() == written.replace("a", "aa").replace("\n", "")


def test_two_files_keep_their_own_lines():
    out, err = io.BytesIO(), io.BytesIO()
    prefixer = Prefixer(out, err)
    prefixer.write(0, "stdout", b"half")
    prefixer.write(1, "stderr", b"error\n")
    prefixer.write(0, "stdout", b" whole\n")
    assert (out.getvalue(), err.getvalue()) == (b"[0] half whole\n", b"[1] error\n")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colour_on_a_terminal_alone(monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb", 0) as stdout, os.fdopen(os.dup(theirs), "wb", 0) as stderr:
        prefixer = Prefixer(stdout, stderr)
        prefixer.write(0, "stdout", b"long\rshort\r")
        # The same terminal: the progress bar is not overwritten.
        prefixer.write(0, "stderr", b"error\n")
        text = b""
        # A busy terminal hands over in parts.
        while not text.endswith(b"error\r\n") and select.select([ours], [], [], 5)[0]:
            text += os.read(ours, 1000)
    os.close(ours)
    name = b"[0]" if no_color else b"\x1b[36m[0]\x1b[0m"
    erase = b"" if no_color else b"\x1b[K"
    assert text == name + b" long\r" + erase + name + b" short\r\r\n" + name + b" error\r\n"


def test_last_lines():
    tail = b"one\n\ntwo\n 1%\r 2%\r\nthree \xff\n"
    assert last_lines(tail, 3) == ["two", " 2%", "three \N{REPLACEMENT CHARACTER}"]
    assert last_lines(tail, 1) == ["three \N{REPLACEMENT CHARACTER}"]
    assert last_lines(b"", 3) == []
