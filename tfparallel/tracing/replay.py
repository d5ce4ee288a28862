"""Replays operations of a graph for another place: with other rows, copies and devices.

The trace of the first of several replicas is a pattern for all. In the replay, each input of an
operation is replaced by its counterpart at the other place: its arguments, its copy of a variable,
or the result of an earlier replay. Tensors without a counterpart are shared: a variable without a
copy there is read, and written, only at the first place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.seams.tensorflow import (
    add_control_inputs,
    copy_handle_data,
    extend_operation,
    function_again,
    python_function_again,
    set_device,
)
from tfparallel.tracing.graphs import has_seeds, with_inner, writes_variable

_FOLD = 0x9E3779B1  # Odd, so the seeds that TensorFlow counts differ at each place.
_PYTHON = "EagerPyFunc"


class Again:
    """Replays operations of the first place at another, with replacements for its tensors.

    Args:
        index: The number of the other place.
        device_of: Returns the corresponding device, or the same name if there is none.
        copy_of: Returns the corresponding eager tensor, such as the handle of a variable, or the
            same tensor if there is none.
    """

    def __init__(
        self,
        index: int,
        device_of: Callable[[str], str],
        copy_of: Callable[[tf.Tensor], tf.Tensor],
    ):
        self._index = index
        self._device_of = functools.cache(device_of)
        self._copy_of = copy_of
        # By the id of the original tensor, which is kept so its id is not reused.
        self._replacements: dict[int, tuple[tf.Tensor, Any]] = {}
        self._replayed: dict[tf.Graph, dict[str, tf.Operation]] = {}  # By graph and original name.
        self._coming: set[str] = set()  # The names of the operations in the current replay.
        # Handles of shared variables that are written, and the operations that use a handle.
        self._written: set[int] = set()
        self._used: dict[int, tf.Operation] = {}
        self._captures: dict[tf.Graph, dict[int, tf.Tensor | None]] = {}  # By graph and argument.
        self._tokens: dict[bytes, bytes] = {}  # Tokens of Python functions, by the original.
        self._functions = _Functions(index)

    def take(self, first: Any, replacements: Any) -> None:
        """Sets the replacements of the first place's nested tensors, and of their masks.

        Replaces the components of a ragged tensor, but no values cached beside them. Results that
        were computed from these tensors earlier are shared.
        """
        for original, replacement in zip(_leaves(first), _leaves(replacements), strict=True):
            if original is replacement or not tf.is_symbolic_tensor(original):
                continue
            self._replacements[id(original)] = original, replacement
            mask = mask_of(original)
            if mask is not None:
                self._replacements[id(mask)] = mask, mask_of(replacement)

    def of(self, first: Any) -> Any:
        """The replacements of the first place's nested tensors."""
        return tf.nest.map_structure(
            lambda leaf: self._of_leaf(leaf) if tf.is_symbolic_tensor(leaf) else leaf,
            first,
            expand_composites=True,
        )

    def _of_leaf(self, tensor):
        other = self._of(tensor)
        mask = mask_of(tensor)
        if mask is not None and other is not tensor:
            set_mask(other, self._of(mask))
        return other

    def _of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The replacement of a tensor; the tensor itself if there is none."""
        if id(tensor) in self._replacements:
            return self._replacements[id(tensor)][1]
        name, by_name = tensor.op.name, self._replayed.setdefault(tensor.graph, {})
        if name in by_name:
            if tensor.value_index >= len(by_name[name].outputs):
                self._catch_up(tensor.op, by_name[name])
            return by_name[name].outputs[tensor.value_index]
        if tensor.op.type != "Placeholder":
            return tensor
        outer = self._outside(tensor)
        if outer is None:
            return tensor
        replacement = self._of(outer) if tf.is_symbolic_tensor(outer) else self._copy_of(outer)
        replacement = tensor if replacement is outer else tensor.graph.capture(replacement)
        self._replacements[id(tensor)] = tensor, replacement
        return replacement

    def _outside(self, placeholder: tf.Tensor) -> tf.Tensor | None:
        """The outer tensor that a placeholder captures; None if it is an argument."""
        graph = placeholder.graph
        captured = self._captures.setdefault(graph, {})
        if id(placeholder) not in captured:
            captured |= {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        return captured.setdefault(id(placeholder))

    def make(self, operations: Sequence[tf.Operation]) -> None:
        """Replays operations of the first place, in its graph."""
        operations = [op for op in operations if not self._is_of_all(op)]
        self._coming = {op.name for op in operations}
        self._import(operations)

    def _import(self, operations) -> None:
        if not operations:
            return
        graph = operations[0].graph
        by_name = self._replayed.setdefault(graph, {})
        definition, inputs, later = self._definition(graph, operations)
        devices = [node.device for node in definition.node]
        for node in definition.node:  # TensorFlow would enter a context for each device.
            node.ClearField("device")
        with tf.device(None), graph.control_dependencies(None):
            replayed = tf.graph_util.import_graph_def(
                definition, inputs, [op.name for op in operations], name=f"replica_{self._index}"
            )
        for op, device, replay in zip(operations, devices, replayed, strict=True):
            by_name[op.name] = replay
            set_device(replay, device)
            _copy_shapes(op, replay)
        for name, source in later:
            add_control_inputs(by_name[name], [by_name.get(source.name, source)])

    def _catch_up(self, op, replay) -> None:
        """Updates a replayed operation, since TensorFlow has changed the original.

        A call gets the outputs that its gradient needs only when the gradient is computed.
        """
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(op.node_def)
        self._make_apart(op.graph, node)
        more_inputs = op.inputs[len(replay.inputs) :]  # Empty lists for a loop to fill.
        self._import([each for tensor in more_inputs for each in _behind(tensor.op, self._coming)])
        replaced = list(map(self._of, more_inputs))
        extend_operation(replay, node.attr, replaced, op.outputs[len(replay.outputs) :])
        _copy_shapes(op, replay)

    def _is_of_all(self, op) -> bool:
        """Whether an operation is shared by all places instead of replayed."""
        is_write = writes_variable(op)
        if op.type != "ReadVariableOp" and not is_write:
            return op.type == "Placeholder"
        handle = op.inputs[0]
        is_shared = self._of(handle) is handle
        if is_write and is_shared:
            self._written.add(id(handle))
            if id(handle) in self._used:
                self._note_use(self._used[id(handle)], handle)
        return is_shared

    def _note_use(self, op, tensor) -> None:
        """Records that an operation uses a shared tensor.

        Raises:
            ValueError: If it reads a shared variable that is also written.
        """
        if tensor.dtype != tf.resource:
            return
        self._used[id(tensor)] = op
        if id(tensor) in self._written:
            raise ValueError(
                "A variable that was created outside the builder's function has no copy on each "
                "replica, so a replica could read what another one has written. A variable that "
                f"the layer creates is required. Received: '{op.name}', of type {op.type}, of a "
                "variable that the same call writes. Create it with `self.add_weight`."
            )

    def _definition(self, graph, operations):
        """The replayed operations' definition, their outer inputs and their control inputs."""
        definition, inputs, later = tf.compat.v1.GraphDef(), {}, []
        definition.versions.CopyFrom(graph.graph_def_versions)
        names = {op.name for op in operations}
        for op in operations:
            node = definition.node.add()
            node.CopyFrom(op.node_def)
            node.attr.pop("_class", None)
            self._make_apart(graph, node)
            del node.input[:]
            for tensor in op.inputs:
                name = f"{tensor.op.name}:{tensor.value_index}"
                if tensor.op.name not in names:
                    name = f"given/{name.replace(':', '/')}"
                    if name not in inputs:
                        inputs[name] = self._of(tensor)
                    if inputs[name] is tensor:
                        self._note_use(op, tensor)
                node.input.append(name)
            node.input.extend(f"^{each.name}" for each in op.control_inputs if each.name in names)
            later += [(op.name, each) for each in op.control_inputs if each.name not in names]
        return definition, inputs, later

    def _make_apart(self, graph: tf.Graph, node) -> bool:
        """Moves a node to this place, with its own functions, seeds and Python tokens.

        Args:
            graph: The graph with the functions that it calls.
            node: The node as at the first place.

        Returns:
            Whether it differs from the node at the first place.
        """
        differs = False
        if "/device:" in node.device:
            device = self._device_of(node.device)
            differs, node.device = device != node.device, device
        if _is_seeded(node):
            _draw_apart(node, self._index)
            differs = True
        elif node.op == _PYTHON:
            node.attr["token"].s = python_function_again(node.attr["token"].s, self._tokens)
            differs = True
        return self._functions.replace(graph, node, self._make_apart) or differs


