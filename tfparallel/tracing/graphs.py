"""Inspects the operations of a graph and of the functions that they call."""

import functools
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from tfparallel.seams.tensorflow import FuncGraph, graph_of

_OF_PROGRAMS = "_tfparallel_of_programs"
_WRITES = (
    *("AssignAdd", "AssignSub", "AssignVariable", "ResourceApply", "ResourceScatter"),
    *("ResourceSparse", "ResourceStridedSliceAssign"),
)
_FILLS = ("LookupTableInsert", "LookupTableImport")

_DRAWS_ANEW = {
    *("Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2"),
    *("RandomShuffle", "RandomStandardNormal", "RandomUniform", "RandomUniformInt"),
    *("RngReadAndSkip", "TruncatedNormal"),
}

# By operation type: the attributes that are functions, or lists of functions.
_KINDS: dict[str, dict[str, str]] = {}
_SEEDED: dict[str, bool] = {}  # By operation type: whether it has two seeds.


def with_inner(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and the operations of all functions that they call."""
    for operation in operations:
        yield operation
        for inner in called_by(operation):
            yield from with_inner(inner.get_operations())


def called_by(operation: tf.Operation) -> Iterator[tf.Graph]:
    """Yields the graphs of the functions that an operation calls: loops, branches, functions."""
    return filter(None, _graphs_of(operation))


def calls_unknown(operation: tf.Operation) -> bool:
    """Whether an operation calls a function whose graph TensorFlow did not keep."""
    return None in _graphs_of(operation)


def _graphs_of(operation) -> list[tf.Graph | None]:
    kinds = _KINDS.get(operation.type)
    if kinds is None:
        types = {each.name: each.type for each in operation.op_def.attr}
        kinds = {name: kind for name, kind in types.items() if kind in ("func", "list(func)")}
        _KINDS[operation.type] = kinds
    values = [(operation.get_attr(name), kind) for name, kind in kinds.items()]
    called = [each for value, kind in values for each in (value if "list" in kind else [value])]
    return [graph_of(operation.graph, each.name) for each in called]


def writes_variable(operation: tf.Operation) -> bool:
    """Whether an operation writes a variable, whose handle it takes."""
    return operation.type.startswith(_WRITES)


def writes_state(operation: tf.Operation) -> bool:
    """Whether an operation writes a variable or a table."""
    return writes_variable(operation) or operation.type.startswith(_FILLS)


def draws_anew(operation: tf.Operation) -> bool:
    """Whether an operation draws by a state of TensorFlow, so the numbers change each time."""
    return operation.type in _DRAWS_ANEW


def has_seeds(operation: tf.Operation) -> bool:
    """Whether an operation draws by seeds that TensorFlow counts."""
    if operation.type not in _SEEDED:
        _SEEDED[operation.type] = {"seed", "seed2"} <= {e.name for e in operation.op_def.attr}
    return _SEEDED[operation.type] and any(map(operation.get_attr, ("seed", "seed2")))


def operations_here() -> list[tf.Operation]:
    """The operations of the current graph; none in an eager step."""
    if tf.executing_eagerly():
        return []
    return tf.compat.v1.get_default_graph().get_operations()


def is_within(graph: tf.Graph, other: tf.Graph) -> bool:
    """Whether a graph is nested in another, at any depth."""
    while graph is not None and graph is not other:
        graph = getattr(graph, "outer_graph", None)
    return graph is other


def is_in_function(graph: tf.Graph, other: tf.Graph) -> bool:
    """Whether a nested graph is inside a `tf.function`, not only in a loop or branch.

    TensorFlow caches the trace of such a function, and reuses it in the next call.
    """
    while graph is not None and graph is not other:
        if not getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def of_programs(function: Callable) -> Callable:
    """Marks the graph that a function is traced into; XLA compiles its parts for each device."""

    @functools.wraps(function)
    def marked(*args):
        setattr(tf.compat.v1.get_default_graph(), _OF_PROGRAMS, True)
        return function(*args)

    return marked


def is_of_programs(graph: tf.Graph) -> bool:
    """Whether a graph, or one around it, has this mark."""
    while isinstance(graph, FuncGraph):
        if hasattr(graph, _OF_PROGRAMS):
            return True
        graph = graph.outer_graph
    return False
