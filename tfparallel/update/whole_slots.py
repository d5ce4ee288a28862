"""The variables of an optimizer as on one device, for files and users.

| | |
| --- | --- |
| a slot of a split weight | the concatenated slots of the parts |
| a slot of a sharded weight | the joined shares of all workers' places |
| an accumulator of terms | the sum of its copies, over all workers |
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.collectives.coordination import wait_for_all
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.extend import attach, extend
from tfparallel.seams.keras import set_storage
from tfparallel.update.places import Places
from tfparallel.update.shares import mark
from tfparallel.variables.sharded import apart, cut_out, joined, shape_shared_out
from tfparallel.variables.split import split_variable, whole_of

_SAVE_SECONDS = 120.0  # How long a save waits for the other workers.


def mark_slot(slot: keras.Variable, unit: keras.Variable, name: str, slots: dict) -> None:
    """Marks a slot with its weight, if its unit is a part or a share.

    Args:
        slot: A variable of the optimizer.
        unit: The unit of the slot.
        name: The name of the kind of slot.
        slots: The slots so far, by weight and kind.
    """
    part = getattr(unit, "_sharded", None)
    if part is not None:
        mark(slot, part)
    whole = whole_of(unit if part is None else part)
    if part is None and whole is unit:
        return
    group = (id(whole), name)
    slot._group = group
    slots_of_weight = slots.setdefault(group, [])
    slots_of_weight.append(slot)
    if part is None and len(slots_of_weight) == len(whole.parts):
        attach(slots_of_weight[0], _joined=_side_by_side(slots_of_weight, whole))


class SumOfCopies:
    """Extends an accumulator whose value is the sum of its copies at places, if it has any."""

    _summed_at: Places | None = None

    def _serialize_to_tensors(self):
        # `tf.train.Checkpoint` writes the accumulator as on one device.
        if self._summed_at is None:
            return super()._serialize_to_tensors()
        if self._summed_at.workers is not None:
            raise ValueError(
                "`tf.train.Checkpoint` would save only what one worker has accumulated. The sum "
                f"over all workers is required. Received: '{self.path}'. Use "
                "`tfparallel.callbacks.Checkpoint` or `model.save`, which save the sum."
            )
        return {"VARIABLE_VALUE": _summed([self], self._summed_at)[0]}

    def _restore_from_tensors(self, restored_tensors):
        if self._summed_at is None:
            return super()._restore_from_tensors(restored_tensors)
        self.assign(restored_tensors["VARIABLE_VALUE"])
        _hold_in_first_copy(self, self._summed_at)
        return self.value


def mark_sum(variable: keras.Variable, places: Places | None) -> None:
    """Makes an accumulator's value the sum of its copies at places; None for a plain value."""
    if places is not None or isinstance(variable, SumOfCopies):
        extend(variable, SumOfCopies, _summed_at=places)


def change_sum(variable: keras.Variable, places: Places | None) -> None:
    """Like `mark_sum`, for an accumulator that may hold terms, which are converted."""
    before = getattr(variable, "_summed_at", None)
    if before is not None and places is None:
        variable.assign(_summed([variable], before)[0])
    mark_sum(variable, places)
    if before is None and places is not None:
        _hold_in_first_copy(variable, places)


def is_in_pieces(variable: keras.Variable) -> bool:
    """Whether the copies of a variable hold only shares or terms of its value."""
    return _is_sum(variable) or hasattr(variable, "_sharded")


def holds_pieces(optimizer: keras.Optimizer | None) -> bool:
    """Whether an optimizer has variables in pieces, which all workers must save together."""
    return optimizer is not None and any(map(is_in_pieces, optimizer.variables))


