"""Groups the operations of a step into XLA programs.

            device 0                     device 1
        ┌────────────────┐           ┌────────────────┐
    0   │ forward, up to │           │ forward, up to │     level: the number of exchanges
        │  the exchange  │           │  the exchange  │     before an operation
        └───────┬────────┘           └───────┬────────┘
                ├──────── exchange ──────────┤
        ┌───────┴────────┐           ┌───────┴────────┐
    1   │ all the rest   │           │ all the rest   │
        └────────────────┘           └────────────────┘

A program releases its results only at its end. So an operation that needs a result from another
device, or from an operation that XLA cannot compile, cannot be in the program that this result
depends on: its level is one higher. The operations of one device and level form one program; no
shorter chain of programs exists.

Some operations are in no program, or in several:

- Operations that XLA cannot compile stay outside, as traced. So do scalars that would form a
  program of their own, and sizes and rows of the batch that another device needs: no device should
  wait for a program that only slices the batch.
- A function that a device calls several times, such as a pipeline stage with each micro-batch, is
  its own program, compiled once. Each call returns its results before the next one.
- Constants are copied into each program that reads them. So is the value of a variable before the
  step, unless a program of an earlier level writes the variable.

No program waits for a check (`Assert`) of a program's results: the step still fails, but its writes
are not undone. When Keras compiles a step, XLA drops all checks.
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

# Operations that pass on rows of the batch, or all of it.
_MOVES = {"Cast", "Identity", "PlaceholderWithDefault", "Slice", "StridedSlice"}


def plan_of(
    graph,
    devices: Sequence[str],
    homes: Mapping[str, str],
    is_branch: bool = False,
    all_reduces: Sequence[Sequence[str]] = (),
) -> list[Outside | Program]:
    """Divides a traced step into programs and operations outside of them.

    Args:
        graph: The step's `FuncGraph`, or that of a branch.
        devices: Names of the devices that run programs; operations without a device go on the
            first.
        homes: The device of each variable, by the name of its handle argument.
        is_branch: Whether the operations outside at one level form a single node without a device,
            because each node tests the branch's condition.
        all_reduces: The exchanges inside of programs: for each, the names of its operations, one
            per device (`exchanges.py`).

    Returns:
        The nodes, in a valid order of execution.
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
        # By operation name; shared with `Programs`.
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
        """Moves operations outside until all remaining ones can be in programs."""
        for op in self._operations:
            self._place[op.name] = self._place_of(op)
        if not self._is_branch:
            self._separate_repeated_calls()
        self._move_rows_outside()
        while True:
            self._find_levels()
            outside = self._handles_that_leave() | self._scalar_programs() | self._late_loops()
            if not outside:
                return self._nodes.in_turn()
            for name in outside:
                self._place[name] = None

    # Where an operation is.

    def _place_of(self, op) -> int | None:
        """Returns the rank of the operation's device, or None outside of all programs."""
        if op.type == "PlaceholderWithDefault":
            return None  # A number that differs between replicas, whose programs must be equal.
        ranks = set()
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                ranks.add(self._homes.get(tensor.op.name))
        if op.device:
            ranks.add(self._rank(op.device))
        if not ranks:
            places = (self._place.get(each.op.name) for each in op.inputs)
            ranks.add(next((rank for rank in places if rank is not None), 0))
        (rank,) = ranks if len(ranks) == 1 else (None,)
        if op.name in self._inside:
            return rank
        return rank if rank is not None and is_compilable(op) else None

    def _separate_repeated_calls(self) -> None:
        calls = collections.defaultdict(list)
        for op in self._operations:
            if op.type in CALLS and self._place[op.name] is not None:
                calls[self._place[op.name], op.get_attr("f").name].append(op)
        for (place, _), same_function in calls.items():
            dtypes = {output.dtype for op in same_function for output in op.outputs}
            if len(same_function) > 1 and not dtypes & {tf.variant, tf.resource}:
                for op in same_function:
                    self._place[op.name] = None
                    if not self._varies(op):
                        self._alone[op.name] = place

    def _move_rows_outside(self) -> None:
        """Moves sizes and rows of the batch outside if another device or the outside reads them."""
        of_batch = set()
        for op in self._operations:
            sources = [tensor.op.name for tensor in op.inputs]
            follows = all(
                name in self._step.constants or name in of_batch or name in self._step.arguments
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
        """Returns the parts of all-reduces whose level is too low: all parts need the same one."""
        levels = {}
        for names in self._all_reduces:
            level = max(self._level[name] for name in names)
            levels |= {name: level for name in names if self._level[name] < level}
        return levels

    def _find_levels_from(self, at_least: Mapping[str, int]) -> None:
        for op in self._operations:
            place, level = self._place[op.name], at_least.get(op.name, 0)
            waits = [name for name in self._step.controls(op) if self._must_wait(op, name)]
            for source in (*self._step.sources(op), *waits):
                level = max(level, self._level_after(source, place))
            self._level[op.name], self._waits_for[op.name] = level, waits

    def _sink(self) -> None:
        """Moves values that depend only on variables to the level that reads them."""
        levels = collections.defaultdict(set)  # Levels of the readers; None for any other reader.
        for tensor in self._step.outputs:
            levels[tensor.op.name].add(None)
        of_variables, follows = self._step.constants | self._step.reads, set()
        for op in self._operations:
            if not has_handle(op) and all(tensor.op.name in of_variables for tensor in op.inputs):
                of_variables.add(op.name)
                follows.add(op.name)
        for op in reversed(self._operations):
            place = self._place[op.name]
            readers = levels[op.name]
            if op.name in follows and place is not None and readers and None not in readers:
                self._level[op.name] = min(readers)
            for source in self._waits_for[op.name]:
                levels[source].add(None)
            for tensor in op.inputs:
                source = tensor.op.name
                is_here = place is not None and self._place.get(source) == place
                levels[source].add(self._level[op.name] if is_here else None)

    def _must_wait(self, op, name: str) -> bool:
        """Whether an operation must wait for another one that it does not read from."""
        place, other = self._place[op.name], self._place[name]
        if other is None and self._level[name] and self._step.by_name[name].type in CHECKS:
            return place is None and has_handle(op)
        # A pure computation may run at any time.
        return other in (None, place) or has_handle(op)

    def _level_after(self, source: str, place: int | None) -> int:
        other = self._place[source]
        return self._level[source] + (other is not None and other != place)

    def _handles_that_leave(self) -> set[str]:
        """Returns both ends of lists and handles that would leave a program, which XLA forbids."""
        names = set()
        for op in self._operations:
            for tensor in op.inputs:
                source = tensor.op.name
                if tensor.dtype in (tf.variant, tf.resource) and source in self._place:
                    if self._nodes.node(source) != self._nodes.node(op.name):
                        ends = (source, op.name)
                        names |= {name for name in ends if self._place[name] is not None}
        return names

    def _late_loops(self) -> set[str]:
        """Returns loops whose trip count comes from elsewhere, which XLA rejects."""
        loops = [op for op in self._operations if self._place[op.name] is not None]
        loops = [
            op for op in loops if self._is_branch or self._level[op.name] or op.type in CALLS
        ]
        return {op.name for op in loops if self._varies(op)}

    def _varies(self, op) -> bool:
        """Whether the operation contains a loop, and the step has a list of dynamic size."""
        return self._has_lists_of_any_size and holds_loop(op)

    def _scalar_programs(self) -> set[str]:
        """Returns the operations of programs of scalars alone, which are faster uncompiled."""
        by_node = collections.defaultdict(set)
        for op in self._operations:
            if self._place[op.name] is not None:
                by_node[self._nodes.node(op.name)].add(op.name)
        little = [names for names in by_node.values() if all(map(self._is_scalar_op, names))]
        return set().union(*little)

    def _is_scalar_op(self, name: str) -> bool:
        op = self._step.by_name[name]
        if name in self._inside or is_draw(op) or any(called_by(op)):
            return False
        return op.type == "Identity" or all(out.shape.num_elements() == 1 for out in op.outputs)


def _hands_on(op) -> bool:
    """Whether the operation passes on rows of the batch, or counts them."""
    return op.type in _MOVES or all(
        output.dtype.is_integer and output.shape.rank is not None and output.shape.rank < 2
        for output in op.outputs
    )
