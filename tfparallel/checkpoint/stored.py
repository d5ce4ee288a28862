"""Reads and verifies one checkpoint on disk.

state.npy       the arrays, one after the other, in the format of `numpy.save`
manifest.json   their specs, and the SHA-256 of `state.npy` and of the manifest itself
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

FORMAT = 1
ARRAYS = "state.npy"
MANIFEST = "manifest.json"
# A network file system may fail temporarily (ESTALE, EIO).
_PAUSES_SECONDS = (0.5, 2.0)


class ForeignCheckpointError(ValueError):
    """The folder or its content does not fit this run; nothing was trained."""


class NewerCheckpointError(ForeignCheckpointError):
    """A later version wrote the checkpoint; falling back to an older one would be wrong."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; complete ones stay intact."""


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
    """A verified checkpoint.

    Attributes:
        path: Its folder.
        content: JSON metadata of the run.
        specs: `[name, shape, dtype]` of each array.
    """

    path: str
    content: dict[str, Any]
    specs: list[list[Any]]

    def arrays(self, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yields the arrays from `start` up to `stop`, by default all, reading each lazily.

        Raises:
            CheckpointError: If they are no longer readable.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(os.path.join(self.path, ARRAYS), "rb"))
                for _ in range(start):
                    _skip_array(file)
            except OSError as error:
                raise self._failure(error) from error
            for _, _, dtype in self.specs[start:stop]:
                try:
                    array = np.load(file, allow_pickle=False)
                except OSError as error:
                    raise self._failure(error) from error
                # NumPy stores bfloat16 and similar types as raw bytes.
                yield array.view(np.dtype(dtype)) if array.dtype.kind == "V" else array

    def _failure(self, error):
        return CheckpointError(
            f"The checkpoint {self.path} could not be read; a working disk is required. Received: "
            f"{error}. Nothing was trained, and the checkpoint is kept: restart the run."
        )


def read(path: str) -> StoredCheckpoint:
    """Reads a checkpoint and verifies all of its content.

    Raises:
        NewerCheckpointError: If a later version wrote it.
        OSError, ValueError: If it is unreadable or incomplete. A modified manifest may raise other
            errors.
    """
    for pause in _PAUSES_SECONDS:
        try:
            return _verified(path)
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(pause)
    return _verified(path)


def _verified(path) -> StoredCheckpoint:
    with open(os.path.join(path, MANIFEST), "rb") as file:
        stored = json.load(file)
    manifest = stored["manifest"]
    if digest(manifest) != stored["sha256"]:
        raise ValueError(f"{MANIFEST} does not match its checksum")
    if manifest["format"] > FORMAT:
        raise NewerCheckpointError(
            f"The checkpoint {path} was written by a later version of tfparallel. Format {FORMAT} "
            f"is required. Received: format {manifest['format']}. Upgrade tfparallel, or choose "
            "another folder."
        )
    for name, expected in manifest["files"].items():
        with open(os.path.join(path, name), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != expected["size_bytes"]:
                raise ValueError(f"{name} has {size_bytes} of {expected['size_bytes']} bytes")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise ValueError(f"{name} does not match its checksum")
    return StoredCheckpoint(path, manifest["content"], manifest["arrays"])


def digest(manifest: dict[str, Any]) -> str:
    """Returns the checksum of a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _skip_array(file) -> None:
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    file.seek(math.prod(shape) * dtype.itemsize, os.SEEK_CUR)
