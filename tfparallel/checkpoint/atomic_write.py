"""Files that several workers write to the same path, each of them whole at any moment.

Every worker calls `model.save`. Their paths may be one and the same, on a folder that they share,
or one for each, as TensorFlow's tutorial has it; no worker can tell which without asking the
others, and the guard `if worker_index() == 0:` is so common that a save must not wait for anybody.
So each worker writes beside its path and then moves what it wrote into place.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator

__all__ = ["moved_into_place"]


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
