"""Which operations of a step become one XLA program.

            device 0                     device 1
        ┌────────────────┐           ┌────────────────┐
    0   │ forward, up to │           │ forward, up to │     level: how many exchanges stand
        │ what is summed │           │ what is summed │     behind an operation
        └───────┬────────┘           └───────┬────────┘
                ├──────── exchange ──────────┤
        ┌───────┴────────┐           ┌───────┴────────┐
    1   │ all the rest   │           │ all the rest   │
        └────────────────┘           └────────────────┘

A program gives nothing out before its end. So an operation that needs something of another device,
or of what XLA cannot compile, cannot be in the program that this waits for: it is one level later.
Operations of one device and one level are a program; there is no shorter chain of programs.

Some operations are in no program, or in several:

- What XLA cannot compile stays outside, as it was traced. So do numbers that would be a program of
  their own, and sizes and rows of the batch that another device needs: nobody waits for a program
  that only cuts the batch.
- A function that a device calls several times, as a stage of a pipeline is with each micro-batch,
  is a program of its own, compiled once. Its results leave it before the next call.
- Constants are in each program that reads them; and so is what a variable holds before the step,
  unless a program of an earlier level has written it by then.

No program waits for a check (`Assert`) of what a program computes: the step fails all the same, but
has written what it wrote. Where Keras compiles a step, XLA leaves out all checks.
"""

import collections
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfparallel.tracing.graphs import called_by
from tfparallel.xla.compilable import (
    CALLS,
    CHECKS,
    has_list_of_any_size,
    holds_loop,
    is_compilable,
    is_draw,
    ranks_of,
)
from tfparallel.xla.programs import Outside, Program, Programs
from tfparallel.xla.step_graph import StepGraph, has_handle

__all__ = ["plan_of"]

# What hands on rows, or the batch as it is.
_MOVES = {"Cast", "Identity", "PlaceholderWithDefault", "Slice", "StridedSlice"}


def plan_of(
    graph,
    devices: Sequence[str],
    homes: Mapping[str, str],
    is_branch: bool = False,
    all_reduces: Sequence[Sequence[str]] = (),
) -> list[Outside | Program]:
    """Divides a traced step into programs and what stays outside.

    Args:
        graph: The step's `FuncGraph`, or that of a branch.
        devices: Names of the devices that programs run on; what has no device is on the first.
        homes: By the name of an argument that is a variable's handle: the variable's device.
        is_branch: Whether all that stays outside at a level is to be one node, on no device, since
            each node asks whether the branch is taken.
        all_reduces: What devices exchange inside of programs: of each, the names of its operations,
            one for each device (`exchanges.py`).

    Returns:
        The nodes, in an order in which they can run.
    """
    return _Planner(graph, devices, homes, is_branch, all_reduces).plan()


