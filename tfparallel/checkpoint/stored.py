"""One checkpoint on the disk: what is in its folder, read and verified.

state.npy       the arrays, one behind the other, as `numpy.save` writes them
manifest.json   what they are, and the SHA-256 of `state.npy` and of the manifest itself
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

__all__ = [
    "ARRAYS",
    "FORMAT",
    "MANIFEST",
    "CheckpointError",
    "ForeignCheckpointError",
    "NewerCheckpointError",
    "StoredCheckpoint",
    "digest",
    "read",
]

FORMAT = 1
ARRAYS = "state.npy"
MANIFEST = "manifest.json"
# A network file system may fail for a moment (ESTALE, EIO).
_PAUSES_SECONDS = (0.5, 2.0)


class ForeignCheckpointError(ValueError):
    """The folder, or what is in it, does not fit this run; nothing was trained."""


class NewerCheckpointError(ForeignCheckpointError):
    """This version cannot read it, and an older one beside it is not what is meant."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; those that were whole stay."""


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
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
        """Reads arrays, each when it is asked for: all, or those from `start` up to `stop`.

        Raises:
            CheckpointError: If they cannot be read any more.
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
                # NumPy has no name for bfloat16 and its like, and keeps their bytes.
                yield array.view(np.dtype(dtype)) if array.dtype.kind == "V" else array

    def _failure(self, error):
        return CheckpointError(
            f"The checkpoint {self.path} could not be read; a working disk is required. Received: "
            f"{error}. Nothing was trained, and it stays: start the run again."
        )


def read(path: str) -> StoredCheckpoint:
    """Reads a checkpoint, and verifies all of it.

    Raises:
        NewerCheckpointError: If a later version wrote it.
        OSError, ValueError: If it cannot be read, or is not whole; or another error, of a manifest
            that was changed.
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
        read = json.load(file)
    manifest = read["manifest"]
    if digest(manifest) != read["sha256"]:
        raise ValueError(f"{MANIFEST} does not have its checksum")
    if manifest["format"] > FORMAT:
        raise NewerCheckpointError(
            f"The checkpoint {path} was written by a later version of tfparallel. Format {FORMAT} "
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
    return StoredCheckpoint(path, manifest["content"], manifest["arrays"])


def digest(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _skip_array(file) -> None:
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    file.seek(math.prod(shape) * dtype.itemsize, os.SEEK_CUR)
