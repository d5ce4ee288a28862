"""Writes model files atomically, and without a copy of the model in memory.

Every worker may call `model.save`. The workers may use one path in a shared folder, or a path each,
as in TensorFlow's tutorial; a worker cannot know which without asking the others, and the guard
`if worker_index() == 0:` is so common that a save must not wait for other workers. So each worker
writes to a temporary path next to the target, and then moves the result into place.

If each worker has a part of the weights, all of them must save together anyway. The chief then
writes a file that several workers save to the same place.
"""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.extend import is_own


@contextlib.contextmanager
def moved_into_place(path: str) -> Iterator[str]:
    """Yields a temporary path to write; its files replace `path` when the block ends.

    Args:
        path: A file, a folder, or the common prefix of several files. If the block raises, existing
            files stay unchanged.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if "://" in path or not os.path.isdir(folder):
        yield path  # A remote path, or a missing folder, which the writer reports itself.
        return
    # On the same file system, so that a move is atomic for readers.
    with tempfile.TemporaryDirectory(prefix=".tfparallel_", dir=folder) as temporary:
        yield os.path.join(temporary, os.path.basename(os.path.normpath(path)))
        for written, _, names in os.walk(temporary):
            target = os.path.normpath(os.path.join(folder, os.path.relpath(written, temporary)))
            os.makedirs(target, exist_ok=True)
            for name in names:
                os.replace(os.path.join(written, name), os.path.join(target, name))


def is_written_by_chief(workers: ProcessGroup, path: str, may_share: bool) -> bool:
    """Whether this worker can leave its file to the chief, which writes the same one.

    All workers must call it. The chief creates a marker in its folder; a worker that sees the
    marker in its own folder saves to the same place, even if its host mounts it elsewhere.

    Args:
        workers: The process group of all workers.
        path: The path at which this worker saves.
        may_share: Whether this worker may leave its file to the chief, or write it for others.
    """
    folder, name = os.path.split(os.path.abspath(path))
    with contextlib.ExitStack() as stack:
        marker = ""
        if workers.worker_index == 0 and may_share:
            with contextlib.suppress(OSError):  # Saving reports the error.
                file = tempfile.NamedTemporaryFile(prefix=".tfparallel_", dir=folder)  # noqa: SIM115
                marker = os.path.basename(stack.enter_context(file).name)
        marker, name_of_chief = workers.exchange([marker, name], "where to save")[0]
        is_same = name == name_of_chief and os.path.exists(os.path.join(folder, marker))
        workers.exchange(None, "who saves")  # The marker stays until all workers have looked.
    return bool(marker) and is_same and may_share and workers.worker_index > 0


def can_be_streamed(
    model: keras.Model,
    path: str,
    overwrite: bool,
    zipped: bool | None,
    others: Mapping[str, Any],
) -> bool:
    """Whether `save_streamed` writes the same file as `model.save` with the same arguments."""
    if others or is_own(model, "save"):
        return False
    is_new = overwrite or not os.path.exists(path)
    folder = os.path.dirname(os.path.abspath(path))
    return path.endswith(".keras") and is_new and zipped is not False and os.path.isdir(folder)


def save_streamed(model: keras.Model, path: str) -> None:
    """Writes the same file as `model.save(path)`, with at most one variable in memory.

    Keras collects all weights and slots in memory before it writes the file if the machine has
    enough free memory, whatever the limit of the process. Into a folder, it writes one variable at
    a time; the `.keras` file is an archive of that folder.

    Args:
        model: The model.
        path: Ends in `.keras`. An existing file is replaced once everything is written.
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
