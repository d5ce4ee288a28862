"""Which layers of a model are split, and how.

Walked in the order of the layers:

    Dense, Conv2D                           column: its output is in parts
    Dense, Conv2D, if its input is          row: it sums
    what works feature by feature           features: stays in parts, between column and row
    attention                               heads
    EinsumDense                             column, handed on whole
    Embedding, ReversibleEmbedding          vocabulary
    Concatenate of an input for each device joined: parts for a row, the feature partition
    convolutions and pooling, if so asked   height: rows of the picture (`spatial_plan.py`)

A column whose parts nobody can use hands its output on whole; so does a layer that is called more
than once, and one in a composite layer whose calls are not known (`composite.py`). What has a
`call` of the user's own or belongs to a class of theirs is left in place, but for the layers in it;
so is one that adds a loss for its activity, has LoRA or is quantized, or holds a layer of which
that is true.
What is asked for, in the call or by the class as which a layer was written, is done or refused.
"""

import collections
import types
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.layers.composite import Group, class_of_keras
from tfparallel.layers.einsum import units_of
from tfparallel.layers.parallel_hints import hint_of
from tfparallel.layers.spatial_plan import (
    CALLER,
    HEIGHT,
    has_activation_of_keras,
    is_in_rows,
    is_split_by_height,
)
from tfparallel.problems import PlacementError, Problems
from tfparallel.seams.functional import calls_of, calls_to, functional_of, maker_of
from tfparallel.seams.keras import layers_in

__all__ = ["KINDS", "Graph", "has_own_methods", "plan"]

_layers = keras.layers
COLUMN, GATHERED, ROW, FEATURES = "column", "column, gathered", "row", "features"
HEADS, VOCABULARY, JOINED = "heads", "vocabulary", "joined"
KINDS = (COLUMN, GATHERED, ROW, FEATURES, HEADS, VOCABULARY, JOINED, HEIGHT)

_PAIRED = {_layers.Dense, _layers.Conv2D}
_ATTENTION = {_layers.MultiHeadAttention, _layers.GroupQueryAttention}
# Before Keras 3.14 there is none.
_EMBEDDINGS = {_layers.Embedding, getattr(_layers, "ReversibleEmbedding", _layers.Embedding)}
# What is shared out: how many there are of it, and its name in an error.
_COUNTS: dict[type, tuple[Callable[[Any], int], str]] = {
    _layers.Dense: (attrgetter("units"), "units"),
    _layers.Conv2D: (attrgetter("filters"), "channels"),
    _layers.EinsumDense: (units_of, "units along an axis that is the kernel's own"),
    _layers.MultiHeadAttention: (attrgetter("num_heads"), "heads"),
    _layers.GroupQueryAttention: (attrgetter("num_key_value_heads"), "key and value heads"),
    **dict.fromkeys(_EMBEDDINGS, (attrgetter("input_dim"), "rows of vocabulary")),
}
# How what reads and returns a whole is split.
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
# What may be asked for.
_COULD_BE = {
    _layers.Dense: (COLUMN, ROW),
    _layers.Conv2D: (COLUMN, ROW, HEIGHT),
    _layers.EinsumDense: (COLUMN,),
    **{cls: (kind,) for cls, kind in _ALONE.items() if kind != GATHERED},
    **dict.fromkeys((_layers.DepthwiseConv2D, _layers.MaxPooling2D), (HEIGHT,)),
    _layers.AveragePooling2D: (HEIGHT,),
}
_METHODS = types.FunctionType | types.MethodType
_SET_BY_KERAS = {"build", "quantize"}  # On each layer.
# What an activation does to one feature must not depend on the others.
_MIX_FEATURES = {"softmax", "log_softmax", "glu", "sparsemax"}


