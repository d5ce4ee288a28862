"""Sums over the devices, inside of the programs that give and take them.

Where each device adds, or stacks, the same term of every device, a traced step has an exchange:

    device 0    t_0 ──┬── AddN(t_0, t_1) ── …        t_0 ── all-reduce ── …
                      ╳                         ⇒              │
    device 1    t_1 ──┴── AddN(t_0, t_1) ── …        t_1 ── all-reduce ── …

On the left a program ends where another device's term comes in. On the right none does: XLA makes
an all-reduce of `CollectiveReduceV2`, which is a part of the program. A stack is a sum as well, in
which each device adds its term in its own place of a table of zeros.

All devices must run the same all-reduces in the same order, or they wait for ever. So

- exchanges of one depth (the number of exchanges behind) and type are one all-reduce, and
- each all-reduce takes along one number of the sum before, so that XLA cannot change their order.

What is of a size that is not known in the trace (rows of the batch), or of some devices, stays as
it was, and cuts the programs.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.seams.distribute import collective_keys
from tfparallel.seams.tensorflow import set_input
from tfparallel.xla.compilable import ranks_of
from tfparallel.xla.step_graph import needed

__all__ = ["exchange_inside"]

_SUM, _STACK = "AddN", "Pack"
_TYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64)
# Apart from those of `collectives/cross_device.py`, and of TensorFlow's own.
_keys = collective_keys(2**22)


class _Exchange(NamedTuple):
    """A term of each device, added or stacked.

    Attributes:
        kind: Which of the two.
        terms: By device, in the order of the ranks.
        members: By device, the operations that do so.
    """

    kind: str
    terms: tuple[tf.Tensor, ...]
    members: list[list[tf.Operation]]

    @property
    def dtype(self) -> tf.DType:
        """The type of the terms."""
        return self.terms[0].dtype

    @property
    def is_for_all(self) -> bool:
        """Whether each device reads the result."""
        return all(self.members)

    def with_terms(self, results: Mapping[str, tf.Tensor]) -> "_Exchange":
        """The same of other terms, by the names of the operations that gave them."""
        return self._replace(terms=tuple(results.get(t.op.name, t) for t in self.terms))


def exchange_inside(graph, devices: Sequence[str]) -> list[list[str]]:
    """Makes all-reduces of a traced step's exchanges.

    Args:
        graph: The step's `FuncGraph`, which is changed.
        devices: Names of the devices.

    Returns:
        For each all-reduce the names of its operations, one for each device.
    """
    if len(devices) < 2:
        return []
    order = needed(graph)
    groups = _in_turn(order, _found(order, ranks_of(devices), len(devices)))
    names, before = [], [None] * len(devices)
    results: dict[str, tf.Tensor] = {}  # By member; they may be terms of what is deeper.
    with graph.as_default():
        indices = _indices(len(devices))
        group_key = _keys.get_group_key(list(devices))
        for group in groups:
            own = [each.with_terms(results) for each in group]
            names_of_all: list[str] = []
            # One for all devices: of a trace that has failed midway, too.
            keys = len(devices), group_key, _keys.get_instance_key(group_key, devices[0])
            for rank, device in enumerate(devices):
                with tf.device(device):
                    total, sums = _exchanged(own, rank, indices[rank], keys, before[rank])
                before[rank] = total
                names_of_all.append(total.op.name)
                for exchange, result in zip(own, sums, strict=True):
                    for member in exchange.members[rank]:
                        _replace(graph, member.outputs[0], result)
                        results[member.name] = result
            names.append(names_of_all)
    return names


def _found(order, rank_of, num_devices: int) -> list[_Exchange]:
    """The exchanges between all devices, in the order of the trace."""
    members = collections.defaultdict(lambda: [[] for _ in range(num_devices)])
    terms = {}
    waited_for = {source.name for op in order for source in op.control_inputs}
    for op in order:
        rank = rank_of(op.device) if op.device else 0
        if rank is None or len(op.inputs) != num_devices or op.name in waited_for:
            continue
        if op.type == _SUM or op.type == _STACK and op.get_attr("axis") == 0:
            of_all = [_origin(t, k, rank_of) for k, t in enumerate(op.inputs)]
            if [rank_of(t.op.device) for t in of_all] == list(range(num_devices)):
                key = (op.type, *((t.op.name, t.value_index) for t in of_all))
                terms[key] = tuple(of_all)
                members[key][rank].append(op)
    return [
        _Exchange(key[0], terms[key], of_all)
        for key, of_all in members.items()
        if all(map(_is_of_known_size, terms[key]))
    ]


def _is_of_known_size(term) -> bool:
    return term.dtype in _TYPES and term.shape.is_fully_defined()


def _origin(tensor, rank: int, rank_of: Callable[[str], int | None]) -> tf.Tensor:
    """What a device was sent: the tensor on the other, before it was handed on as it is."""
    while tensor.op.type == "Identity":
        source = tensor.op.inputs[0]
        if rank_of(tensor.op.device) == rank != rank_of(source.op.device):
            break
        tensor = source
    return tensor


def _in_turn(order, exchanges) -> list[list[_Exchange]]:
    """Those of each all-reduce, in their order.

    XLA drops what nobody reads. So what some devices alone read, such as the loss, is not behind
    the last that all do.
    """
    depths = _depths(order, exchanges)
    keys = [(depth, each.dtype.name) for depth, each in zip(depths, exchanges, strict=True)]
    pairs = list(zip(keys, exchanges, strict=True))
    last = max((key for key, each in pairs if each.is_for_all), default=None)
    groups = collections.defaultdict(list)
    for key, exchange in pairs:
        if last is not None and key <= last:
            groups[key].append(exchange)
    return [groups[key] for key in sorted(groups)]


def _depths(order, exchanges) -> list[int]:
    """How many exchanges stand behind each of these, itself among them."""
    members = {op.name for each in exchanges for of_one in each.members for op in of_one}
    depth: dict[str, int] = {}
    for op in order:
        sources = [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
        behind = max((depth.get(each.name, 0) for each in sources), default=0)
        depth[op.name] = behind + (op.name in members)
    return [max(depth[op.name] for of_one in e.members for op in of_one) for e in exchanges]


def _indices(num_devices: int) -> list[tf.Tensor]:
    """The devices' ranks; given to each program, so that all are the same."""
    with tf.device(None):
        return [
            tf.compat.v1.placeholder_with_default(tf.constant(rank), [])
            for rank in range(num_devices)
        ]


