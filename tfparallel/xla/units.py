"""The units of a step: programs and what is outside, in an order in which they can run."""

import collections
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.xla.trace import Trace

__all__ = ["Outside", "Program", "Unit", "Units"]

# An operation's name, or a program's device and level; no device of what is not compiled.
Unit = str | tuple[int | None, int]


class Outside(NamedTuple):
    """An operation that stays as it was traced.

    Attributes:
        operation: It.
        after: The units that it must wait for, beside those that it reads from.
        device: Of a function that XLA compiles, the device's place in the list of devices.
        same: Other operations that read the same of a variable, and need not be made again.
    """

    operation: tf.Operation
    after: list[Unit]
    device: int | None = None
    same: Sequence[tf.Operation] = ()

    @property
    def unit(self) -> Unit:
        """What `after` calls it."""
        return self.operation.name

    @property
    def outputs(self) -> Sequence[tf.Tensor]:
        """What it returns."""
        return self.operation.outputs


class Program(NamedTuple):
    """Operations that XLA compiles together, or that a branch runs together, uncompiled.

    Attributes:
        device: The device's place in the list of devices; None if it is not compiled.
        level: How many exchanges stand behind it.
        operations: What it does, in order; constants and values of variables first where needed.
        inputs: The tensors that it takes.
        outputs: Those of its own that are read elsewhere.
        after: As of `Outside`.
    """

    device: int | None
    level: int
    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    after: list[Unit]

    @property
    def unit(self) -> Unit:
        """What `after` calls it."""
        return self.device, self.level


class Units:
    """Puts operations together, whose places and levels are known.

    Args:
        trace: The step.
        place: By operation's name: the rank of its device, or None outside of all programs.
        level: Likewise: how many exchanges stand behind it.
        waits_for: Likewise: what it must wait for, beside what it reads.
        alone: The ranks of functions outside that XLA compiles by themselves.
        homes: The ranks of the variables' devices, by argument.
        is_branch: As `plan_of` takes it.
    """

    def __init__(
        self,
        trace: Trace,
        place: Mapping[str, int | None],
        level: Mapping[str, int],
        waits_for: Mapping[str, Sequence[str]],
        alone: Mapping[str, int],
        homes: Mapping[str, int | None],
        is_branch: bool,
    ):
        self._trace = trace
        self._place = place
        self._level = level
        self._waits_for = waits_for
        self._alone = alone
        self._homes = homes
        self._is_branch = is_branch
        self._members = collections.defaultdict(list)  # By unit: the names of its operations,
        self._copies = collections.defaultdict(set)  # and of what it has a copy of;
        self._wants = collections.defaultdict(set)  # the units that it reads from,
        self._waits = collections.defaultdict(set)  # and others that must run before it.
        self._leaving: dict[tuple[str, int], tf.Tensor] = {}  # What is read elsewhere.
        self._readers = collections.defaultdict(set)  # By variable: the units that read it.

    def in_turn(self) -> list[Outside | Program]:
        """Returns the units, each behind those that it needs."""
        trace = self._trace
        for op in trace.operations:
            self._members[self.unit(op.name)].append(op.name)
        for op in trace.operations:
            unit = self.unit(op.name)
            for tensor in op.inputs:
                self._read(tensor, unit)
            self._waits[unit] |= {self.unit(name) for name in self._waits_for[op.name]}
        for tensor in trace.outputs:
            self._read(tensor, None)
        self._wants.pop(None, None)
        for variable, writers in trace.writers.items():
            for op in writers:
                self._waits[self.unit(op.name)] |= self._readers[variable]
        for unit in self._members:
            self._waits[unit] -= {unit} | self._wants[unit]
        return [self._made(unit) for unit in self._sorted()]

    def unit(self, name: str) -> Unit:
        """The unit of an operation."""
        place = self._place.get(name)
        is_alone = place is None and (name not in self._place or not self._is_branch)
        return name if is_alone else (place, self._level[name])

    def _read(self, tensor, unit) -> None:
        """Notes what a unit reads; None is the caller of the step."""
        source, trace = tensor.op, self._trace
        if source.name in trace.given:
            return
        if source.name in self._place:
            giver = self.unit(source.name)
            if giver != unit:
                self._wants[unit].add(giver)
                self._leaving[source.name, tensor.value_index] = tensor
            return
        if self._may_copy(source, unit):
            self._copies[unit].add(source.name)
            giver = unit
        else:
            giver = trace.first_like(source)
            self._members[giver].append(source.name)
            self._wants[unit].add(giver)
        if source.name in trace.reads:
            self._readers[source.inputs[0].op.name].add(giver)

    def _may_copy(self, op, unit) -> bool:
        """Whether a program may have a constant, or what a variable holds, for itself."""
        if not isinstance(unit, tuple):
            return False
        if op.name in self._trace.constants:
            return True
        place, level = unit
        variable = op.inputs[0].op.name
        if self._homes.get(variable) != place:
            return False
        for writer in self._trace.writers[variable]:
            is_here = self._place.get(writer.name) == place
            if self._level[writer.name] < level + (not is_here):
                return False
        return True

    def _sorted(self) -> Iterator[Unit]:
        """The units, each behind those that it needs, else in the order of the trace."""
        position = self._trace.position
        first = {u: min(map(position.__getitem__, names)) for u, names in self._members.items()}
        followers = collections.defaultdict(list)
        missing = {}
        for unit in self._members:
            needed = self._wants[unit] | self._waits[unit]
            missing[unit] = len(needed)
            for each in needed:
                followers[each].append(unit)
        ready = [(first[unit], unit) for unit, number in missing.items() if not number]
        heapq.heapify(ready)
        while ready:
            _, unit = heapq.heappop(ready)
            yield unit
            for follower in followers[unit]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, (first[follower], follower))
        if any(missing.values()):
            raise RuntimeError("The programs of a step wait for each other, a fault of tfparallel.")

    def _made(self, unit) -> Outside | Program:
        trace, after = self._trace, list(self._waits[unit])
        names = {*self._members[unit], *self._copies[unit]}
        operations = [trace.by_name[name] for name in sorted(names, key=trace.position.__getitem__)]
        if isinstance(unit, str):
            same = [op for op in operations if op.name != unit]
            return Outside(trace.by_name[unit], after, self._alone.get(unit), same)
        inputs = {
            (tensor.op.name, tensor.value_index): tensor
            for op in operations
            for tensor in op.inputs
            if tensor.op.name not in names
        }
        outputs = [tensor for (name, _), tensor in self._leaving.items() if name in names]
        return Program(*unit, operations, list(inputs.values()), outputs, after)
