"""What of the workers' output reaches the screen, and what the log alone."""

import io
import json
import os
import random
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT
from tfparallel.cluster.launcher.output import Prefixer
from tfparallel.cluster.launcher.output_filter import OutputFilter
from tfparallel.cluster.worker_error import LINE_BYTES, WORKER_ERROR, WorkerError

CHATTER = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795659460.983967    7311 port.cc:153] oneDNN custom operations are on.\n"
    b"2025-01-01 10:00:00.123456: I tensorflow/core/util/port.cc:113] oneDNN custom operations\n"
    b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow\n"
    b"I0000 00:00:1795659479.067787    8585 coordination_service.cc:505] Example stragglers:\n"
    b"/job:worker/replica:0/task:1\n"
    b"E0000 00:00:1795671978.598045 3151 node_def_util.cc:682] NodeDef mentions attribute "
    b"use_unbounded_threadpool which is not in the op definition: Op<name=MapDataset>\n"
    b"E0000 00:00:1795672658.524730 8904 cuda_timer.cc:87] Delay kernel timed out: measured\n"
    b"W0000 00:00:1795672363.716593 2792 generator_dataset_op.cc:113] Error occurred when "
    b"finalizing GeneratorDataset iterator: FAILED_PRECONDITION: Python interpreter state is not\n"
)


MARK = b"\x1etfparallel error "


class Seen:
    def __init__(self, **options):
        self.shown, self.logged = [], []
        self.output_filter = OutputFilter(
            lambda worker, stream, text: self.shown.append((worker, stream, text)),
            lambda worker, text: self.logged.append((worker, text)),
            **options,
        )

    def write(self, worker, text, stream="stderr"):
        self.output_filter.write(worker, stream, text)
        return self


def test_chatter_is_for_the_log_alone():
    seen = Seen().write(0, CHATTER + b"mine\n")
    assert seen.shown == [(0, "stderr", b"mine\n")]
    assert seen.logged == [(0, CHATTER + b"mine\n")]


def test_chatter_is_shown_on_request():
    seen = Seen(is_quiet=False).write(0, CHATTER)
    assert seen.shown == [(0, "stderr", CHATTER)]


@pytest.mark.parametrize(
    "text",
    [
        b"I am a line of a program\n",
        b"I0000 is what my program prints to stdout\n",
        b"a question? ",
        b"\r 50 %\r100 %",
        b"E0000 00:00:1.2 9 cuda_driver.cc:1] an error of a GPU\n",
        b"W0000 00:00:1.2 9 file.cc:1] a warning\n",
    ],
)
def test_other_lines_pass_as_they_are(text):
    stream = "stdout" if b"stdout" in text else "stderr"
    seen = Seen().write(1, text, stream)
    assert b"".join(shown for _, _, shown in seen.shown) == text


def test_a_warning_of_several_workers_is_shown_once():
    warning = b"/lib/trainer.py:74: UserWarning: shuffle is ignored\n  self.adapter = (\n"
    seen = Seen().write(1, warning).write(0, warning + b"mine\n").write(1, warning)
    assert [text for _, _, text in seen.shown] == [warning, b"mine\n", warning]
    assert [text for _, text in seen.logged] == [warning, warning + b"mine\n", warning]


def error(place="ValueError a.py, line 3"):
    return WorkerError(["ValueError: wrong", "  a.py, line 3: fit()"], place, "Traceback …\n")


def test_the_error_of_several_workers_is_shown_once():
    seen = Seen()
    line = error().to_line()
    for piece in (line[:9], line[9:20], line[20:]):  # As a slow pipe may bring it.
        seen.write(1, piece)
    seen.write(0, line).write(2, error("OSError").to_line())
    short = b"ValueError: wrong\n  a.py, line 3: fit()\n"
    assert seen.shown == [(1, "stderr", short), (2, "stderr", short)]
    assert seen.logged == [(worker, "Traceback …\n".encode()) for worker in (1, 0, 2)]
    assert sorted(seen.output_filter.errors) == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        '{"lines": 5, "place": [], "whole": 3}',
        '{"lines": [1], "place": "a", "whole": "b"}',
        '{"lines": ["a"], "place": {}, "whole": "b"}',
        '{"lines": ["a"], "place": "b"}',
        "null", "NaN", "[" * 100_000, "9" * 10_000,
    ],
)  # fmt: skip
def test_what_only_looks_like_an_error_passes_as_it_is(content):
    """Story: the launcher raised, and the job ended."""
    line = MARK + content.encode() + b"\n"
    seen = Seen().write(0, line)
    assert seen.shown == [(0, "stderr", line)] and seen.logged == [(0, line)]
    assert not seen.output_filter.errors


