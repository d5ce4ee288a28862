"""Decides which layers of a model are split, and how.

Layers are visited in topological order:

    Dense, Conv2D                           column: its output is in parts
    Dense, Conv2D, if its input is          row: it sums
    layers that work feature by feature     features: stay in parts, between column and row
    attention                               heads
    EinsumDense                             column, output joined; on request axis N of its kernel
    Embedding, ReversibleEmbedding          vocabulary
    Concatenate of one input per device     joined: parts for a row, the feature partition
    convolutions and pooling, on request    height: rows of the picture (`spatial_plan.py`)

A column layer whose parts no other layer can use joins its output; so does a layer that is called
more than once, and one in a composite layer with unknown calls (`composite.py`). A layer with a
user's own `call` or class is left in place, except for the layers inside it; so is a layer that
adds an activity loss, has LoRA or is quantized, or holds such a layer.
A request, by argument or by the class as which a layer was written, is met or raises an error.
"""

import collections
import types
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.layers.composite import Group, class_of_keras
from tfparallel.layers.einsum import axes_of, units_of
from tfparallel.layers.layer import has_activation_of_keras
from tfparallel.layers.parallel_hints import hint_of
from tfparallel.layers.spatial_plan import CALLER, HEIGHT, is_in_rows, is_split_by_height
from tfparallel.problems import PlacementError, Problems
from tfparallel.seams.functional import calls_of, calls_to, functional_of, maker_of
from tfparallel.seams.keras import layers_in

_layers = keras.layers
COLUMN, GATHERED, ROW, FEATURES = "column", "column, gathered", "row", "features"
HEADS, VOCABULARY, JOINED = "heads", "vocabulary", "joined"
KINDS = (COLUMN, GATHERED, ROW, FEATURES, HEADS, VOCABULARY, JOINED, HEIGHT)
AXIS = "axis"  # "axis 0": of the kernel of an `EinsumDense`.

_PAIRED = {_layers.Dense, _layers.Conv2D}
_ATTENTION = {_layers.MultiHeadAttention, _layers.GroupQueryAttention}
# Keras before 3.14 has no ReversibleEmbedding.
_EMBEDDINGS = {_layers.Embedding, getattr(_layers, "ReversibleEmbedding", _layers.Embedding)}
# What is divided: how to count it, and its name in an error.
_COUNTS: dict[type, tuple[Callable[[Any], int], str]] = {
    _layers.Dense: (attrgetter("units"), "units"),
    _layers.Conv2D: (attrgetter("filters"), "channels"),
    _layers.EinsumDense: (units_of, "units along an axis that only the kernel has"),
    _layers.MultiHeadAttention: (attrgetter("num_heads"), "heads"),
    _layers.GroupQueryAttention: (attrgetter("num_key_value_heads"), "key and value heads"),
    **dict.fromkeys(_EMBEDDINGS, (attrgetter("input_dim"), "vocabulary entries")),
}
# How layers that read and return whole tensors are split.
_ALONE = {
    _layers.EinsumDense: GATHERED,
    **dict.fromkeys(_ATTENTION, HEADS),
    **dict.fromkeys(_EMBEDDINGS, VOCABULARY),
}
_FEATUREWISE = {
    _layers.ReLU, _layers.LeakyReLU, _layers.ELU, _layers.ZeroPadding2D, _layers.Cropping2D,
    _layers.UpSampling2D, _layers.MaxPooling2D, _layers.AveragePooling2D, _layers.Dropout,
    _layers.GlobalAveragePooling2D, _layers.GlobalMaxPooling2D, _layers.Activation,
    _layers.BatchNormalization, _layers.DepthwiseConv2D, _layers.PReLU,
}  # fmt: skip
# The kinds of split that may be requested.
_COULD_BE = {
    _layers.Dense: (COLUMN, ROW),
    _layers.Conv2D: (COLUMN, ROW, HEIGHT),
    _layers.EinsumDense: (COLUMN,),
    **{cls: (kind,) for cls, kind in _ALONE.items() if kind != GATHERED},
    **dict.fromkeys((_layers.DepthwiseConv2D, _layers.MaxPooling2D), (HEIGHT,)),
    _layers.AveragePooling2D: (HEIGHT,),
}
_METHODS = types.FunctionType | types.MethodType
_SET_BY_KERAS = {"build", "quantize"}  # Keras sets these on each layer.
# Activations that mix features.
_MIX_FEATURES = {"softmax", "log_softmax", "glu", "sparsemax"}


