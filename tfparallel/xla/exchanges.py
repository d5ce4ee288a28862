"""Moves sums over the devices into the XLA programs that produce and consume them.

A traced step has an exchange where each device adds, or stacks, the same terms of all devices:

    device 0    t_0 ──┬── AddN(t_0, t_1) ── …        t_0 ── all-reduce ── …
                      ╳                         ⇒              │
    device 1    t_1 ──┴── AddN(t_0, t_1) ── …        t_1 ── all-reduce ── …

On the left, a program must end where another device's term comes in. On the right it need not: XLA
turns `CollectiveReduceV2` into an all-reduce that is part of the program. A stack becomes a sum
too, in which each device adds its term in its own row of a table of zeros.

All devices must run the same all-reduces in the same order, or they hang. Therefore

- exchanges of equal depth (number of preceding exchanges) and dtype form one all-reduce, and
- each all-reduce includes one number of the previous sum, so that XLA cannot reorder them.

Exchanges of dynamic size (rows of the batch), or between only some devices, stay as traced, and
split the programs.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.seams.distribute import collective_keys
from tfparallel.seams.tensorflow import set_input
from tfparallel.xla.compilable import ranks_of
from tfparallel.xla.step_graph import needed

_SUM, _STACK = "AddN", "Pack"
_TYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64)
# Distinct from the keys of `collectives/cross_device.py` and of TensorFlow.
_keys = collective_keys(2**22)


class _Exchange(NamedTuple):
    """Terms of all devices, one each, that are added or stacked.

    Attributes:
        kind: `_SUM` or `_STACK`.
        terms: The terms, in rank order.
        members: For each device, its operations that add or stack them.
    """

    kind: str
    terms: tuple[tf.Tensor, ...]
    members: list[list[tf.Operation]]

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the terms."""
        return self.terms[0].dtype

    @property
    def is_for_all(self) -> bool:
        """Whether every device reads the result."""
        return all(self.members)

    def with_terms(self, results: Mapping[str, tf.Tensor]) -> "_Exchange":
        """Returns the exchange with terms replaced by `results`, by operation name."""
        return self._replace(terms=tuple(results.get(t.op.name, t) for t in self.terms))


def exchange_inside(graph, devices: Sequence[str]) -> list[list[str]]:
    """Converts the exchanges of a traced step to all-reduces.

    Args:
        graph: The step's `FuncGraph`, modified in place.
        devices: Names of the devices.

    Returns:
        For each all-reduce, the names of its operations, one per device.
    """
    if len(devices) < 2:
        return []
    order = needed(graph)
    groups = _in_turn(order, _exchanges_in(order, ranks_of(devices), len(devices)))
    names, before = [], [None] * len(devices)
    results: dict[str, tf.Tensor] = {}  # By member; they may be terms of deeper exchanges.
    with graph.as_default():
        indices = _indices(len(devices))
        group_key = _keys.get_group_key(list(devices))
        for group in groups:
            exchanges = [each.with_terms(results) for each in group]
            names_of_all: list[str] = []
            # One key for all devices, even after a trace that failed midway.
            keys = len(devices), group_key, _keys.get_instance_key(group_key, devices[0])
            for rank, device in enumerate(devices):
                with tf.device(device):
                    total, sums = _exchanged(exchanges, rank, indices[rank], keys, before[rank])
                before[rank] = total
                names_of_all.append(total.op.name)
                for exchange, result in zip(exchanges, sums, strict=True):
                    for member in exchange.members[rank]:
                        _replace(graph, member.outputs[0], result)
                        results[member.name] = result
            names.append(names_of_all)
    return names


