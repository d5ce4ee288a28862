"""The folder of a run's checkpoints: each is whole, or known not to be.

    checkpoints/
      step_00000023/      renamed into place when all of it has reached the disk
        state.npy           the arrays, one behind the other, as `numpy.save` writes them
        manifest.json       what they are, and the SHA-256 of `state.npy` and of the manifest itself
      step_00000025/
      unfinished_step_…/  what a killed process left; swept away by the next write

A process may be killed, or a disk be full, at any moment: the checkpoints that were there before
stay as they were. Disks and copies fail in other ways, too; what is read is verified first.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

__all__ = ["CheckpointError", "CheckpointFolder", "Found", "ForeignCheckpointError"]

_FORMAT = 1
_ARRAYS = "state.npy"
_MANIFEST = "manifest.json"
_UNFINISHED = "unfinished_"
_NAME = re.compile(r"step_(\d{8,})")
# What this process writes beside its training, by folder: another reader of it waits. Python does,
# too, before it ends.
_WRITER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
_writes: dict[str, Future] = {}


class ForeignCheckpointError(ValueError):
    """The folder, or what is in it, does not fit this run; nothing was trained."""


class NewerCheckpointError(ForeignCheckpointError):
    """This version cannot read it, and an older one beside it is not what is meant."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are whole."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint that was verified.

    Attributes:
        path: Its folder.
        content: What the run said of itself, as JSON holds it.
        specs: `[name, shape, dtype]` of each array.
    """

    path: str
    content: dict[str, Any]
    specs: list[list[Any]]

    def arrays(self, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Reads arrays, each when it is asked for: all, or those from `start` up to `stop`."""
        with open(os.path.join(self.path, _ARRAYS), "rb") as file:
            for index, (_, _, dtype) in enumerate(self.specs[:stop]):
                if index < start:
                    _skip_array(file)
                    continue
                array = np.load(file, allow_pickle=False)
                # NumPy has no name for bfloat16 and its like, and keeps their bytes.
                yield array.view(np.dtype(dtype)) if array.dtype.kind == "V" else array