def test_the_error_of_a_text_that_no_stream_takes():
    """Story: a lone surrogate, as of a file's name, ended the launcher, and used no restart."""
    line = WorkerError(["a \udc80"], "\ud800", "b \udfff\n").to_line()
    seen = Seen().write(0, line)
    assert (seen.shown, seen.logged) == ([(0, "stderr", b"a \\udc80\n")], [(0, b"b \\udfff\n")])


def test_an_error_behind_a_progress_bar_is_told():
    seen = Seen().write(0, b" 45%|###\x1etfp").write(0, error().to_line()[4:])
    assert b"".join(text for _, _, text in seen.shown).startswith(b" 45%|###ValueError: wrong\n")


def test_the_line_of_an_error_has_a_limit():
    text = "\N{GRINNING FACE}" * 10**6
    line = WorkerError([text, text], text, text).to_line()
    assert len(line) < LINE_BYTES and WorkerError.from_line(line) is not None


@pytest.mark.parametrize("begin", [b"\x1e", MARK, MARK * 99])
def test_a_line_without_end_is_not_held(begin):
    """Story: 16 MiB of it took 49 s: each piece was joined to all before, and read once more."""
    seen, written = Seen(), 0
    for piece in [begin, *[b"x" * (1 << 16)] * 40, b"\x1e"]:
        seen.write(0, piece)
        written += len(piece)
        num_buffered = written - sum(len(text) for _, _, text in seen.shown)
        assert num_buffered == sum(map(len, seen.output_filter._begun.values())) < LINE_BYTES
    assert num_buffered == 1  # It was given up, but for a new beginning.
    seen.output_filter.finish()
    assert sum(len(text) for _, text in seen.logged) == written


def test_warnings_do_not_fill_the_memory():
    seen = Seen()
    for number in range(3000):
        seen.write(0, b"/lib/a.py:%d: UserWarning: look\n" % number)
    assert len(seen.shown) == 3000 and len(seen.output_filter._warned) == 1000


def strange_lines(num_lines, seed=7):
    """Lines of a worker's, of which many are nearly those of an error, chatter or a warning."""
    chance = random.Random(seed)
    whole = [
        error().to_line(), MARK, b"\x1e", b"/a.py:1: UserWarning: b\n", b"  source\n", b"\r 50%",
        *CHATTER.splitlines(True), "\N{GRINNING FACE}\ud800".encode(errors="surrogatepass"),
        json.dumps({"lines": ["\udc80", 1, None], "place": "\ud800", "whole": "c"}).encode(),
    ]  # fmt: skip
    for _ in range(num_lines):
        line = bytearray(b"".join(chance.choices(whole, k=chance.randint(0, 3))))
        for _ in range(chance.randint(0, 3)):
            place = chance.randint(0, len(line))
            line[place : place + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        yield bytes(line) + b"\n"


def test_no_line_of_a_worker_ends_the_launcher():
    chance, logs, screen = random.Random(3), [], io.BytesIO()
    output_filter = OutputFilter(
        Prefixer(screen, screen).write, lambda worker, text: logs.append((worker, text))
    )
    text = b"".join(strange_lines(10_000))
    while text:
        size = chance.choice([1, 10, 100, 1000, 10_000])
        output_filter.write(chance.randint(0, 2), "stderr", text[:size])
        text = text[size:]
    output_filter.finish()
    assert {worker for worker, _ in logs} == set(output_filter.errors) == {0, 1, 2}
    lines = [line for each in output_filter.errors.values() for line in each.lines]
    assert all(isinstance(line, str) for line in lines)


PROGRAM = """
import {module}
def train(number):
    raise ValueError({text!r})
train(3)
"""
KERAS = (
    "Exception encountered when calling Sequential.call().\n\n\x1b[1mInput 0 does not fit\x1b[0m"
    "\n\nArguments received by Sequential.call():\n  • mask=None"
)


def run(tmp_path, module="tfparallel", text=KERAS, **environment):
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM.format(module=module, text=text))
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert done.returncode == 1
    return str(path), done.stderr


def test_a_worker_tells_its_launcher_where_its_own_code_failed(tmp_path):
    path, output = run(tmp_path, **{WORKER_ERROR: "1"})
    worker_error = WorkerError.from_line(output)
    assert worker_error.lines == [
        "ValueError: Input 0 does not fit (in Sequential.call())",
        f"  {path}, line 4, in train: raise ValueError({KERAS!r})",
    ]
    assert worker_error.whole.startswith("Traceback (most recent call last):")
    assert worker_error.whole.rstrip().endswith("• mask=None")


