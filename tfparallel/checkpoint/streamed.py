"""A `.keras` file written variable by variable.

Keras holds all weights and slots in memory before it writes the file, when the machine has so much
free, and knows nothing of the limit of the process. Into a folder it writes each variable as it
comes; the file is an archive of that folder.
"""

import os
import tempfile
import zipfile

import keras

from tfparallel.checkpoint.atomic_write import moved_into_place

__all__ = ["save_streamed"]


def save_streamed(model: keras.Model, path: str) -> None:
    """Writes what `model.save(path)` writes, with no more than one variable in memory.

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