class CheckpointFolder:
    """Writes and reads checkpoints.

    Args:
        directory: The folder; made by `prepare()`.
        keep: How many of the newest checkpoints stay.
    """

    def __init__(self, directory: str, keep: int):
        self.directory = directory
        self._keep = keep

    def prepare(self) -> None:
        """Makes the folder, if it is missing, and tries to write into it.

        Raises:
            ForeignCheckpointError: If that fails.
        """
        self.settle()
        try:
            os.makedirs(self.directory, exist_ok=True)
            # Permissions alone do not tell: the file system may be read-only.
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise ForeignCheckpointError(
                "The folder for checkpoints cannot be written to; a writable one is required. "
                f"Received: {self.directory} ({error.strerror}). Name another folder."
            ) from error

    def newest(self) -> Found | None:
        """Returns the newest checkpoint that is whole; warns of those that are not.

        Raises:
            ForeignCheckpointError: If there are some, and none of them is whole.
        """
        steps = self._steps()
        for step in reversed(steps):
            path = self._path(step)
            try:
                return _verified(path)
            except NewerCheckpointError:
                raise
            except (OSError, ValueError, KeyError, TypeError) as error:
                warnings.warn(
                    f"The checkpoint {path} is not whole, and is passed over for the one before: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )
        if steps:
            raise ForeignCheckpointError(
                f"None of the {len(steps)} checkpoints is whole, and one is required to resume. "
                f"Received: {self.directory}. Name an empty folder to start anew."
            )
        return None

    def write(
        self,
        step: int,
        specs: Sequence[Sequence[Any]],
        arrays: Iterable[np.ndarray],
        content: dict[str, Any],
    ) -> str:
        """Writes a checkpoint beside the others, renames it into place and removes the oldest.

        Args:
            step: How many steps the run has made.
            specs: `[name, shape, dtype]` of each array.
            arrays: The state; each is written before the next is asked for.
            content: What the run says of itself, as JSON holds it.

        Returns:
            Its path.

        Raises:
            CheckpointError: If the disk is full, or will not take it for another reason.
        """
        self.settle()
        return self._write(step, specs, arrays, content)

    def _write(self, step, specs, arrays, content):
        path = self._path(step)
        unfinished = os.path.join(self.directory, _UNFINISHED + os.path.basename(path))
        try:
            self._sweep()
            os.mkdir(unfinished)
            with _HashedFile(os.path.join(unfinished, _ARRAYS)) as file:
                for array in arrays:
                    np.save(file, array, allow_pickle=False)
            manifest = {
                "format": _FORMAT,
                "files": {_ARRAYS: {"sha256": file.sha256, "size_bytes": file.size_bytes}},
                "arrays": [list(spec) for spec in specs],
                "content": content,
            }
            with _HashedFile(os.path.join(unfinished, _MANIFEST)) as file:
                text = json.dumps({"manifest": manifest, "sha256": _digest(manifest)}, indent=1)
                file.write(text.encode())
            _sync(unfinished)
            # What is ahead was found broken, or this run would have gone on from there.
            for ahead in [other for other in self._steps() if other >= step]:
                self._remove(ahead)
            os.rename(unfinished, path)
            _sync(self.directory)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(self._failure(path, error)) from error
        for old in self._steps()[: -self._keep]:
            self._remove(old)
        return path

    def write_beside(
        self,
        step: int,
        specs: Sequence[Sequence[Any]],
        arrays: Sequence[np.ndarray],
        content: dict[str, Any],
    ) -> None:
        """As `write`, while this process goes on; the one before is waited for.

        Args:
            step: As for `write`.
            specs: Likewise.
            arrays: The state, which nobody changes any more.
            content: As for `write`.

        Raises:
            CheckpointError: If the write before failed.
        """
        self.settle()
        written = _WRITER.submit(self._write, step, specs, arrays, content)
        _writes[os.path.realpath(self.directory)] = written

    def settle(self) -> None:
        """Waits until what is written into this folder is there.

        Raises:
            CheckpointError: If it could not be written.
        """
        write = _writes.pop(os.path.realpath(self.directory), None)
        if write is not None:
            write.result()

    def _failure(self, path, error):
        steps = self._steps()
        before = f"{self._path(steps[-1])} is whole" if steps else "There is none before it"
        return (
            f"The checkpoint {path} could not be written; room and a working disk are required. "
            f"Received: {error.strerror or error}. {before}; free some space and start the run "
            "again, and it goes on from there."
        )

    def _steps(self):
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def _path(self, step):
        return os.path.join(self.directory, f"step_{step:08d}")

    def _remove(self, step):
        # Renamed first: half removed, it would be taken for a broken one.
        path = self._path(step)
        doomed = os.path.join(self.directory, f"{_UNFINISHED}removed_{os.path.basename(path)}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self):
        for name in os.listdir(self.directory):
            if name.startswith(_UNFINISHED):
                shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)


class _HashedFile:
    """A new file, its checksum that of what was meant to be written; on the disk once closed."""

    def __init__(self, path):
        self._file = open(path, "xb")  # noqa: SIM115  (closed by __exit__)
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data):
        self._hash.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)

    @property
    def sha256(self):
        return self._hash.hexdigest()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def _skip_array(file) -> None:
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    file.seek(math.prod(shape) * dtype.itemsize, os.SEEK_CUR)


def _verified(path) -> Found:
    with open(os.path.join(path, _MANIFEST), "rb") as file:
        read = json.load(file)
    manifest = read["manifest"]
    if _digest(manifest) != read["sha256"]:
        raise ValueError(f"{_MANIFEST} does not have its checksum")
    if manifest["format"] > _FORMAT:
        raise NewerCheckpointError(
            f"The checkpoint {path} was written by a later version of tfparallel. Format {_FORMAT} "
            f"is required. Received: format {manifest['format']}. Upgrade tfparallel, or name "
            "another folder."
        )
    for name, expected in manifest["files"].items():
        with open(os.path.join(path, name), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != expected["size_bytes"]:
                raise ValueError(f"{name} has {size_bytes} of {expected['size_bytes']} bytes")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise ValueError(f"{name} does not have its checksum")
    return Found(path, manifest["content"], manifest["arrays"])


def _digest(manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync(folder):
    """Has a folder's entries reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
