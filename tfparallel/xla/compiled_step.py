"""Compiles the parts of a step with XLA, device by device.

The step is traced into its own graph, which is divided (`clusters.py`) and rebuilt in the caller's
graph: each program becomes a function that XLA compiles as a whole; the rest is copied.

A branch (`tf.cond`) that spans several devices is divided in the same way, and each of its nodes
runs under the branch's condition. A node of the branch not taken returns empty tensors, which no
operation uses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.seams.tensorflow import (
    copy_handle_data,
    run_independently,
    share_functions,
    traced_graph,
)
from tfparallel.tracing.graphs import (
    called_by,
    calls_unknown,
    is_of_programs,
    of_programs,
    with_inner,
)
from tfparallel.xla.clusters import plan_of
from tfparallel.xla.compilable import BRANCHES, refuse_draw
from tfparallel.xla.exchanges import exchange_inside
from tfparallel.xla.programs import Outside, Program


def in_programs(
    step: Callable[..., Any], devices: Sequence[str], *args: Any, exchanges_inside: bool = False
) -> Any:
    """Calls a step during tracing, so that XLA compiles each device's part of it.

    Args:
        step: Takes and returns nested tensors.
        devices: Names of the devices.
        *args: The arguments of `step`.
        exchanges_inside: Whether sums over the devices are part of the programs, instead of
            splitting the step (`exchanges.py`). XLA supports this only on several whole GPUs.

    Raises:
        ValueError: If the step draws random numbers in an operation that XLA cannot compile.
    """
    graph = tf.compat.v1.get_default_graph()
    if is_of_programs(graph):
        return step(*args)
    traced = traced_graph("step", of_programs(step), args)
    all_reduces = exchange_inside(traced, devices) if exchanges_inside else ()
    outputs = iter(_Caller(traced, graph, devices, all_reduces=all_reduces).call(_tensors(args)))
    return tf.nest.map_structure(
        lambda each: next(outputs) if tf.is_tensor(each) else each,
        traced.structured_outputs,
        expand_composites=True,
    )


def _tensors(args) -> list[tf.Tensor]:
    return [each for each in tf.nest.flatten(args, expand_composites=True) if tf.is_tensor(each)]


class _Caller:
    """Rebuilds a divided graph in another graph.

    Args:
        traced: The graph to rebuild.
        graph: The target graph.
        devices: Names of the devices.
        condition: For a branch: whether it is taken.
        all_reduces: As for `plan_of`.
    """

    def __init__(
        self,
        traced,
        graph,
        devices: Sequence[str],
        condition: tf.Tensor | None = None,
        all_reduces: Sequence[Sequence[str]] = (),
    ):
        self._traced = traced
        self._graph = graph
        self._devices = devices
        self._condition = condition
        self._all_reduces = all_reduces
        self._rebuilt: dict[tuple[str, int], tf.Tensor] = {}  # (traced op, output) -> tensor.
        self._done: dict[Any, tf.Operation] = {}  # By node.

    def call(self, args: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Rebuilds a whole step; returns its outputs."""
        traced = self._traced
        captured = {id(inner): outer for outer, inner in traced.captures}
        of_caller = iter(args)
        inputs = [
            captured[id(inner)] if id(inner) in captured else next(of_caller)
            for inner in traced.inputs
        ]
        return self.make(self.plan(inputs))

    def plan(self, inputs: Sequence[tf.Tensor]) -> list[Outside | Program]:
        """Plans the graph for these arguments, tensors of the target graph."""
        homes = {}
        for inner, outer in zip(self._traced.inputs, inputs, strict=True):
            self._rebuilt[inner.op.name, 0] = outer
            if inner.dtype == tf.resource:
                homes[inner.op.name] = outer.device
        is_branch = self._condition is not None
        return plan_of(self._traced, self._devices, homes, is_branch, self._all_reduces)

    def make(self, nodes: Sequence[Outside | Program]) -> list[tf.Tensor]:
        """Builds the nodes of a plan; returns the outputs of the graph."""
        share_functions(self._traced, self._graph)
        with tf.device(None):
            for node in nodes:
                before = [self._done[each] for each in node.after]
                with self._graph.control_dependencies(before):
                    make = self._outside if isinstance(node, Outside) else self._program
                    self._done[node.node] = make(node)
        return [self._tensor(each) for each in self._traced.outputs]

    def _tensor(self, tensor) -> tf.Tensor:
        return self._rebuilt[tensor.op.name, tensor.value_index]

    def _outside(self, node: Outside) -> tf.Operation:
        op = node.operation
        attributes = {k: v for k, v in op.node_def.attr.items() if k != "_class"}
        if node.device is None:
            if op.type in BRANCHES and (rebuilt := self._branches(op)) is not None:
                return rebuilt
            refuse_draw(op, with_inner([op]))
            rebuilt = self._copy(op, op.device or None, attributes)
            for each in node.same:
                self._keep(each.outputs, rebuilt.outputs)
            return rebuilt
        attributes["_XlaMustCompile"] = tf.compat.v1.AttrValue(b=True)
        return self._copy(op, self._devices[node.device], attributes)

    def _copy(self, op, device, attributes) -> tf.Operation:
        with tf.device(device):
            copy = self._graph.create_op(
                op.type,
                [self._tensor(each) for each in op.inputs],
                [each.dtype for each in op.outputs],
                name=op.name.replace("/", "_"),
                attrs=attributes,
                op_def=op.op_def,
            )
        self._keep(op.outputs, copy.outputs)
        return copy

    def _branches(self, op) -> tf.Operation | None:
        """Rebuilds both branches node by node; None if XLA would compile no part of them."""
        is_first, *inputs = map(self._tensor, op.inputs)
        if is_first.dtype != tf.bool or calls_unknown(op):
            return None
        conditions = is_first, tf.logical_not(is_first)
        callers = [
            _Caller(graph, self._graph, self._devices, condition)
            for graph, condition in zip(called_by(op), conditions, strict=True)
        ]
        plans = [caller.plan(inputs) for caller in callers]
        nodes = [node for plan in plans for node in plan]
        leaving = [*op.outputs, *(each for node in nodes for each in node.outputs)]
        if {each.dtype for each in leaving} & {tf.resource, tf.variant}:
            return None  # These types have no empty value.
        if not any(isinstance(node, Program) and node.device is not None for node in nodes):
            return None
        by_branch = [caller.make(plan) for caller, plan in zip(callers, plans, strict=True)]
        outputs = [
            ours if ours is other else tf.cond(is_first, lambda o=ours: o, lambda o=other: o)
            for ours, other in zip(*by_branch, strict=True)
        ]
        self._keep(op.outputs, outputs)
        done = [each for caller in callers for each in caller._done.values()]
        with self._graph.control_dependencies(done):
            return tf.no_op()

    def _program(self, node: Program) -> tf.Operation:
        names = {(t.op.name, t.value_index): f"given_{i}" for i, t in enumerate(node.inputs)}
        members = {op.name for op in node.operations}
        is_compiled = node.device is not None
        definition = tf.compat.v1.GraphDef()
        definition.versions.CopyFrom(self._traced.graph_def_versions)
        for op in node.operations:
            if not is_compiled:
                refuse_draw(op, with_inner([op]))
            node_def = definition.node.add()
            node_def.CopyFrom(op.node_def)
            if is_compiled:
                node_def.ClearField("device")
            node_def.attr.pop("_class", None)
            del node_def.input[:]
            for tensor in op.inputs:
                name = tensor.op.name
                inside = f"{name}:{tensor.value_index}" if tensor.value_index else name
                node_def.input.append(
                    inside if name in members else names[name, tensor.value_index]
                )
            controls = [each.name for each in op.control_inputs]
            node_def.input.extend(f"^{name}" for name in controls if name in members)

        def program():
            graph = tf.compat.v1.get_default_graph()
            share_functions(self._traced, graph, definition)
            captures = {name: graph.capture(self._rebuilt[key]) for key, name in names.items()}
            returned = [each.name for each in node.outputs]
            return tf.graph_util.import_graph_def(definition, captures, returned, name="")

        function = tf.function(program, autograph=False, jit_compile=is_compiled or None)
        with tf.device(self._devices[node.device] if is_compiled else None):
            outputs = self._if_taken(function, node.outputs)
        self._keep(node.outputs, outputs)
        call = outputs[0].op if outputs else self._graph.get_operations()[-1]
        if self._exchanges(node) and not any(t.dtype == tf.resource for t in node.inputs):
            run_independently(call)  # TensorFlow would order it after another device's program.
        return call

    def _exchanges(self, node: Program) -> bool:
        """Whether a program contains an all-reduce."""
        names = {op.name for op in node.operations}
        return any(not names.isdisjoint(each) for each in self._all_reduces)

    def _if_taken(self, function, outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Calls a function, or returns empty tensors if the branch is not taken."""
        if self._condition is None:
            return function() or []

        def taken():
            return [*(function() or []), True]

        def not_taken():
            return [*(tf.zeros([0] * (out.shape.rank or 0), out.dtype) for out in outputs), False]

        return tf.cond(self._condition, taken, not_taken)[:-1]

    def _keep(self, traced, rebuilt) -> None:
        for inner, outer in zip(traced, rebuilt, strict=True):
            if inner.dtype in (tf.resource, tf.variant):
                copy_handle_data(inner, outer)
            elif not outer.shape.is_fully_defined():
                outer.set_shape(inner.shape)
            self._rebuilt[inner.op.name, inner.value_index] = outer
