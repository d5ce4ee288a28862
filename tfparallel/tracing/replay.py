"""Operations of a graph, made again for another place: other rows, other copies, another device.

What is traced for the first of several replicas is a pattern for all. An operation that takes
something of the first's takes at another place what stands for it: what that was given, the copy of
a variable there, what was made there before. What is nobody's own is taken by all: a variable that
has no copy there is read, and written, at the first place alone.
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

__all__ = ["Again", "DrawnApart"]

_FOLD = 0x9E3779B1  # Odd: seeds that TensorFlow has counted are others at each place.
_PYTHON = "EagerPyFunc"


class Again:
    """Operations of one place, made again at another: what stands there for tensors of the first.

    Args:
        index: The number of the other place.
        device_of: What stands there for the name of a device; itself, if nothing does.
        copy_of: What stands there for an eager tensor, such as the handle of a variable; likewise.
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
        # By the id of the first's tensor, which is kept, so that no other gets its id.
        self._given: dict[int, tuple[tf.Tensor, Any]] = {}
        self._made: dict[tf.Graph, dict[str, tf.Operation]] = {}  # By graph, by the first's name.
        self._coming: set[str] = set()  # The names of those that are being made.
        # Handles of variables that have no copy here, written; and who else was given a handle.
        self._written: set[int] = set()
        self._used: dict[int, tf.Operation] = {}
        self._captures: dict[tf.Graph, dict[int, tf.Tensor | None]] = {}  # By graph and argument.
        self._tokens: dict[bytes, bytes] = {}  # Of functions of Python, by the first's.
        self._functions = _Functions(index)

    def take(self, first: Any, own: Any) -> None:
        """Is told what stands for the first place's nested tensors, and for their masks.

        Of a ragged tensor its parts count, and nothing that it may keep beside them. What somebody
        has made of these tensors before is taken as it is.
        """
        for there, here in zip(_leaves(first), _leaves(own), strict=True):
            if there is here or not tf.is_symbolic_tensor(there):
                continue
            self._given[id(there)] = there, here
            mask = mask_of(there)
            if mask is not None:
                self._given[id(mask)] = mask, mask_of(here)

    def of(self, first: Any) -> Any:
        """What stands for the first place's nested tensors."""
        return tf.nest.map_structure(
            lambda leaf: self._of_leaf(leaf) if tf.is_symbolic_tensor(leaf) else leaf,
            first,
            expand_composites=True,
        )

    def _of_leaf(self, tensor):
        own = self._of(tensor)
        mask = mask_of(tensor)
        if mask is not None and own is not tensor:
            set_mask(own, self._of(mask))
        return own

    def _of(self, tensor: tf.Tensor) -> tf.Tensor:
        """What stands for a tensor; itself, if nothing does."""
        if id(tensor) in self._given:
            return self._given[id(tensor)][1]
        name, made = tensor.op.name, self._made.setdefault(tensor.graph, {})
        if name in made:
            if tensor.value_index >= len(made[name].outputs):
                self._catch_up(tensor.op, made[name])
            return made[name].outputs[tensor.value_index]
        if tensor.op.type != "Placeholder":
            return tensor
        outer = self._outside(tensor)
        if outer is None:
            return tensor
        own = self._of(outer) if tf.is_symbolic_tensor(outer) else self._copy_of(outer)
        own = tensor if own is outer else tensor.graph.capture(own)
        self._given[id(tensor)] = tensor, own
        return own

    def _outside(self, placeholder: tf.Tensor) -> tf.Tensor | None:
        """What a graph takes from outside by a placeholder; None where that is an argument."""
        graph = placeholder.graph
        known = self._captures.setdefault(graph, {})
        if id(placeholder) not in known:
            known |= {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        return known.setdefault(id(placeholder))

    def make(self, operations: Sequence[tf.Operation]) -> None:
        """Makes operations of the first place again, in its graph."""
        operations = [op for op in operations if not self._is_of_all(op)]
        self._coming = {op.name for op in operations}
        self._import(operations)

    def _import(self, operations) -> None:
        if not operations:
            return
        graph = operations[0].graph
        made = self._made.setdefault(graph, {})
        definition, given, later = self._definition(graph, operations)
        devices = [node.device for node in definition.node]
        for node in definition.node:  # TensorFlow enters a context for each that has one.
            node.ClearField("device")
        with tf.device(None), graph.control_dependencies(None):
            found = tf.graph_util.import_graph_def(
                definition, given, [op.name for op in operations], name=f"replica_{self._index}"
            )
        for op, device, again in zip(operations, devices, found, strict=True):
            made[op.name] = again
            set_device(again, device)
            _tell_types(op, again)
        for name, source in later:
            add_control_inputs(made[name], [made.get(source.name, source)])

    def _catch_up(self, op, again) -> None:
        """Changes an operation as TensorFlow has changed the first's since it was made.

        A call gets outputs for what its gradient needs only when the gradient is asked for.
        """
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(op.node_def)
        self._make_apart(op.graph, node)
        given = op.inputs[len(again.inputs) :]  # The empty lists that a loop is to fill.
        self._import([each for tensor in given for each in _behind(tensor.op, self._coming)])
        more = list(map(self._of, given))
        extend_operation(again, node.attr, more, op.outputs[len(again.outputs) :])
        _tell_types(op, again)

    def _is_of_all(self, op) -> bool:
        """Whether an operation is not made again: the first place's is that of all."""
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
        """Notes that an operation is given a tensor of all places.

        Raises:
            ValueError: If it looks into a variable that has no copy here, and that is written.
        """
        if tensor.dtype != tf.resource:
            return
        self._used[id(tensor)] = op
        if id(tensor) in self._written:
            raise ValueError(
                "A variable that was made outside of the builder's function has no copy on each "
                "replica, so one would look up what another has written. A variable that the layer "
                f"makes is required. Received: '{op.name}', of type {op.type}, of a variable that "
                "the same call writes. Make it by `self.add_weight`."
            )

    def _definition(self, graph, operations):
        """The operations as they are here, what they take from others, and what they wait for."""
        definition, given, later = tf.compat.v1.GraphDef(), {}, []
        definition.versions.CopyFrom(graph.graph_def_versions)
        own = {op.name for op in operations}
        for op in operations:
            node = definition.node.add()
            node.CopyFrom(op.node_def)
            node.attr.pop("_class", None)
            self._make_apart(graph, node)
            del node.input[:]
            for tensor in op.inputs:
                name = f"{tensor.op.name}:{tensor.value_index}"
                if tensor.op.name not in own:
                    name = f"given/{name.replace(':', '/')}"
                    if name not in given:
                        given[name] = self._of(tensor)
                    if given[name] is tensor:
                        self._note_use(op, tensor)
                node.input.append(name)
            node.input.extend(f"^{each.name}" for each in op.control_inputs if each.name in own)
            later += [(op.name, each) for each in op.control_inputs if each.name not in own]
        return definition, given, later

    def _make_apart(self, graph: tf.Graph, node) -> bool:
        """Places a node here, and gives it its own of what is kept outside the graph.

        Args:
            graph: Where the functions that it calls are known.
            node: As it is at the first place.

        Returns:
            Whether it differs from that at the first place.
        """
        is_other = False
        if "/device:" in node.device:
            device = self._device_of(node.device)
            is_other, node.device = device != node.device, device
        if _is_seeded(node):
            _draw_apart(node, self._index)
            is_other = True
        elif node.op == _PYTHON:
            node.attr["token"].s = python_function_again(node.attr["token"].s, self._tokens)
            is_other = True
        return self._functions.replace(graph, node, self._make_apart) or is_other


class DrawnApart:
    """Operations of one piece that draw other numbers than the same of another.

    Args:
        index: The piece's number; those of piece 0 stay as they are.
    """

    def __init__(self, index: int):
        self._index = index
        self._functions = _Functions(index)
        self._calls: list[tf.Operation] = []  # Of functions that draw.

    def change(self, operations: Sequence[tf.Operation] = ()) -> None:
        """Gives operations, of which seeds are counted by TensorFlow, seeds of this piece.

        A call is given another function, which TensorFlow replaces where it is asked for a gradient
        later; so call this again behind gradients.

        Args:
            operations: Those that are new.
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
        self._known: dict[str, str] = {}  # By the first's.

    def replace(self, graph: tf.Graph, node, change: Callable[[tf.Graph, Any], bool]) -> bool:
        """Has a node call those of this place; returns whether any is another.

        Args:
            graph: Where the functions that it calls are known.
            node: It.
            change: As of `function_again`.
        """
        is_other = False
        for value in node.attr.values():
            for called in [value.func] if value.HasField("func") else value.list.func:
                name = called.name
                if name not in self._known:
                    again = function_again(graph, name, f"_{self._index}", change)
                    self._known |= {again: again, name: again}
                called.name = self._known[name]
                is_other |= called.name != name
        return is_other


def _draw_apart(node, index: int) -> bool:
    node.attr["seed2"].i = (node.attr["seed2"].i + index * _FOLD) % 2**31
    return True


def _is_seeded(node) -> bool:
    """Whether a node draws by seeds that TensorFlow has counted."""
    own = node.attr
    return "seed" in own and "seed2" in own and bool(own["seed"].i or own["seed2"].i)


def _behind(op, names: set[str]) -> list[tf.Operation]:
    """An operation and what it is made of, as far as they have one of these names."""
    if op.name not in names:
        return []
    return [*(each for tensor in op.inputs for each in _behind(tensor.op, names)), op]


def _tell_types(op, again) -> None:
    """Gives the outputs of an operation that was made again the shapes of the first's."""
    for there, here in zip(op.outputs, again.outputs, strict=True):
        if there.dtype in (tf.resource, tf.variant):
            copy_handle_data(there, here)
        elif not here.shape.is_fully_defined():
            here.set_shape(there.shape)


def _leaves(structure) -> list:
    return tf.nest.flatten(structure, expand_composites=True)
