"""Judges TensorFlow's lists of tensors, which loops read and write item by item."""

import numpy as np

from tfparallel.judge.placements import Listed, Mixed, Replicate, Row, Shard
from tfparallel.judge.rules import first_mixed, joined, numbers_a_row
from tfparallel.judge.size import ROWS, depends_on_rows, is_row_number

OF_ROW_NUMBER = "computes with a row index"
_OTHER_KIND = "reads an unsupported list of tensors"


def _list_of(judge, op, inputs):
    placement, dims = inputs[0].placement, inputs[0].dims
    if numbers_a_row(inputs[0]) or getattr(placement, "numbers", False):
        return [(Mixed(op, OF_ROW_NUMBER), None, None)]
    if isinstance(placement, Shard):
        if placement.axis == 0:
            if placement != Shard(0) or dims is None or dims[0] != ROWS:
                return [(Mixed(op, "unstacks a tensor with several entries per row"), None, None)]
            return [(Listed(Row(None), True), None, None)]
        placement = Shard(placement.axis - 1, placement.power, placement.folded)
    mixed = first_mixed([placement])
    return [(mixed or Listed(placement), None if dims is None else dims, None)]


def _empty_list(judge, op, inputs):
    number = inputs[1].value
    by_row = number is not None and number.size == 1 and number.item() == ROWS
    if not by_row and (inputs[1].placement != Replicate() or numbers_a_row(inputs[1])):
        return [(Mixed(op, "makes a list whose length depends on the examples"), None, None)]
    return [(Listed(None, by_row), _list_dims(number, inputs[0].value), None)]


def _list_dims(number, shape) -> tuple | None:
    """Returns the number of items and their sizes."""
    if shape is None or shape.ndim == 0:
        return None
    sizes = shape.tolist()
    if any(isinstance(size, int) and size < 0 for size in sizes):
        return None
    return (None if number is None else number.item(), *sizes)


def _list_item(judge, op, inputs):
    listed, index = inputs[0].placement, inputs[1]
    if not isinstance(listed, Listed):
        return [(first_mixed([listed]) or Mixed(op, _OTHER_KIND), None, None)]
    dims = inputs[0].dims[1:] if inputs[0].dims else None
    if listed.by_row:
        turn = None if index.value is None else index.value.item()
        if not is_row_number(turn):
            return [(Mixed(op, "selects some of the examples"), None, None)]
        return [(Row(turn), dims, None)]
    if index.placement != Replicate() or numbers_a_row(index):
        mixed = first_mixed([index.placement])
        return [(mixed or Mixed(op, "reads an item at an index from the examples"), None, None)]
    return [(listed.item or Replicate(), dims, None)]


def _list_set(judge, op, inputs):
    listed, index, item = (each.placement for each in inputs)
    dims = inputs[0].dims
    if dims is None and inputs[2].dims is not None:
        dims = (None, *inputs[2].dims)
    mixed = first_mixed([listed, item])
    if mixed or not isinstance(listed, Listed):
        return [(mixed or Mixed(op, "writes an unsupported list of tensors"), None, None)]
    if numbers_a_row(inputs[2]):
        return [(Mixed(op, OF_ROW_NUMBER), None, None)]
    if listed.by_row:
        turn = None if inputs[1].value is None else inputs[1].value.item()
        if not is_row_number(turn) or not (
            item == Replicate() or (isinstance(item, Row) and item.index == turn)
        ):
            return [(Mixed(op, "writes the row of another example"), None, None)]
        return [(Listed(Row(None), True), dims, None)]
    if index != Replicate() or numbers_a_row(inputs[1]):
        return [(Mixed(op, "writes an item at an index from the examples"), None, None)]
    if isinstance(item, Row):
        return [(Mixed(op, "writes a single row for all examples"), None, None)]
    return [(_with_item(op, listed, item), dims, None)]


def _with_item(op, listed, item):
    one = joined(op, listed.item, item)
    return one if isinstance(one, Mixed) else Listed(one)


def _pushed(judge, op, inputs):
    listed, item = inputs[0].placement, inputs[1].placement
    mixed = first_mixed([listed, item])
    if mixed or not isinstance(listed, Listed) or listed.by_row or isinstance(item, Row):
        return [(mixed or Mixed(op, "writes an unsupported list of tensors"), None, None)]
    if numbers_a_row(inputs[1]):
        return [(Mixed(op, OF_ROW_NUMBER), None, None)]
    dims = None if inputs[1].dims is None else (None, *inputs[1].dims)
    return [(_with_item(op, listed, item), dims, None)]


def _stacked(judge, op, inputs):
    listed, dims = inputs[0].placement, inputs[0].dims
    if not isinstance(listed, Listed):
        return [(first_mixed([listed]) or Mixed(op, _OTHER_KIND), None, None)]
    dims = _list_dims(None, inputs[1].value) or dims
    if listed.by_row:
        return [(Shard(0), None if dims is None else (ROWS, *dims[1:]), None)]
    item = listed.item or Replicate()
    if isinstance(item, Shard):
        if item.numbers:
            return [(Mixed(op, "computes with row indices"), None, None)]
        item = Shard(item.axis + 1, item.power, item.folded)
    return [(item, dims, None)]


def _list_length(judge, op, inputs):
    listed = inputs[0].placement
    if isinstance(listed, Listed) and listed.by_row:
        return [(Replicate(1), (), np.asarray(ROWS, object))]
    return [(first_mixed([listed]) or Replicate(), (), None)]


def _list_shape(judge, op, inputs):
    listed, dims = inputs[0].placement, inputs[0].dims
    if not isinstance(listed, Listed):
        return [(first_mixed([listed]) or Mixed(op, _OTHER_KIND), None, None)]
    if not dims:
        return [(Replicate(), None, None)]
    sizes = np.empty(len(dims) - 1, object)
    sizes[:] = dims[1:]
    has_rows = any(map(depends_on_rows, dims[1:]))
    return [(Mixed(op, "depends on the number of rows") if has_rows else Replicate(), None, sizes)]


LISTS = {
    "TensorListFromTensor": _list_of,
    "TensorListReserve": _empty_list,
    "EmptyTensorList": _empty_list,
    "TensorListGetItem": _list_item,
    "TensorListSetItem": _list_set,
    "TensorListPushBack": _pushed,
    "TensorListStack": _stacked,
    "TensorListLength": _list_length,
    "TensorListElementShape": _list_shape,
}
