"""Trains a model that exceeds any one process, in several, each under a limit of the system.

    .venv/bin/python benchmarks/memory.py

Needs Linux, 22 GiB of memory, 25 GiB of disk and half an hour. Under RLIMIT_DATA a process may hold
the limit minus what training next to nothing takes. The model's parameters alone are twice the
remainder, its training state (parameters and Adam's two slots) six times. It is trained

1. by plain Keras in one process under the limit, which fails;
2. by `tfparallel.model_parallel` in processes that each are under the limit, and saved;
3. by `model_parallel` on one device of one process without a limit, whose weights are compared with
   the saved ones. (Plain Keras holds all gradients at once, and what Adam makes on its way.)
"""

import io
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import zipfile

import contest
import h5py
import memory_run
import numpy as np

from tfparallel.texts import parse_bytes

TOP = pathlib.Path(__file__).parents[1]
RUN = pathlib.Path(__file__).with_name("memory_run.py")
LAYER_BYTES = 4 * memory_run.WIDTH * (memory_run.WIDTH + 3)
NUM_STEPS = 3
DEADLINE_SECONDS = 1800.0


def main(arguments):
    options = parse(arguments)
    limit = parse_bytes(options.limit)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        run(limit, 0, folder / "start", "start")
        budget_bytes = limit - json.loads((folder / "start.json").read_text())["data_bytes"]
        num_layers = math.ceil(2 * budget_bytes / LAYER_BYTES)
        failed = run(limit, num_layers, folder / "limited.weights.h5", "plain", check=False)
        say(f"one process under the limit: exit code {failed.returncode}")
        launched = [sys.executable, "-m", "tfparallel", "launch"]
        launched += [f"--nproc_per_node={options.num_processes}", "--"]
        run(limit, num_layers, folder / "placed.keras", "placed", launched)
        placed = json.loads((folder / "placed.keras.json").read_text())
        say(f"{options.num_processes} processes: loss {placed['loss']}")
        run(0, num_layers, folder / "single.weights.h5", "single")
        single = json.loads((folder / "single.weights.h5.json").read_text())
        largest = difference(folder / "single.weights.h5", folder / "placed.keras")
        file_bytes = (folder / "placed.keras").stat().st_size
    rows = {
        "limit": limit,
        "own": budget_bytes,
        "exit_code": failed.returncode,
        "last_words": last_words(failed.stdout),
        "placed": placed,
        "single": single,
        "largest": largest,
        "file_bytes": file_bytes,
    }
    flags = ("limit", "num_processes")
    contest.publish("memory", page(rows, options), rows, options, *flags)
    return 0 if failed.returncode and largest <= 1e-4 else 1


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--limit", default="3GB", help="what a process may hold (3GB)")
    parser.add_argument("--num_processes", type=int, default=11, help="processes (11)")
    parser.add_argument("--folder", help="where the files of a run go (the system's own place)")
    return contest.parse(parser, arguments)


def run(limit, num_layers, output, mode, launched=(), check=True):
    """Trains once, in a process or in those of a job; returns how it ended."""
    program = [sys.executable, RUN, limit, num_layers, NUM_STEPS, output, mode]
    done = subprocess.run(
        [*launched, *map(str, program)],
        cwd=TOP,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"{mode} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done


class Member(io.RawIOBase):
    """A file in an uncompressed archive; `zipfile` can seek backwards only from the start."""

    def __init__(self, path, name):
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(name)
        if member.compress_type != zipfile.ZIP_STORED:
            raise RuntimeError(f"{name} in {path} is compressed")
        self._file = open(path, "rb")  # noqa: SIM115  (closed by close)
        self._file.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", self._file.read(4))
        self._start = member.header_offset + 30 + name_length + extra_length
        self._size, self._place = member.file_size, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self._place

    def seek(self, offset, whence=os.SEEK_SET):
        self._place = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place += offset
        return self._place

    def readinto(self, buffer):
        self._file.seek(self._start + self._place)
        number = self._file.readinto(memoryview(buffer)[: max(0, self._size - self._place)])
        self._place += number
        return number

    def close(self):
        self._file.close()
        super().close()


def difference(weights_path, keras_path):
    """The largest difference of a weight or slot, relative to the largest value in its variable."""
    largest = 0.0
    with (
        h5py.File(weights_path) as single,
        Member(keras_path, "model.weights.h5") as file,
        h5py.File(file) as placed,
    ):

        def compare(name, item):
            nonlocal largest
            if isinstance(item, h5py.Dataset):
                ours = item[()]
                size = float(np.max(np.abs(ours))) or 1.0
                largest = max(largest, float(np.max(np.abs(ours - placed[name][()]))) / size)

        single.visititems(compare)
    return largest


def page(rows, options):
    by_process = rows["placed"]["held"]
    parameters = 4 * rows["placed"]["num_parameters"]
    slots = sum(process["slot_bytes"] for process in by_process)
    return [
        "## Memory: a model that no process may hold",
        "",
        f"Dense layers of {memory_run.WIDTH} units, {rows['placed']['num_parameters']:,} weights "
        f"in float32, Adam, {NUM_STEPS} steps of {memory_run.BATCH} of scikit-learn's digits. "
        f"RLIMIT_DATA is {options.limit} a process; TensorFlow takes some of it.",
        "",
        *sizes_table(
            rows["own"],
            ("what a process may hold", rows["own"]),
            ("parameters", parameters),
            ("training state: parameters and slots", parameters + slots),
            ("the saved file", rows["file_bytes"]),
        ),
        "",
        *contest.table(
            ("run", "result"),
            (
                "plain Keras, 1 process under the limit",
                f'fails: exit code {rows["exit_code"]}, "{rows["last_words"]}"',
            ),
            (
                f"`model_parallel`, {options.num_processes} processes under the limit",
                f"trains and saves, loss {rows['placed']['loss']:.7g}",
            ),
            ("`model_parallel`, 1 process without a limit", f"loss {rows['single']['loss']:.7g}"),
            (
                "largest difference of a weight or slot, of the largest in its variable",
                f"{rows['largest']:.1e}",
            ),
            (
                "resident memory of a process, the largest",
                f"{gigabytes(max(each['peak_memory_bytes'] for each in by_process))} GB",
            ),
        ),
    ]


def sizes_table(budget_bytes, *sizes):
    """The lines of a table of sizes in bytes, each with its share of what a process may hold."""
    return contest.table(
        ("", "GB", "of what a process may hold"),
        *((name, gigabytes(size), f"{size / budget_bytes:.2f}") for name, size in sizes),
    )


def last_words(text):
    """The line of a failed run that gives the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line for line in lines if any(word in line for word in ("OOM", "bad_alloc", "MemoryError"))
    ]
    return ((errors or lines or ["killed"])[-1])[:120].replace("|", "/")


def gigabytes(number):
    return f"{number / 1e9:.2f}"


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    contest.run(main)