def _exchanges_in(order, rank_of, num_devices: int) -> list[_Exchange]:
    """Returns the exchanges between all devices, in the order of the trace."""
    members = collections.defaultdict(lambda: [[] for _ in range(num_devices)])
    terms = {}
    waited_for = {source.name for op in order for source in op.control_inputs}
    for op in order:
        rank = rank_of(op.device) if op.device else 0
        if rank is None or len(op.inputs) != num_devices or op.name in waited_for:
            continue
        if op.type == _SUM or op.type == _STACK and op.get_attr("axis") == 0:
            by_device = [_origin(t, k, rank_of) for k, t in enumerate(op.inputs)]
            if [rank_of(t.op.device) for t in by_device] == list(range(num_devices)):
                key = (op.type, *((t.op.name, t.value_index) for t in by_device))
                terms[key] = tuple(by_device)
                members[key][rank].append(op)
    return [
        _Exchange(key[0], terms[key], by_device)
        for key, by_device in members.items()
        if all(map(_is_of_known_size, terms[key]))
    ]


def _is_of_known_size(term) -> bool:
    return term.dtype in _TYPES and term.shape.is_fully_defined()


def _origin(tensor, rank: int, rank_of: Callable[[str], int | None]) -> tf.Tensor:
    """Returns the original tensor on the other device, before any `Identity` that passed it on."""
    while tensor.op.type == "Identity":
        source = tensor.op.inputs[0]
        if rank_of(tensor.op.device) == rank != rank_of(source.op.device):
            break
        tensor = source
    return tensor


def _in_turn(order, exchanges) -> list[list[_Exchange]]:
    """Groups the exchanges into all-reduces, in order.

    XLA drops unused results. So an exchange that only some devices read, such as the loss, must not
    come after the last one that all devices read.
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
    """Returns the depth of each exchange: the number of exchanges up to and including it."""
    members = {op.name for each in exchanges for ops in each.members for op in ops}
    depth: dict[str, int] = {}
    for op in order:
        sources = [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
        preceding = max((depth.get(each.name, 0) for each in sources), default=0)
        depth[op.name] = preceding + (op.name in members)
    return [max(depth[op.name] for ops in e.members for op in ops) for e in exchanges]


def _indices(num_devices: int) -> list[tf.Tensor]:
    """Returns the devices' ranks as inputs, so that the programs of all devices are equal."""
    with tf.device(None):
        return [
            tf.compat.v1.placeholder_with_default(tf.constant(rank), [])
            for rank in range(num_devices)
        ]


def _exchanged(exchanges, rank: int, index, keys, before) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Builds one device's part of an all-reduce.

    Args:
        exchanges: The exchanges, all of one dtype.
        rank: The device's rank.
        index: The same, as a tensor.
        keys: Number of devices, group key, and instance key of the all-reduce.
        before: This device's sum from the previous all-reduce, or None.

    Returns:
        The sum, a vector, and each exchange's result, a slice of it.
    """
    terms = [each.terms[rank] for each in exchanges]
    dtype, (number, group_key, instance_key) = exchanges[0].dtype, keys
    places = {_SUM: [], _STACK: []}
    for place, each in enumerate(exchanges):
        places[each.kind].append(place)
    sizes = {kind: [terms[i].shape.num_elements() for i in places[kind]] for kind in places}
    parts = [tf.reshape(terms[i], [-1]) for i in places[_SUM]]
    if places[_STACK]:
        row = tf.concat([tf.reshape(terms[i], [-1]) for i in places[_STACK]], 0)
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
        results[i] = tf.reshape(part, terms[i].shape)
    if places[_STACK]:
        table = tf.reshape(split[len(places[_SUM])], [number, -1])
        columns = tf.split(table, sizes[_STACK], axis=1)
        for i, part in zip(places[_STACK], columns, strict=True):
            results[i] = tf.reshape(part, [number, *terms[i].shape])
    return total, results


def _replace(graph, old, new) -> None:
    """Redirects all consumers of one tensor in a graph to another."""
    for op in old.consumers():
        for index, tensor in enumerate(op.inputs):
            if tensor is old:
                set_input(op, index, new)
    graph.outputs[:] = [new if each is old else each for each in graph.outputs]
