"""The folder of a run's checkpoints. Each checkpoint is complete, or recognizably incomplete.

    checkpoints/
      step_00000023/      renamed into place once everything is on disk
        state.npy           the arrays, one after the other, in the format of `numpy.save`
        manifest.json       their specs, and the SHA-256 of `state.npy` and of the manifest itself
      step_00000025/
      step_00000025.new/  replaces the checkpoint of the same step once that is removed
      unfinished_…/       left by a killed process; the next write removes it
      unreadable_…/       was unreadable when a run resumed from an older one; never removed
      .writer             identifies the writer (`writer_lock.py`)

The process may be killed, or the disk fill up, at any moment: existing checkpoints stay intact.
Disks and copies can fail in other ways too, so every checkpoint is verified when it is read.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from tfparallel.checkpoint import writer_lock
from tfparallel.checkpoint.stored import (
    ARRAYS,
    FORMAT,
    MANIFEST,
    CheckpointError,
    ForeignCheckpointError,
    NewerCheckpointError,
    StoredCheckpoint,
    digest,
    read,
)

_UNFINISHED = "unfinished_"
_UNREADABLE = "unreadable_"
_NEW = ".new"
_NAME = re.compile(r"step_(\d{8,})(\.new)?")
# Background writes of this process, by folder. Readers of the folder wait for them, and so does
# Python before it exits.
_WRITER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
_writes: dict[str, Future] = {}


class CheckpointFolder:
    """Writes and reads checkpoints.

    Args:
        directory: The folder; `prepare()` creates it.
        keep: Number of newest checkpoints to keep.
    """

    def __init__(self, directory: str, keep: int):
        self.directory = directory
        self._keep = keep
        self._passed_over: dict[str, bool] = {}  # Name -> whether it was readable.

    def prepare(self) -> None:
        """Creates the folder if needed, and makes this process its only writer.

        Raises:
            ForeignCheckpointError: If that fails.
        """
        self.settle()
        try:
            os.makedirs(self.directory, exist_ok=True)
            # Permissions are not enough: the file system may be read-only.
            with tempfile.TemporaryFile(dir=self.directory):
                pass
            other = writer_lock.take(self.directory)
        except OSError as error:
            raise ForeignCheckpointError(
                "The checkpoint folder is not writable; a writable one is required. Received: "
                f"{self.directory} ({error.strerror}). Choose another folder."
            ) from error
        if other is not None:
            raise ForeignCheckpointError(
                "Another run is writing checkpoints to this folder; each run needs its own. "
                f"Received: {self.directory}, in use by {other}. Stop that run first, or choose "
                "another folder."
            )

    def release(self) -> None:
        """Waits like `settle`, and lets another run write into the folder.

        Raises:
            CheckpointError: If the last checkpoint could not be written.
        """
        try:
            self.settle()
        finally:
            writer_lock.release(self.directory)

    def newest(self) -> StoredCheckpoint | None:
        """Returns the newest complete checkpoint; warns about newer ones that are not.

        Raises:
            ForeignCheckpointError: If there are checkpoints, but none is complete.
            CheckpointError: If one of them is unreadable, and none is complete.
        """
        self._passed_over = {}
        try:
            names = self._names()
        except OSError as error:
            raise CheckpointError(
                "The checkpoint folder cannot be read; a working disk is required. Received: "
                f"{self.directory} ({error.strerror}). Restart the run when the disk is available "
                "again."
            ) from error
        for name in reversed(names):
            path = os.path.join(self.directory, name)
            try:
                return read(path)
            except NewerCheckpointError:
                raise
            except OSError as error:
                self._pass_over(name, error, is_read=False)
            # A modified file may contain anything, at any depth.
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                self._pass_over(name, error, is_read=True)
        if not all(self._passed_over.values()):
            raise CheckpointError(
                f"None of the {len(names)} checkpoints is intact, and some could not be read; a "
                f"working disk is required. Received: {self.directory}. Restart the run when the "
                "disk or file server is available again."
            )
        if names:
            raise ForeignCheckpointError(
                f"None of the {len(names)} checkpoints is intact; one is required to resume. "
                f"Received: {self.directory}. Choose an empty folder to start from scratch."
            )
        return None

    def _pass_over(self, name, error, *, is_read):
        self._passed_over[name] = is_read
        fault = "is damaged" if is_read else "cannot be read"
        note = "" if is_read else f" It will be kept as {_UNREADABLE}{name}."
        warnings.warn(
            f"Skipping the checkpoint {os.path.join(self.directory, name)}, which {fault}: "
            f"{type(error).__name__}: {error}.{note}",
            stacklevel=3,
        )

    def write(
        self,
        step: int,
        specs: Sequence[Sequence[Any]],
        arrays: Iterable[np.ndarray],
        content: dict[str, Any],
        *,
        beside: bool = False,
    ) -> None:
        """Writes a checkpoint, renames it into place and removes the oldest ones.

        Args:
            step: Number of steps that the run has completed.
            specs: `[name, shape, dtype]` of each array.
            arrays: The state; each array is written before the next one is requested.
            content: JSON-serializable metadata of the run.
            beside: Whether to write in the background; the arrays must not change any more.

        Raises:
            CheckpointError: If the write fails, for example because the disk is full, or if the
                previous background write has failed.
        """
        self.settle()
        if not beside:
            self._write(step, specs, arrays, content)
            return
        written = _WRITER.submit(self._write, step, specs, arrays, content)
        _writes[os.path.realpath(self.directory)] = written
        _WRITER.submit(_give_back_memory)

    def _write(self, step, specs, arrays, content):
        path = os.path.join(self.directory, f"step_{step:08d}")
        unfinished = os.path.join(
            self.directory, f"{_UNFINISHED}{os.path.basename(path)}_{secrets.token_hex(4)}"
        )
        try:
            self._require_writer()
            self._sweep()
            os.mkdir(unfinished)
            with _HashedFile(os.path.join(unfinished, ARRAYS)) as file:
                for array in arrays:
                    np.save(file, array, allow_pickle=False)
            manifest = {
                "format": FORMAT,
                "files": {ARRAYS: {"sha256": file.sha256, "size_bytes": file.size_bytes}},
                "arrays": [list(spec) for spec in specs],
                "content": content,
            }
            with _HashedFile(os.path.join(unfinished, MANIFEST)) as file:
                text = json.dumps({"manifest": manifest, "sha256": digest(manifest)}, indent=1)
                file.write(text.encode())
            _sync(unfinished)
            self._require_writer()
            self._move_into_place(unfinished, path)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(self._failure(path, error)) from error
        for name in list(self._passed_over):
            self._remove(name)
        earlier = []
        with contextlib.suppress(OSError):  # The checkpoint is safe; the next write cleans up.
            earlier = [name for name in self._names() if _step_of(name) <= step]
        for name in earlier[: -self._keep]:
            self._remove(name)

    def _move_into_place(self, unfinished, path):
        """Renames the new checkpoint into place; replaces one of the same step only at the end."""
        if not os.path.lexists(path):
            os.rename(unfinished, path)
        else:
            self._remove(os.path.basename(path) + _NEW)  # An existing one was passed over.
            os.rename(unfinished, path + _NEW)
            _sync(self.directory)
            self._remove(os.path.basename(path))
            os.rename(path + _NEW, path)
        _sync(self.directory)

    def _require_writer(self):
        if writer_lock.is_lost(self.directory):
            raise CheckpointError(
                "Another run took over this checkpoint folder while this one was unreachable; a "
                f"folder may have only one writer. Received: {self.directory}. Stop one of the "
                "two, or restart this one with another folder."
            )

    def settle(self) -> None:
        """Waits for a background write into this folder.

        Raises:
            CheckpointError: If the write has failed.
        """
        write = _writes.pop(os.path.realpath(self.directory), None)
        if write is not None:
            write.result()

    def _failure(self, path, error):
        try:
            names = [name for name in self._names() if name not in self._passed_over]
            before = "There is no earlier one"
        except OSError:
            names, before = [], "The folder is currently unreadable"
        if names:
            before = f"{os.path.join(self.directory, names[-1])} is intact"
        return (
            f"The checkpoint {path} could not be written; free space and a working disk are "
            f"required. Received: {error.strerror or error}. {before}; free some space and restart "
            "the run, which then resumes."
        )

    def _names(self):
        """Returns the names of the checkpoints, oldest first."""
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = filter(_NAME.fullmatch, names)
        return sorted(names, key=lambda name: (_step_of(name), name))

    def _remove(self, name):
        """Removes a checkpoint if possible; sets an unreadable one aside instead."""
        path = os.path.join(self.directory, name)
        is_read = self._passed_over.pop(name, True)
        # Rename it first: a partly removed checkpoint would look corrupt.
        away = f"{_UNFINISHED}{secrets.token_hex(4)}" if is_read else f"{_UNREADABLE}{name}"
        if not is_read and os.path.lexists(os.path.join(self.directory, away)):
            away = f"{away}_{secrets.token_hex(4)}"
        away = os.path.join(self.directory, away)
        try:
            os.rename(path, away)
        except FileNotFoundError:
            return
        except OSError:
            self._passed_over[name] = is_read
            return
        if is_read:
            shutil.rmtree(away, ignore_errors=True)

    def _sweep(self):
        """Finishes the replacement, and removes the leftovers, of a killed process."""
        for name in self._names():
            path = os.path.join(self.directory, name)
            if name.endswith(_NEW) and name not in self._passed_over:
                self._remove(name.removesuffix(_NEW))
                with contextlib.suppress(OSError):  # The older one still exists.
                    os.rename(path, path.removesuffix(_NEW))
        for name in os.listdir(self.directory):
            if name.startswith(_UNFINISHED):
                shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)


class _HashedFile:
    """A new file with the checksum of the data as passed to `write`; on disk once closed."""

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


def _give_back_memory() -> None:
    """Makes glibc return freed memory to the system.

    It keeps a pool for each thread, which would grow over hundreds of checkpoints.
    """
    with contextlib.suppress(OSError, AttributeError):  # Other C libraries lack the function.
        ctypes.CDLL(None).malloc_trim(0)


def _step_of(name) -> int:
    return int(_NAME.fullmatch(name)[1])


def _sync(folder):
    """Flushes a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
