"""A model's files: each of them whole at any moment, and written without a copy of the model.

Every worker calls `model.save`. Their paths may be one and the same, on a folder that they share,
or one for each, as TensorFlow's tutorial has it; no worker can tell which without asking the
others, and the guard `if worker_index() == 0:` is so common that a save must not wait for anybody.
So each worker writes beside its path and then moves what it wrote into place.
"""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfparallel.extend import is_own

__all__ = ["can_be_streamed", "moved_into_place", "save_streamed"]


@contextlib.contextmanager
def moved_into_place(path: str) -> Iterator[str]:
    """Yields a path to write; what stands there when the block ends replaces `path`.

    Args:
        path: A file, a folder, or the name that several files begin with. A block that raises
            leaves what was there before.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if "://" in path or not os.path.isdir(folder):
        yield path  # Remote, or for the writer to refuse in its own words.
        return
    # On the same file system, where a move is one step for whoever reads.
    with tempfile.TemporaryDirectory(prefix=".tfparallel_", dir=folder) as own:
        yield os.path.join(own, os.path.basename(os.path.normpath(path)))
        for written, _, names in os.walk(own):
            target = os.path.normpath(os.path.join(folder, os.path.relpath(written, own)))
            os.makedirs(target, exist_ok=True)
            for name in names:
                os.replace(os.path.join(written, name), os.path.join(target, name))


def can_be_streamed(
    model: keras.Model,
    path: str,
    overwrite: bool,
    zipped: bool | None,
    others: Mapping[str, Any],
) -> bool:
    """Whether `save_streamed` writes what `model.save` writes, given the same arguments."""
    if others or is_own(model, "save"):
        return False
    is_new = overwrite or not os.path.exists(path)
    folder = os.path.dirname(os.path.abspath(path))
    return path.endswith(".keras") and is_new and zipped is not False and os.path.isdir(folder)


def save_streamed(model: keras.Model, path: str) -> None:
    """Writes what `model.save(path)` writes, with no more than one variable in memory.

    Keras holds all weights and slots in memory before it writes the file, when the machine has so
    much free, and knows nothing of the limit of the process. Into a folder it writes each variable
    as it comes; the file is an archive of that folder.

    Args:
        model: The model.
        path: Ends in `.keras`. What stands there is replaced when all is written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    with (
        tempfile.TemporaryDirectory(prefix=".tfparallel_", dir=folder) as parts,
        moved_into_place(path) as own_path,
    ):
        keras.saving.save_model(model, os.path.join(parts, "model"), zipped=False)
        parts = os.path.join(parts, "model")
        with zipfile.ZipFile(own_path, "w") as archive:
            for where, _, names in os.walk(parts):
                for name in names:
                    part = os.path.join(where, name)
                    archive.write(part, os.path.relpath(part, parts))
                    os.remove(part)
