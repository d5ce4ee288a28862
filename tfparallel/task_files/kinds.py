"""The kinds of tasks that `tfparallel init` writes, and the data files that each can read."""

import dataclasses
import os
from collections.abc import Sequence

__all__ = ["KINDS", "SAMPLE", "Kind", "data_problems"]

SAMPLE = "sample"  # Instead of a file: data that the task file makes itself.


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of task.

    Attributes:
        predicts: What the model predicts; also the first line of the task file.
        endings: The data files that it can read.
        content: What must be in them.
    """

    predicts: str
    endings: Sequence[str]
    content: str


KINDS = {
    "image": Kind(
        predicts="one class for each image",
        endings=(".npz",),
        content="x, images of shape (n, height, width) or (n, height, width, channels), and y, "
        "their classes from 0",
    ),
    "table": Kind(
        predicts="a column of a table from the others",
        endings=(".csv", ".npz"),
        content="x, numbers of shape (n, columns), and y, a class from 0 or a number each",
    ),
    "text": Kind(
        predicts="the next character of a text", endings=(".txt",), content="text in UTF-8"
    ),
    "series": Kind(
        predicts="the next value of a time series",
        endings=(".csv", ".npz"),
        content="x, values of shape (steps,) or (steps, series), the first to be predicted",
    ),
}


def data_problems(kind: str, data: str) -> list[str]:
    """Returns why the data cannot be read for a task of that kind; what is in it comes later."""
    if data == SAMPLE:
        return []
    endings, content = KINDS[kind].endings, KINDS[kind].content
    if not data.endswith(tuple(endings)):
        return [
            f"For --kind={kind} the data must be {SAMPLE}, or a file that ends in "
            f"{' or '.join(endings)} ({content}). Received: --data={data}."
        ]
    if not os.path.isfile(data):
        return [f"The data file does not exist. Received: --data={data}."]
    return []