def shown(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """The variables of a model or of its optimizer, as on one device.

    A slot in parts is one variable; a sharded slot stands for all shares, with the shape of one.
    """
    whole_variables = {}
    for group in grouped(variables):
        first = group[0]
        if hasattr(first, "_sharded"):
            whole_variables[id(first)] = first
        elif hasattr(first, "_group"):
            whole_variables[id(first)] = first._joined
        else:
            whole_variables[id(whole_of(first))] = whole_of(first)
    return list(whole_variables.values())


def grouped(variables: Iterable[keras.Variable]) -> list[list[keras.Variable]]:
    """The variables, grouped by weight."""
    groups: dict[Any, list[keras.Variable]] = {}
    for variable in variables:
        groups.setdefault(getattr(variable, "_group", id(variable)), []).append(variable)
    return list(groups.values())


def value(group: Sequence[keras.Variable], places: Places) -> np.ndarray:
    """The value of a variable over all its units (`grouped`).

    If it is a sum or sharded, all workers must call this, in the same order.
    """
    first = group[0]
    if hasattr(first, "_sharded"):
        parts = [whole.numpy() for whole in joined(group, places)]
        return np.concatenate(parts, first._shown.axis) if parts[1:] else parts[0]
    if _is_sum(first):
        return _summed([first], places)[0].numpy()
    return tf.convert_to_tensor(shown(group)[0].value).numpy()


def assign(group: Sequence[keras.Variable], value: np.ndarray, places: Places) -> None:
    """Assigns a value to a variable or its units.

    Raises:
        ValueError: If a sharded variable has another shape.
    """
    first = group[0]
    if not hasattr(first, "_sharded"):
        shown(group)[0].assign(value)
        if _is_sum(first):
            _hold_in_first_copy(first, places)
        return
    whole = first._shown
    if np.shape(value) != tuple(whole.shape):
        raise ValueError(
            f"'{first.path}' belongs to a weight of shape {tuple(whole.shape)}. Received: a value "
            f"of shape {np.shape(value)}. Check that the file was saved from this model."
        )
    parts = [np.asarray(value)]
    if group[1:]:
        ends = itertools.accumulate(slot._sharded.shape[whole.axis] for slot in group)
        parts = np.split(parts[0], list(ends)[:-1], whole.axis)
    for slot, part in zip(group, parts, strict=True):
        _share_out(slot, part, places)


def assign_all(
    variables: Sequence[keras.Variable], values: Iterable[np.ndarray], places: Places
) -> None:
    """Assigns values to variables, each as `assign` does."""
    for group, value in zip(grouped(variables), values, strict=True):
        assign(group, value, places)


def wait_to_save(workers: ProcessGroup, what: str) -> None:
    """Waits for the other workers, each of which has a part of the saved state.

    Args:
        workers: The process group of all workers.
        what: A phrase for the saved state.

    Raises:
        RuntimeError: If not all workers arrive within two minutes.
    """
    try:
        wait_for_all(workers, _SAVE_SECONDS)
    except RuntimeError as error:
        raise RuntimeError(
            f"Each worker has a part of the {what}, because of `shard` or "
            f"`gradient_accumulation_steps`, so all workers must save together. {error}"
        ) from error


def trackable_lists(optimizer: keras.Optimizer, names: Iterable[str], lists: dict) -> Mapping:
    """The optimizer's lists that contain parts, with whole variables, for `tf.train.Checkpoint`.

    Args:
        optimizer: The optimizer.
        names: The names of its attributes.
        lists: The lists so far, by name; they must stay the same objects.
    """
    result: dict[str, Any] = {}
    for name in names:
        variables = getattr(optimizer, name, None)
        if not isinstance(variables, list) or not any(map(_is_part, variables)):
            continue
        wholes = shown(variables)
        if name not in lists or len(vars(lists[name])) < len(wholes):
            lists[name] = tf.__internal__.tracking.AutoTrackable()
            for index, variable in enumerate(wholes):
                setattr(lists[name], str(index), variable)
        result[name] = lists[name]
    return result


def _is_sum(variable) -> bool:
    return getattr(variable, "_summed_at", None) is not None


def _is_part(variable) -> bool:
    if hasattr(variable, "_sharded"):
        return False  # A share raises its own error when it is written.
    return hasattr(variable, "_whole") or hasattr(variable, "_group")


def _side_by_side(slots, whole) -> keras.Variable:
    """A variable that presents the slots of a weight's parts as one."""
    one = object.__new__(type(slots[0]))
    left_out = ("_group", "_value")
    one.__dict__.update({k: value for k, value in vars(slots[0]).items() if k not in left_out})
    set_storage(one, None)
    one._shape = tuple(whole.shape)
    path = slots[0].path
    split_variable(one, slots, whole.axis)
    for slot in slots:
        slot._path = path
    return one


def _summed(variables, places) -> list[tf.Tensor]:
    sums = [tf.add_n([*map(tf.convert_to_tensor, places.copies(v))]) for v in variables]
    if places.workers is not None and sums:
        sums = places.workers.all_reduce(sums)
    return sums


def _hold_in_first_copy(variable, places) -> None:
    is_first_worker = places.workers is None or places.workers.worker_index == 0
    for other in places.copies(variable)[1 if is_first_worker else 0 :]:
        other.assign(tf.zeros_like(other))


def _share_out(slot, value, places) -> None:
    """Assigns each local place its share of a slot."""
    shape = shape_shared_out(value.shape)
    bounds = places.bounds(slot.shape[0])
    for index, (copy, bounds_of_place) in enumerate(zip(places.copies(slot), bounds, strict=True)):
        with places.at(index):
            copy.assign(apart(cut_out(tf.constant(value, copy.dtype), shape, *bounds_of_place)))