def plan(
    group: Group,
    num_devices: int,
    requests: Mapping[str, str | int | None] | None = None,
    by_height: bool = False,
    shared: Collection[int] = (),
    stage_of: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Plans how each layer of a group is split.

    Args:
        group: Built layers. Models and composite layers among them have their own groups.
        num_devices: The number of parts.
        requests: How to split single layers, by their names in the group's report; None leaves one
            in place. They override the class as which a layer was written.
        by_height: Whether to split convolutions, and the layers between them, by the picture's
            height rather than by channels.
        shared: The `id` of each layer that another group also calls: its outputs are whole.
        stage_of: The stage of each layer of a model, by name, if there are several: tensors between
            stages are whole.

    Returns:
        One of `KINDS` or "axis N", by the layer's name in a report; layers left in place are
        omitted.

    Raises:
        PlacementError: If a layer cannot be split as requested.
    """
    requests = {layer.name: requests[group.name_of(layer)] for layer in group.layers
             if requests and group.name_of(layer) in requests}  # fmt: skip
    apart = {*map(id, group.apart), *shared}
    graph, problems = Graph(group.graph, apart, stage_of), Problems()
    names = collections.Counter(layer.name for layer in group.layers if layer.built)
    kinds: dict[str, str] = {}
    in_parts: set[str] = set()
    in_rows: set[str] = set()
    for layer in group.layers:
        name, sources = layer.name, graph.sources[layer.name]
        if names[name] > 1:
            continue  # The name is ambiguous.
        is_once = graph.is_called_once(layer)
        # Parts with another reader would have to be joined anyway.
        reads_parts = (
            is_once
            and len(sources) == 1
            and sources[0] in in_parts
            and len(graph.readers[sources[0]]) == 1
            and graph.are_in_one_stage(sources[0], name)
        )
        kind = _kind(layer, num_devices, reads_parts, graph)
        # Pictures in rows stay so up to the next convolution.
        can_stay = not isinstance(layer, _layers.Conv2D) and in_rows.issuperset(sources)
        if (by_height or can_stay) and _is_plain(layer) and is_once:
            if is_split_by_height(layer, graph, num_devices, in_rows):
                kind = HEIGHT
            elif isinstance(layer, _layers.Conv2D):
                kind = None
        if name in requests or hint_of(layer) is not None:
            kind = None
            with problems.gathered():
                kind = _requested_kind(layer, requests, num_devices, graph)
                if kind == HEIGHT and not is_split_by_height(layer, graph, num_devices, in_rows):
                    raise PlacementError(_not_by_height(layer, requests, num_devices))
        if kind is None:
            continue
        kinds[name] = kind
        if kind == HEIGHT and is_in_rows(layer):
            in_rows.add(name)
        is_column = kind == COLUMN and class_of_keras(layer) in _PAIRED and not _mixes(layer)
        if is_once and (is_column or kind in (FEATURES, JOINED)):
            in_parts.add(name)
    problems.raise_all()
    used = _used(kinds, in_parts, graph)
    return {group.name_of(layer): used[layer.name] for layer in group.layers if layer.name in used}


def _kind(layer, num_devices, reads_parts, graph) -> str | None:
    cls = class_of_keras(layer)
    if not _is_plain(layer):
        return None
    count = _count(layer)
    if cls in _PAIRED:
        if not _is_simple(layer):
            return None
        return ROW if reads_parts else COLUMN if count >= num_devices else None
    if count is not None:
        return _ALONE[cls] if count >= num_devices else None
    if not graph.is_called_once(layer):
        return None
    inputs = graph.nodes[layer.name][0].input_tensors
    if cls is _layers.Concatenate and len(inputs) == num_devices and not reads_parts:
        is_last = layer.axis % len(inputs[0].shape) == len(inputs[0].shape) - 1
        # Only the model's inputs: an example's features, one part per device.
        names = list(map(maker_of, inputs))
        if is_last and all(isinstance(op, _layers.InputLayer) for op in names):
            return JOINED
    if reads_parts and _is_featurewise(layer, cls, inputs[0]):
        return FEATURES
    return None


def _requested_kind(layer, requests, num_devices, graph) -> str | None:
    kind = requests[layer.name] if layer.name in requests else hint_of(layer).kind
    if kind is None:
        return None
    cls = class_of_keras(layer)
    could = _COULD_BE.get(cls, ())
    if cls is _layers.EinsumDense:
        could = (*could, *axes_of(layer))
    if kind not in could:
        answer = "It can only be left in place."
        if could:
            answer = f"It can be {' or '.join(map(str, could))}."
        raise PlacementError(
            f"Layer '{layer.name}' of class {original_class(layer).__name__} cannot be split by "
            f"{kind!r}. {answer} Received: split={{{layer.name!r}: {kind!r}}}."
        )
    # `is_split_by_height` decides which layers can be split by height.
    is_simple = kind == HEIGHT or _is_simple(layer)
    is_called = kind != HEIGHT or graph.is_called_once(layer)
    if not _is_plain(layer) or not is_simple or not is_called:
        raise PlacementError(
            "A split layer and its inner layers must have no activity regularizer, LoRA, "
            "quantization or groups, and must have the channels last; a layer that is split by "
            "height must be called once. Received: "
            f"{_request(layer, requests)}. {_way_out(layer, requests)}"
        )
    if kind == HEIGHT:
        return kind
    if kind == ROW:
        count, unit = layer.kernel.shape[-2], "features"  # Also where the calls are unknown.
    elif isinstance(kind, int):
        count, unit = layer.kernel.shape[kind], f"elements along axis {kind} of its kernel"
    else:
        count, unit = _count(layer), _COUNTS[cls][1]
    if count < num_devices:
        raise PlacementError(
            f"Each device needs a part. Received: {_request(layer, requests)}; layer "
            f"'{layer.name}' with {count} {unit}, for {num_devices} devices. It can be split over "
            f"at most {count} devices."
        )
    return f"{AXIS} {kind}" if isinstance(kind, int) else kind


def _not_by_height(layer, requests, num_devices) -> str:
    return (
        "A layer that is split by height needs images of known height and width, with the channels "
        f"last, and at least {num_devices} output rows, one per device. Only layers may read its "
        "output, and as the model's output it must have no activation. Received: "
        f"{_request(layer, requests)}. {_way_out(layer, requests)}"
    )


def _request(layer, requests) -> str:
    """Returns the request as it stands in an error."""
    if layer.name in requests:
        return f"split={{{layer.name!r}: {requests[layer.name]!r}}}"
    return f"'{layer.name}' written as {hint_of(layer).__name__}"


def _way_out(layer, requests) -> str:
    if layer.name in requests and hint_of(layer) is None:
        return "Leave it out of `split`."
    return f"Leave it in place with split={{{layer.name!r}: None}}."


def _used(kinds, in_parts, graph) -> dict[str, str]:
    """Removes layers whose parts no row-parallel layer reads."""
    used: dict[str, str] = {}
    for name in reversed(kinds):
        # A layer requested as row may follow a softmax, which needs whole outputs.
        readers = [used.get(reader) for reader in graph.readers[name]]
        use = name in in_parts and readers in ([ROW], [FEATURES])
        use = use and graph.are_in_one_stage(name, *graph.readers[name])
        if kinds[name] in (FEATURES, JOINED) and not use:
            continue
        gathered = kinds[name] == COLUMN and not use
        used[name] = GATHERED if gathered else kinds[name]
    return dict(reversed(used.items()))


class Graph:
    """The readers and sources of each operation of a functional or Sequential model.

    Attributes:
        nodes: The calls of each operation, which may be a layer, by name.
        sources: The names of the operations that it reads.
        layers: The names of the operations that are layers.
        readers: The names of the operations that read it; the model's caller reads its outputs.
    """

    def __init__(
        self,
        model: keras.Model | None,
        shared: Collection[int] = (),
        stage_of: Mapping[str, int] | None = None,
    ):
        self._shared = shared
        self._stage_of = stage_of or {}
        self.nodes: dict[str, list] = collections.defaultdict(list)
        self.sources: dict[str, list[str]] = collections.defaultdict(list)
        self.readers: dict[str, list[str]] = collections.defaultdict(list)
        self.layers: set[str] = set()
        if model is None:
            return
        functional = functional_of(model)
        calls = set(map(id, calls_of(model)))
        for operation in functional.operations:
            nodes = [node for node in calls_to(operation) if id(node) in calls]
            self.nodes[operation.name] = nodes
            self.sources[operation.name] = [
                maker_of(tensor).name for node in nodes for tensor in node.input_tensors
            ]
        self.layers.update(layer.name for layer in functional.layers)
        for name in self.nodes:
            self.readers[name] = [r for r, sources in self.sources.items() if name in sources]
        for tensor in functional.outputs:
            self.readers[maker_of(tensor).name].append(CALLER)

    def are_in_one_stage(self, *names: str) -> bool:
        """Returns whether all are in one stage; operations that are no layers have none."""
        return len({self._stage_of.get(name) for name in names}) == 1

    def is_called_once(self, layer: keras.Layer) -> bool:
        """Returns whether a layer has one call, in this group and all others."""
        return len(self.nodes[layer.name]) == 1 and id(layer) not in self._shared


def _count(layer) -> int | None:
    """Returns the number of units, filters, heads or ids to divide; None for other layers."""
    counted = _COUNTS.get(class_of_keras(layer))
    return counted[0](layer) if counted else None


def _is_plain(layer) -> bool:
    # Attention passes its activity regularizer to its projections, which may also have LoRA.
    return layer.built and not any(
        has_own_methods(inner)
        or getattr(inner, "activity_regularizer", None) is not None
        or getattr(inner, "lora_enabled", False)
        or getattr(inner, "quantization_mode", None)
        for inner in layers_in(layer)
    )


def has_own_methods(layer: keras.Layer) -> bool:
    """Returns whether a method was set on the layer, which smaller layers would lack."""
    names = {name for name, value in vars(layer).items() if isinstance(value, _METHODS)}
    return any(hasattr(type(layer), name) for name in names - _SET_BY_KERAS)


def _is_simple(layer) -> bool:
    return _channels_last(layer) and getattr(layer, "groups", 1) == 1


def _channels_last(layer) -> bool:
    return getattr(layer, "data_format", None) != "channels_first"


def _mixes(layer) -> bool:
    name = getattr(getattr(layer, "activation", None), "__name__", "linear")
    return not has_activation_of_keras(layer) or name in _MIX_FEATURES


def _is_featurewise(layer, cls, tensor) -> bool:
    if not _channels_last(layer):
        return False
    if cls in (_layers.Activation, _layers.DepthwiseConv2D):
        return not _mixes(layer)
    if cls is _layers.Dropout:
        return layer.noise_shape is None
    if cls is _layers.BatchNormalization:
        is_last = layer.axis % len(tensor.shape) == len(tensor.shape) - 1
        return is_last and not layer.synchronized
    if cls is _layers.PReLU:
        # A slope shared by all features cannot be split.
        return layer.alpha.shape[-1] == tensor.shape[-1]
    return cls in _FEATUREWISE
