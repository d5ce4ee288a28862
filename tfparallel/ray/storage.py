"""The folder of a job's checkpoints, which every node must see at the same path.

Worker 0 reads and writes them, on whatever node it runs. A node with another folder at that path
would start over without a word. So the driver puts a marker there, and each actor looks for it.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def marked(storage_path: str | None) -> Iterator[str | None]:
    """Creates the folder, and yields the path of a marker in it; None without a folder.

    Raises:
        RuntimeError: If this process cannot write there.
    """
    if storage_path is None:
        yield None
        return
    folder = os.path.abspath(storage_path)
    try:
        os.makedirs(folder, exist_ok=True)
        file = tempfile.NamedTemporaryFile(prefix=".tfparallel_", dir=folder)  # noqa: SIM115
    except OSError as error:
        raise RuntimeError(
            "The storage path must be a folder that the driver can write to. Received: "
            f"storage_path={storage_path!r} ({error.strerror}). Pass a folder that all nodes share."
        ) from error
    with file:
        yield file.name


def describe_unseen(marker: str, address: str) -> str:
    """Returns the error of a node that has no marker at its path."""
    return (
        f"The node {address} does not see the storage path; every node must see the same folder at "
        f"this path. Received: storage_path={os.path.dirname(marker)!r}, which has on that node "
        "not the file that the driver wrote. Mount the shared file system there, or remove the "
        "node."
    )