class _Planner:
    def __init__(self, graph, devices, homes, is_branch, all_reduces):
        self._step = StepGraph(graph)
        self._operations = self._step.operations
        self._rank = ranks_of(devices)
        self._all_reduces = all_reduces
        self._inside = {name for names in all_reduces for name in names}
        self._homes = {name: self._rank(home) for name, home in homes.items()}
        self._has_lists_of_any_size = any(map(has_list_of_any_size, self._operations))
        # By operation's name; what `Programs` is told.
        self._place: dict[str, int | None] = {}
        self._level: dict[str, int] = {}
        self._waits_for: dict[str, list[str]] = {}
        self._alone: dict[str, int] = {}
        self._is_branch = is_branch
        self._nodes = Programs(
            self._step,
            self._place,
            self._level,
            self._waits_for,
            self._alone,
            self._homes,
            is_branch,
        )

    def plan(self) -> list[Outside | Program]:
        """Moves outside what cannot be in a program, until all that is left can."""
        for op in self._operations:
            self._place[op.name] = self._place_of(op)
        if not self._is_branch:
            self._leave_functions_alone()
        self._move_rows_outside()
        while True:
            self._find_levels()
            outside = self._handles_that_leave() | self._too_little() | self._late_loops()
            if not outside:
                return self._nodes.in_turn()
            for name in outside:
                self._place[name] = None

    # Where an operation is.

    def _place_of(self, op) -> int | None:
        """The rank of its device, or None outside of all programs."""
        if op.type == "PlaceholderWithDefault":
            return None  # A number of one replica's own: the programs of all are the same.
        asked = set()
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                asked.add(self._homes.get(tensor.op.name))
        if op.device:
            asked.add(self._rank(op.device))
        if not asked:
            found = (self._place.get(each.op.name) for each in op.inputs)
            asked.add(next((rank for rank in found if rank is not None), 0))
        (rank,) = asked if len(asked) == 1 else (None,)
        if op.name in self._inside:
            return rank
        return rank if rank is not None and is_compilable(op) else None

    def _leave_functions_alone(self) -> None:
        calls = collections.defaultdict(list)
        for op in self._operations:
            if op.type in CALLS and self._place[op.name] is not None:
                calls[self._place[op.name], op.get_attr("f").name].append(op)
        for (place, _), several in calls.items():
            held = {output.dtype for op in several for output in op.outputs}
            if len(several) > 1 and not held & {tf.variant, tf.resource}:
                for op in several:
                    self._place[op.name] = None
                    if not self._varies(op):
                        self._alone[op.name] = place

    def _move_rows_outside(self) -> None:
        """Takes out the sizes and rows of the batch that are read on another device, or outside."""
        of_batch = set()
        for op in self._operations:
            sources = [tensor.op.name for tensor in op.inputs]
            follows = all(
                name in self._step.constants or name in of_batch or name in self._step.given
                for name in sources
            )
            if follows and _hands_on(op) and not has_handle(op):
                of_batch.add(op.name)
        stack = [
            tensor.op
            for op in self._operations
            for tensor in op.inputs
            if tensor.op.name in of_batch
            and self._place[tensor.op.name] not in (None, self._place[op.name])
        ]
        while stack:
            op = stack.pop()
            if self._place[op.name] is None:
                continue
            self._place[op.name] = None
            stack += [tensor.op for tensor in op.inputs if tensor.op.name in of_batch]

    # When an operation can run.

    def _find_levels(self) -> None:
        at_least: dict[str, int] = {}
        while True:
            self._find_levels_from(at_least)
            late = self._late_parts()
            if not late:
                break
            at_least |= late
        self._sink()

    def _late_parts(self) -> dict[str, int]:
        """Parts of an all-reduce that are too early: all are in programs of one level."""
        found = {}
        for names in self._all_reduces:
            level = max(self._level[name] for name in names)
            found |= {name: level for name in names if self._level[name] < level}
        return found

    def _find_levels_from(self, at_least: Mapping[str, int]) -> None:
        for op in self._operations:
            place, level = self._place[op.name], at_least.get(op.name, 0)
            waits = [name for name in self._step.controls(op) if self._must_wait(op, name)]
            for source in (*self._step.sources(op), *waits):
                level = max(level, self._level_after(source, place))
            self._level[op.name], self._waits_for[op.name] = level, waits

    def _sink(self) -> None:
        """What follows from variables alone is computed where it is read, not handed on."""
        levels = collections.defaultdict(set)  # Of those that read it; None of what else does.
        for tensor in self._step.outputs:
            levels[tensor.op.name].add(None)
        known, follows = self._step.constants | self._step.reads, set()
        for op in self._operations:
            if not has_handle(op) and all(tensor.op.name in known for tensor in op.inputs):
                known.add(op.name)
                follows.add(op.name)
        for op in reversed(self._operations):
            place = self._place[op.name]
            found = levels[op.name]
            if op.name in follows and place is not None and found and None not in found:
                self._level[op.name] = min(found)
            for source in self._waits_for[op.name]:
                levels[source].add(None)
            for tensor in op.inputs:
                source = tensor.op.name
                is_here = place is not None and self._place.get(source) == place
                levels[source].add(self._level[op.name] if is_here else None)

    def _must_wait(self, op, name: str) -> bool:
        """Whether an operation runs only after another, of which it reads nothing."""
        place, other = self._place[op.name], self._place[name]
        if other is None and self._level[name] and self._step.by_name[name].type in CHECKS:
            return place is None and has_handle(op)
        # What only computes may do so at any time.
        return other in (None, place) or has_handle(op)

    def _level_after(self, source: str, place: int | None) -> int:
        other = self._place[source]
        return self._level[source] + (other is not None and other != place)

    def _handles_that_leave(self) -> set[str]:
        """What makes, or takes, a list or a handle that would leave a program: XLA has no such."""
        found = set()
        for op in self._operations:
            for tensor in op.inputs:
                source = tensor.op.name
                if tensor.dtype in (tf.variant, tf.resource) and source in self._place:
                    if self._nodes.node(source) != self._nodes.node(op.name):
                        ends = (source, op.name)
                        found |= {name for name in ends if self._place[name] is not None}
        return found

    def _late_loops(self) -> set[str]:
        """Loops whose number of turns another program or function hands in: XLA refuses them."""
        found = [op for op in self._operations if self._place[op.name] is not None]
        found = [
            op for op in found if self._is_branch or self._level[op.name] or op.type in CALLS
        ]
        return {op.name for op in found if self._varies(op)}

    def _varies(self, op) -> bool:
        """Whether it holds a loop, and a list of the step has a size that is not known."""
        return self._has_lists_of_any_size and holds_loop(op)

    def _too_little(self) -> set[str]:
        """What is in programs of numbers alone, which are quicker one by one."""
        found = collections.defaultdict(set)
        for op in self._operations:
            if self._place[op.name] is not None:
                found[self._nodes.node(op.name)].add(op.name)
        few = [names for names in found.values() if all(map(self._is_little, names))]
        return set().union(*few)

    def _is_little(self, name: str) -> bool:
        op = self._step.by_name[name]
        if name in self._inside or is_draw(op) or any(called_by(op)):
            return False
        return op.type == "Identity" or all(out.shape.num_elements() == 1 for out in op.outputs)


def _hands_on(op) -> bool:
    """Whether it hands on rows of the batch, or counts them."""
    return op.type in _MOVES or all(
        output.dtype.is_integer and output.shape.rank is not None and output.shape.rank < 2
        for output in op.outputs
    )
