r"""A model that no process may hold, trained by many, each under a limit of the operating system.

    .venv/bin/python benchmarks/memory.py
    .venv/bin/python benchmarks/memory.py --parallel=data --limit=1.5GB --num_processes=8 \
        --width=2048

The first takes Linux, 22 GiB of memory, 25 GiB of disk and half an hour. Under RLIMIT_DATA a
process may hold the limit less what it takes to train next to nothing. The model's parameters alone
are twice what is left, its training state (parameters and Adam's two slots) six times. The second
has parameters of one and a half times what is left, so that they, gradients and slots are six
times. The model is trained

1. by plain Keras in one process under the limit, which fails;
2. by `tfparallel.model_parallel`, or `tfparallel.data_parallel(shard="parameters")`, in processes
   that each are under the limit, and saved;
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
import environment
import h5py
import memory_run
import numpy as np

from tfparallel.texts import parse_bytes

TOP = pathlib.Path(__file__).parents[1]
RUN = pathlib.Path(__file__).with_name("memory_run.py")
NUM_STEPS = 3
DEADLINE_SECONDS = 1800.0
# What trains in several processes: in the words of memory_run.py, and how many times what a process
# may hold the parameters are.
KINDS = {"model": ("placed", 2.0), "data": ("shared", 1.5)}
WORDS = {"model": "`model_parallel`", "data": '`data_parallel(shard="parameters")`'}


def main(arguments):
    options = parse(arguments)
    limit = parse_bytes(options.limit)
    described = environment.describe()
    mode, times = KINDS[options.parallel]
    width = options.width
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        run(limit, width, 0, folder / "start", "start")
        own = limit - json.loads((folder / "start.json").read_text())["data_bytes"]
        num_layers = math.ceil(times * own / (4 * width * (width + 3)))
        failed = run(limit, width, num_layers, folder / "limited.weights.h5", "plain", check=False)
        say(f"one process under the limit: exit code {failed.returncode}")
        launched = [sys.executable, "-m", "tfparallel", "launch"]
        launched += [f"--nproc_per_node={options.num_processes}", "--"]
        output = folder / "several.keras"
        run(limit, width, num_layers, output, mode, launched)
        several = json.loads((folder / "several.keras.json").read_text())
        say(f"{options.num_processes} processes: loss {several['loss']}")
        run(0, width, num_layers, folder / "single.weights.h5", "single")
        single = json.loads((folder / "single.weights.h5.json").read_text())
        largest = difference(folder / "single.weights.h5", output)
        file_bytes = output.stat().st_size
    rows = {
        "limit": limit,
        "own": own,
        "exit_code": failed.returncode,
        "last_words": last_words(failed.stdout),
        "several": several,
        "single": single,
        "largest": largest,
        "file_bytes": file_bytes,
    }
    block = "memory" if options.parallel == "model" else "memory_shares"
    contest.publish(block, page(rows, described, options), rows, options)
    return 0 if failed.returncode and largest <= 1e-4 else 1


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument("--limit", default="3GB", help="what a process may hold (3GB)")
    parser.add_argument("--num_processes", type=int, default=11, help="processes (11)")
    parser.add_argument("--parallel", choices=KINDS, default="model", help="what trains (model)")
    parser.add_argument("--width", type=contest.positive, default=4096, help="units (4096)")
    parser.add_argument("--folder", help="where the files of a run go (the system's own place)")
    return contest.parse(parser, arguments)


def run(limit, width, num_layers, output, mode, launched=(), check=True):
    """Trains once, in a process or in those of a job; returns how it ended."""
    program = [sys.executable, RUN, limit, width, num_layers, NUM_STEPS, output, mode]
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
    """A file in an archive that is stored as it is; `zipfile` goes back only from the start."""

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
    """The largest difference of a weight or slot, relative to the largest in its variable."""
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


def page(rows, described, options):
    several = rows["several"]
    parameters = 4 * several["num_parameters"]
    slots = 2 * parameters  # Adam's.
    gradients = 0 if options.parallel == "model" else parameters  # There one at a time.
    state = parameters + gradients + slots
    words = "parameters, gradients and slots" if gradients else "parameters and slots"
    count = f"{options.num_processes} processes"
    lines = [
        f"## Memory: a model that no process may hold, by {WORDS[options.parallel]}",
        "",
        f"Dense layers of {options.width} units, {rows['several']['num_parameters']:,} weights "
        f"in float32, Adam, {NUM_STEPS} steps of {memory_run.BATCH} of scikit-learn's digits. "
        f"RLIMIT_DATA is {options.limit} a process; TensorFlow takes some of it.",
        "",
        "| | GB | of what a process may hold |",
        "| --- | --- | --- |",
        f"| what a process may hold | {gigabytes(rows['own'])} | 1.00 |",
        f"| parameters | {gigabytes(parameters)} | {parameters / rows['own']:.2f} |",
        f"| training state: {words} | {gigabytes(state)} | {state / rows['own']:.2f} |",
        f"| the saved file | {gigabytes(rows['file_bytes'])} "
        f"| {rows['file_bytes'] / rows['own']:.2f} |",
        "",
        "| run | result |",
        "| --- | --- |",
        f"| plain Keras, 1 process under the limit | fails: exit code {rows['exit_code']}, "
        f'"{rows["last_words"]}" |',
        f"| {WORDS[options.parallel]}, {count} under the limit "
        f"| trains and saves, loss {rows['several']['loss']:.7g} |",
        f"| `model_parallel`, 1 process without a limit | loss {rows['single']['loss']:.7g} |",
        f"| largest difference of a weight or slot, of the largest in its variable "
        f"| {rows['largest']:.1e} |",
        f"| resident memory of a process, the largest | {gigabytes(several['peak'])} GB |",
    ]
    names = ("parallel", "limit", "num_processes", "width")
    return lines + contest.footer("memory", described, options, *names)


def last_words(text):
    """The line of a failed run that tells why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [
        line for line in lines if any(word in line for word in ("OOM", "bad_alloc", "MemoryError"))
    ]
    return ((told or lines or ["killed"])[-1])[:120].replace("|", "/")


def gigabytes(number):
    return f"{number / 1e9:.2f}"


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    contest.run(main)