class DrawnApart:
    """Makes the operations of a piece draw different random numbers than those of other pieces.

    Args:
        index: The number of the piece; operations of piece 0 stay unchanged.
    """

    def __init__(self, index: int):
        self._index = index
        self._functions = _Functions(index)
        self._calls: list[tf.Operation] = []  # Calls of functions that draw.

    def change(self, operations: Sequence[tf.Operation] = ()) -> None:
        """Changes the seeds of operations whose seeds TensorFlow counts.

        A call gets another function, which TensorFlow replaces when it computes a gradient later;
        so call this again after gradients.

        Args:
            operations: The new operations.
        """
        calls, self._calls = self._calls, []
        for op in [*calls, *operations] if self._index else ():
            if not any(map(has_seeds, with_inner([op]))):
                continue
            node = tf.compat.v1.NodeDef()
            node.CopyFrom(op.node_def)
            if not has_seeds(op):
                self._calls.append(op)
            if self._make_apart(op.graph, node):
                extend_operation(op, node.attr, [], [])

    def _make_apart(self, graph, node) -> bool:
        if _is_seeded(node):
            return _draw_apart(node, self._index)
        return self._functions.replace(graph, node, self._make_apart)


class _Functions:
    """The functions that operations call at another place."""

    def __init__(self, index: int):
        self._index = index
        self._new_names: dict[str, str] = {}  # By the original name.

    def replace(self, graph: tf.Graph, node, change: Callable[[tf.Graph, Any], bool]) -> bool:
        """Makes a node call the functions of this place; returns whether any differs.

        Args:
            graph: The graph with the functions that it calls.
            node: The node.
            change: As for `function_again`.
        """
        differs = False
        for value in node.attr.values():
            for called in [value.func] if value.HasField("func") else value.list.func:
                name = called.name
                if name not in self._new_names:
                    new_name = function_again(graph, name, f"_{self._index}", change)
                    self._new_names |= {new_name: new_name, name: new_name}
                called.name = self._new_names[name]
                differs |= called.name != name
        return differs


def _draw_apart(node, index: int) -> bool:
    node.attr["seed2"].i = (node.attr["seed2"].i + index * _FOLD) % 2**31
    return True


def _is_seeded(node) -> bool:
    """Whether a node draws by seeds that TensorFlow counts."""
    attr = node.attr
    return "seed" in attr and "seed2" in attr and bool(attr["seed"].i or attr["seed2"].i)


def _behind(op, names: set[str]) -> list[tf.Operation]:
    """An operation and its inputs' operations, recursively, among those with these names."""
    if op.name not in names:
        return []
    return [*(each for tensor in op.inputs for each in _behind(tensor.op, names)), op]


def _copy_shapes(op, replay) -> None:
    """Copies shapes from the outputs of an operation to those of its replay."""
    for original, output in zip(op.outputs, replay.outputs, strict=True):
        if original.dtype in (tf.resource, tf.variant):
            copy_handle_data(original, output)
        elif not output.shape.is_fully_defined():
            output.set_shape(original.shape)


def _leaves(structure) -> list:
    return tf.nest.flatten(structure, expand_composites=True)
