"""Functions as bytes for another process, with the names of the files that they come from.

Since 3.1.3 cloudpickle calls each file "<dynamic-code>". Then nobody finds the text of a notebook's
cell, which `tf.function` reads to convert `if` and `for`, nor a line in a traceback.
"""

import io
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["as_bytes"]


def as_bytes(thing: Any) -> bytes:
    """Returns what `pickle.loads` makes `thing` of again, in another process.

    Raises:
        Exception: Whatever a part of it raises that cannot be sent.
    """
    file = io.BytesIO()
    _Pickler(file).dump(thing)
    return file.getvalue()


def _reduced(code: types.CodeType) -> tuple[Callable, tuple]:
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _named, (make, arguments, code.co_filename)


def _named(make: Callable, arguments: tuple, filename: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduced})