def plan(
    group: Group,
    num_devices: int,
    asked: Mapping[str, str | None] | None = None,
    by_height: bool = False,
    shared: Collection[int] = (),
    stage_of: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Says how each layer of a group is split.

    Args:
        group: Built layers. Models and composite layers among them are groups of their own.
        num_devices: How many parts there are to be.
        asked: How single layers are split, by their names in the group's report; None leaves one in
            place. It outweighs the class as which a layer was written.
        by_height: Whether convolutions, and what is between them, are split by the picture's height
            and not by channels.
        shared: The `id` of each layer that another group calls, too: what it returns is whole.
        stage_of: The stage of each layer of a model, by name, where there are several: what passes
            from one to another is whole.

    Returns:
        One of `KINDS` by the layer's name in a report; what is left in place is not named.

    Raises:
        PlacementError: If a layer cannot be split as is asked.
    """
    asked = {layer.name: asked[group.name_of(layer)] for layer in group.layers
             if asked and group.name_of(layer) in asked}  # fmt: skip
    apart = {*map(id, group.apart), *shared}
    graph, problems = Graph(group.graph, apart, stage_of), Problems()
    names = collections.Counter(layer.name for layer in group.layers if layer.built)
    found: dict[str, str] = {}
    in_parts: set[str] = set()
    in_rows: set[str] = set()
    for layer in group.layers:
        name, sources = layer.name, graph.sources[layer.name]
        if names[name] > 1:
            continue  # Nobody could say which one is meant.
        is_once = graph.is_called_once(layer)
        # Parts that somebody else wants as a whole would be joined all the same.
        reads_parts = (
            is_once
            and len(sources) == 1
            and sources[0] in in_parts
            and len(graph.readers[sources[0]]) == 1
            and graph.are_in_one_stage(sources[0], name)
        )
        kind = _kind(layer, num_devices, reads_parts, graph)
        # What is in rows stays so, up to the next convolution.
        can_stay = not isinstance(layer, _layers.Conv2D) and in_rows.issuperset(sources)
        if (by_height or can_stay) and _is_plain(layer) and is_once:
            if is_split_by_height(layer, graph, num_devices, in_rows):
                kind = HEIGHT
            elif isinstance(layer, _layers.Conv2D):
                kind = None
        if name in asked or hint_of(layer) is not None:
            kind = None
            with problems.gathered():
                kind = _asked_kind(layer, asked, num_devices, graph)
                if kind == HEIGHT and not is_split_by_height(layer, graph, num_devices, in_rows):
                    raise PlacementError(_not_by_height(layer, asked, num_devices))
        if kind is None:
            continue
        found[name] = kind
        if kind == HEIGHT and is_in_rows(layer):
            in_rows.add(name)
        is_column = kind == COLUMN and class_of_keras(layer) in _PAIRED and not _mixes(layer)
        if is_once and (is_column or kind in (FEATURES, JOINED)):
            in_parts.add(name)
    problems.raise_all()
    used = _used(found, in_parts, graph)
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
        # Only of the model's inputs: an example's features, one part a device.
        names = list(map(maker_of, inputs))
        if is_last and all(isinstance(op, _layers.InputLayer) for op in names):
            return JOINED
    if reads_parts and _is_featurewise(layer, cls, inputs[0]):
        return FEATURES
    return None


def _asked_kind(layer, asked, num_devices, graph) -> str | None:
    kind = asked[layer.name] if layer.name in asked else hint_of(layer).kind
    if kind is None:
        return None
    cls = class_of_keras(layer)
    could = _COULD_BE.get(cls, ())
    if kind not in could:
        answer = f"It can be {' or '.join(could)}." if could else "It can only be left in place."
        raise PlacementError(
            f"Layer '{layer.name}' of class {original_class(layer).__name__} cannot be split by "
            f"{kind!r}. {answer} Received: split={{{layer.name!r}: {kind!r}}}."
        )
    # Which layers can be split by height is judged as a whole, elsewhere.
    is_simple = kind == HEIGHT or _is_simple(layer)
    is_called = kind not in (ROW, HEIGHT) or graph.is_called_once(layer)
    if not _is_plain(layer) or not is_simple or not is_called:
        raise PlacementError(
            "A layer that is split must have no activity regularizer, no LoRA, no quantization, "
            "also inside of it, no groups and the channels last; by row or height it must be "
            "called once. Received: "
            f"{_request(layer, asked)}. {_way_out(layer, asked)}"
        )
    if kind == HEIGHT:
        return kind
    if kind == ROW:
        count, what = graph.nodes[layer.name][0].input_tensors[0].shape[-1], "features"
    else:
        count, what = _count(layer), _COUNTS[cls][1]
    if count < num_devices:
        raise PlacementError(
            f"Each device needs a part. Received: {_request(layer, asked)}; layer '{layer.name}' "
            f"with {count} {what}, for {num_devices} devices. It can be split over {count} devices "
            "at most."
        )
    return kind


def _not_by_height(layer, asked, num_devices) -> str:
    return (
        "A layer that is split by height must have a picture of known height and width, the "
        f"channels last, and {num_devices} rows of output or more, one a device; no operation that "
        "is no layer may read it, and as the model's output it has no activation. Received: "
        f"{_request(layer, asked)}. {_way_out(layer, asked)}"
    )


def _request(layer, asked) -> str:
    """Who asked, in the words of an error."""
    if layer.name in asked:
        return f"split={{{layer.name!r}: {asked[layer.name]!r}}}"
    return f"'{layer.name}' written as {hint_of(layer).__name__}"


def _way_out(layer, asked) -> str:
    if layer.name in asked and hint_of(layer) is None:
        return "Leave the layer out."
    return f"Leave it in place by split={{{layer.name!r}: None}}."


def _used(found, in_parts, graph) -> dict[str, str]:
    """Takes out what stays in parts for nobody: no row-parallel layer is behind it."""
    kept: dict[str, str] = {}
    for name in reversed(found):
        # A layer that is asked to read rows may stand behind a softmax, which needs them all.
        readers = [kept.get(reader) for reader in graph.readers[name]]
        use = name in in_parts and readers in ([ROW], [FEATURES])
        use = use and graph.are_in_one_stage(name, *graph.readers[name])
        if found[name] in (FEATURES, JOINED) and not use:
            continue
        gathered = found[name] == COLUMN and not use
        kept[name] = GATHERED if gathered else found[name]
    return dict(reversed(kept.items()))


class Graph:
    """Who reads what, in one functional or Sequential model.

    Attributes:
        nodes: The calls of each layer, and of each operation that is no layer, by name.
        sources: The names of what it reads.
        layers: The names of those that are layers.
        readers: The names of what reads it; the model's caller reads its outputs.
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
        own = set(map(id, calls_of(model)))
        for operation in functional.operations:
            nodes = [node for node in calls_to(operation) if id(node) in own]
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
        """Whether all of them are; an operation that is no layer is in none of its own."""
        return len({self._stage_of.get(name) for name in names}) == 1

    def is_called_once(self, layer: keras.Layer) -> bool:
        """Whether a layer has one call, in this group or in any other that is split with it."""
        return len(self.nodes[layer.name]) == 1 and id(layer) not in self._shared


def _count(layer) -> int | None:
    """How many units, filters, heads or ids there are to share out; None for another layer."""
    counted = _COUNTS.get(class_of_keras(layer))
    return counted[0](layer) if counted else None


def _is_plain(layer) -> bool:
    # Attention hands its activity regularizer on to its projections, which may have LoRA, too.
    return layer.built and not any(
        has_own_methods(inner)
        or getattr(inner, "activity_regularizer", None) is not None
        or getattr(inner, "lora_enabled", False)
        or getattr(inner, "quantization_mode", None)
        for inner in layers_in(layer)
    )


def has_own_methods(layer: keras.Layer) -> bool:
    """Whether a method was set on the layer, which others would have to call, too."""
    own = {name for name, value in vars(layer).items() if isinstance(value, _METHODS)}
    return any(hasattr(type(layer), name) for name in own - _SET_BY_KERAS)


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
        # One slope for all features cannot be cut.
        return layer.alpha.shape[-1] == tensor.shape[-1]
    return cls in _FEATUREWISE