def test_an_error_of_a_graph_is_without_its_frames(tmp_path):
    text = (
        "Graph execution error:\n\nDetected at node MatMul defined at (most recent call last):\n"
        '  File "a.py", line 1, in <module>\n\n  File "b.py", line 2, in fit\n\n'
        "Matrix size-incompatible: In[0]: [2,3], In[1]: [4,5]\n\t [[{{node MatMul}}]]"
    )
    worker_error = WorkerError.from_line(run(tmp_path, text=text, **{WORKER_ERROR: "1"})[1])
    assert worker_error.lines[:2] == [
        "ValueError: Graph execution error:",
        "Matrix size-incompatible: In[0]: [2,3], In[1]: [4,5]",
    ]


def test_an_error_in_a_traced_function_is_told_with_the_users_own_line():
    """Story: AutoGraph's "in user code:" was shown, and not what was wrong."""
    text = (
        'in user code:\n\n    File "/home/me/train.py", line 9, in step  *\n'
        "        gradients = tfparallel.reduce_gradients(gradients, weight=3)\n"
        '    File "/tmp/__autograph_generated_file5.py", line 33, in if_body\n'
        "        gradients = ag__.converted_call(reduce_gradients)\n"
        f'    File "{ROOT}/tfparallel/replication/custom_loop.py", line 80, in reduce_gradients\n'
        "        keras_trainer.refuse()\n\n"
        "    ValueError: One thing is required.\n    Received:\n      another\n"
    )
    assert WorkerError.of(ValueError(text)).lines == [
        "ValueError: One thing is required.",
        "Received:",
        "  another",
        "  /home/me/train.py, line 9, in step: "
        "gradients = tfparallel.reduce_gradients(gradients, weight=3)",
    ]


TRACED = """
import tensorflow as tf

@tf.function
def step(x):
    if x.shape[0] != 3:
        raise ValueError('No.\\n    File "other.py", line 3, in f\\nThree rows are required.')
    return x

step(tf.ones([4]))
"""


@pytest.mark.slow
def test_what_a_traced_function_raises_is_told_whole(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRACED)
    start = "from tfparallel.cluster.worker_error import tell_launcher; tell_launcher(); "
    start += f"import runpy; runpy.run_path({str(path)!r})"
    environment = os.environ | {"PYTHONPATH": str(ROOT), WORKER_ERROR: "1"}
    done = subprocess.run(
        [sys.executable, "-c", start], env=environment, stderr=subprocess.PIPE, timeout=120
    )
    (error_line,) = [line for line in done.stderr.splitlines() if WorkerError.from_line(line)]
    *said, place = WorkerError.from_line(error_line).lines
    assert said[0] == "ValueError: No." and said[-1] == "Three rows are required."
    assert place.startswith(f"  {path}, line 7, in step: raise ValueError(")


def test_a_command_tells_its_launcher_what_it_refuses():
    """Story: two workers on one GPU said so twice, and the launcher a third time."""
    command = [sys.executable, "-m", "tfparallel", "train", "there_is_none.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), WORKER_ERROR: "1"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=60)
    worker_error = WorkerError.from_line(done.stderr)
    (line,) = worker_error.lines
    assert done.returncode == 2 and line.startswith("tfparallel train: ")
    assert not worker_error.has_traceback and error().has_traceback


READS = """
import os, tfparallel
try:
    open({path!r})
except FileNotFoundError as error:
    if {late}: open({path!r}, "w").close()
    raise {error}
"""


@pytest.mark.parametrize(
    ("worker", "late", "error", "hint"),
    [
        ("0", False, "error", ""),
        ("1", True, "error", "  The file exists now: another worker wrote it a moment later."),
        ("1", False, "error", "  This is worker 1. Files of callbacks, and those under "),
        ("1", True, "ValueError(f'File not found: filepath={error.filename}. Please')", "  The fi"),
        ("1", False, "ValueError('unable to open file: name = \\'/no\\', errno = 2')", "  This "),
        ("1", False, "ValueError('Something else.')", ""),
    ],
)
def test_a_worker_that_misses_a_file_is_told_who_writes_it(tmp_path, worker, late, error, hint):
    """Story: `load_model` failed on worker 1, in a folder where the chief's file was."""
    (tmp_path / "mine.py").write_text(
        READS.format(path=str(tmp_path / "weights"), late=late, error=error)
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), WORKER_ERROR: "1", "RANK": worker}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "mine.py")], env=environment, stderr=subprocess.PIPE
    )
    worker_error = WorkerError.from_line(done.stderr)
    assert len(worker_error.lines) == 2 + bool(hint)
    assert not hint or worker_error.lines[-1].startswith(hint)
    assert worker_error.whole.rstrip().endswith(worker_error.lines[-1]) is bool(hint)


def test_no_other_process_tells(tmp_path):
    assert run(tmp_path)[1].startswith(b"Traceback (most recent call last):")
