"""What a file and a user see of an optimizer: its variables as they are on one device.

| | |
| --- | --- |
| a slot of a weight in parts | the slots of the parts, side by side |
| a slot of a weight in shares | what the places of all workers hold, joined |
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

__all__ = [
    "assign",
    "assign_all",
    "change_sum",
    "grouped",
    "holds_pieces",
    "is_in_pieces",
    "mark_slot",
    "mark_sum",
    "shown",
    "trackable_lists",
    "value",
    "wait_to_save",
]

_SAVE_SECONDS = 120.0  # How long a save waits for the other workers.


def mark_slot(slot: keras.Variable, unit: keras.Variable, name: str, slots: dict) -> None:
    """Has a slot know of which weight it is one, if its unit is a part or a share.

    Args:
        slot: A variable of the optimizer.
        unit: What it is a slot of.
        name: Of the kind of slot.
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
    known = slots.setdefault(group, [])
    known.append(slot)
    if part is None and len(known) == len(whole.parts):
        attach(known[0], _joined=_side_by_side(known, whole))


class SumOfCopies:
    """Extends an accumulator: its value is the sum of its copies at places, where it has any."""

    _summed_at: Places | None = None

    def _serialize_to_tensors(self):
        # What `tf.train.Checkpoint` writes: the accumulator of one device.
        if self._summed_at is None:
            return super()._serialize_to_tensors()
        if self._summed_at.workers is not None:
            raise ValueError(
                "`tf.train.Checkpoint` would write what one worker has accumulated. The sum over "
                f"all workers is required. Received: '{self.path}'. Take `tfparallel.callbacks."
                "Checkpoint`, or `model.save`, which write it."
            )
        return {"VARIABLE_VALUE": _summed([self], self._summed_at)[0]}

    def _restore_from_tensors(self, restored_tensors):
        if self._summed_at is None:
            return super()._restore_from_tensors(restored_tensors)
        self.assign(restored_tensors["VARIABLE_VALUE"])
        _hold_in_first_copy(self, self._summed_at)
        return self.value


def mark_sum(variable: keras.Variable, places: Places | None) -> None:
    """Says of an accumulator that its value is the sum of its copies at places; None: it is not."""
    if places is not None or isinstance(variable, SumOfCopies):
        extend(variable, SumOfCopies, _summed_at=places)


def change_sum(variable: keras.Variable, places: Places | None) -> None:
    """As `mark_sum`, of an accumulator that may hold terms: they become those of the other kind."""
    before = getattr(variable, "_summed_at", None)
    if before is not None and places is None:
        variable.assign(_summed([variable], before)[0])
    mark_sum(variable, places)
    if before is None and places is not None:
        _hold_in_first_copy(variable, places)


def is_in_pieces(variable: keras.Variable) -> bool:
    """Whether no copy of a variable holds its value: each a share of it, or a term."""
    return _is_sum(variable) or hasattr(variable, "_sharded")


def holds_pieces(optimizer: keras.Optimizer | None) -> bool:
    """Whether an optimizer has variables in pieces, which all workers must save together."""
    return optimizer is not None and any(map(is_in_pieces, optimizer.variables))


def shown(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """The variables, of the model's or of its optimizer, as they are on one device.

    A slot in parts is one variable; one in shares stands for them all, with the shape of its share.
    """
    found = {}
    for group in grouped(variables):
        first = group[0]
        if hasattr(first, "_sharded"):
            found[id(first)] = first
        elif hasattr(first, "_group"):
            found[id(first)] = first._joined
        else:
            found[id(whole_of(first))] = whole_of(first)
    return list(found.values())


def grouped(variables: Iterable[keras.Variable]) -> list[list[keras.Variable]]:
    """The variables, those of the units of a weight together."""
    groups: dict[Any, list[keras.Variable]] = {}
    for variable in variables:
        groups.setdefault(getattr(variable, "_group", id(variable)), []).append(variable)
    return list(groups.values())


def value(group: Sequence[keras.Variable], places: Places) -> np.ndarray:
    """The value of a variable, of all its units (`grouped`).

    All workers must ask for it, in the same order, if it is a sum or in shares.
    """
    first = group[0]
    if hasattr(first, "_sharded"):
        parts = [whole.numpy() for whole in joined(group, places)]
        return np.concatenate(parts, first._shown.axis) if parts[1:] else parts[0]
    if _is_sum(first):
        return _summed([first], places)[0].numpy()
    return tf.convert_to_tensor(shown(group)[0].value).numpy()


def assign(group: Sequence[keras.Variable], value: np.ndarray, places: Places) -> None:
    """Gives a variable, or its units, a value.

    Raises:
        ValueError: If one in shares has another shape.
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
            f"'{first.path}' is of a weight of shape {tuple(whole.shape)}. Received: a "
            f"value of shape {np.shape(value)}. Is it the file of this model?"
        )
    parts = [np.asarray(value)]
    if group[1:]:
        ends = itertools.accumulate(slot._sharded.shape[whole.axis] for slot in group)
        parts = np.split(parts[0], list(ends)[:-1], whole.axis)
    for slot, part in zip(group, parts, strict=True):
        _share_out(slot, part, places)


def assign_all(
    variables: Sequence[keras.Variable], given: Iterable[np.ndarray], places: Places
) -> None:
    """Gives variables their values, as `assign` does each."""
    for group, value in zip(grouped(variables), given, strict=True):
        assign(group, value, places)


def wait_to_save(workers: ProcessGroup, what: str) -> None:
    """Waits for the other workers, of which each has a part of what is saved.

    Args:
        workers: All of them.
        what: Of what they have parts, in words.

    Raises:
        RuntimeError: If not all have come within two minutes.
    """
    try:
        wait_for_all(workers, _SAVE_SECONDS)
    except RuntimeError as error:
        raise RuntimeError(
            f"Each worker has a part of the {what}, as `shard` and `gradient_accumulation_steps` "
            f"have it, and all workers must save it together. {error}"
        ) from error


def trackable_lists(optimizer: keras.Optimizer, names: Iterable[str], held: dict) -> Mapping:
    """The lists of an optimizer that have parts, with wholes: what `tf.train.Checkpoint` writes.

    Args:
        optimizer: The optimizer.
        names: Of its attributes.
        held: The lists so far, by name, which are to stay the same objects.
    """
    found: dict[str, Any] = {}
    for name in names:
        variables = getattr(optimizer, name, None)
        if not isinstance(variables, list) or not any(map(_is_part, variables)):
            continue
        wholes = shown(variables)
        if name not in held or len(vars(held[name])) < len(wholes):
            held[name] = tf.__internal__.tracking.AutoTrackable()
            for index, variable in enumerate(wholes):
                setattr(held[name], str(index), variable)
        found[name] = held[name]
    return found


def _is_sum(variable) -> bool:
    return getattr(variable, "_summed_at", None) is not None


def _is_part(variable) -> bool:
    if hasattr(variable, "_sharded"):
        return False  # A share refuses to be written, with an error of its own.
    return hasattr(variable, "_whole") or hasattr(variable, "_group")


def _side_by_side(slots, whole) -> keras.Variable:
    """A variable that shows the slots of a weight's parts as one."""
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
    """Gives each place here its share of a slot."""
    shape = shape_shared_out(value.shape)
    bounds = places.bounds(slot.shape[0])
    for index, (copy, own) in enumerate(zip(places.copies(slot), bounds, strict=True)):
        with places.at(index):
            copy.assign(apart(cut_out(tf.constant(value, copy.dtype), shape, *own)))