def _exchanged(exchanges, rank: int, index, keys, before) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """One device's part of an all-reduce.

    Args:
        exchanges: What is exchanged, of one type.
        rank: The device's.
        index: The same, as a tensor.
        keys: How many devices there are, the key of their group, and that of the all-reduce.
        before: This device's sum of the all-reduce before, or None.

    Returns:
        The sum, a vector; and each exchange's result, cut out of it.
    """
    own = [each.terms[rank] for each in exchanges]
    dtype, (number, group_key, instance_key) = exchanges[0].dtype, keys
    places = {_SUM: [], _STACK: []}
    for place, each in enumerate(exchanges):
        places[each.kind].append(place)
    sizes = {kind: [own[i].shape.num_elements() for i in places[kind]] for kind in places}
    parts = [tf.reshape(own[i], [-1]) for i in places[_SUM]]
    if places[_STACK]:
        row = tf.concat([tf.reshape(own[i], [-1]) for i in places[_STACK]], 0)
        is_own = tf.equal(tf.range(number), index)[:, None]
        parts.append(tf.reshape(tf.where(is_own, row, tf.zeros([], dtype)), [-1]))
    if before is not None:
        parts.append(tf.cast(before[:1], dtype) / number)
    total = tf.raw_ops.CollectiveReduceV2(
        input=tf.concat(parts, 0),
        group_size=number,
        group_key=group_key,
        instance_key=instance_key,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
        communication_hint="auto",
    )
    results: list = [None] * len(exchanges)
    split = tf.split(total, [part.shape.num_elements() for part in parts])
    for i, part in zip(places[_SUM], split, strict=False):
        results[i] = tf.reshape(part, own[i].shape)
    if places[_STACK]:
        table = tf.reshape(split[len(places[_SUM])], [number, -1])
        columns = tf.split(table, sizes[_STACK], axis=1)
        for i, part in zip(places[_STACK], columns, strict=True):
            results[i] = tf.reshape(part, [number, *own[i].shape])
    return total, results


def _replace(graph, old, new) -> None:
    """Has all that reads one tensor of a graph read another."""
    for op in old.consumers():
        for index, tensor in enumerate(op.inputs):
            if tensor is old:
                set_input(op, index, new)
    graph.outputs[:] = [new if each is old else each for each in graph.outputs]
