"""The builder `tensor_parallel`: the layers of a plain Keras model split over several devices."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.cloning.compiled import compile_alike
from tfparallel.cloning.copy_state import copy_state
from tfparallel.cloning.layers import copy_layers, is_its_graph, like, rebuilt
from tfparallel.cloning.storageless import NeedsStorage, StoragelessModel
from tfparallel.extend import extend, original_class
from tfparallel.layers import featurewise, sequence_plan, spatial_plan, split_plan
from tfparallel.layers.attention import ParallelMultiHeadAttention
from tfparallel.layers.column_and_row import (
    ChannelParallelConv2D,
    ChannelReducingConv2D,
    ColumnParallel,
    ColumnParallelDense,
    RowParallelDense,
)
from tfparallel.layers.composite import Group, groups_in, is_composite
from tfparallel.layers.coverage import warn_of_whole
from tfparallel.layers.dropout import PartwiseDropout
from tfparallel.layers.einsum import ParallelEinsum
from tfparallel.layers.embedding import ReversibleVocabParallelEmbedding, VocabParallelEmbedding
from tfparallel.layers.layer import PartwiseLayer, SplitLayer, WholeLayer, sizes_of
from tfparallel.layers.parallel_hints import hint_of, note
from tfparallel.layers.split_model import CompositeLayer, NestedLayer, SplitModel
from tfparallel.layout.layout import Layout
from tfparallel.layout.mesh import Mesh
from tfparallel.placement.model_parallel import check_model, model_of, refuse_scope, seen_model
from tfparallel.problems import PlacementError, Problems, usable_devices
from tfparallel.seams.functional import has_graph
from tfparallel.seams.keras import layers_in

# By the layer's name, or a function that returns this for a model, which may lack storage.
Split = Mapping[str, str | int | None] | Callable[[keras.Model], Mapping[str, str | int | None]]


@dataclasses.dataclass(frozen=True)
class SplitRequest:
    """How to split layers, where it differs from what the graph suggests.

    Attributes:
        split: How to split single layers, by name.
        by_height: Whether convolutions are split by the height of the picture.
        whole: The `id` of each layer that stays whole.
        by_positions: Whether sequences are divided, and no weights.
    """

    split: Split = dataclasses.field(default_factory=dict)
    by_height: bool = False
    whole: Collection[int] = ()
    by_positions: bool = False


def tensor_parallel(
    model_or_function: keras.Model | Callable[[], keras.Model],
    devices: Sequence[str] | int,
    *,
    split: Split | None = None,
    convolutions: str = "channels",
) -> keras.Model:
    """Splits the layers of a functional or Sequential model over several devices.

    Use it when single layers are too large or too slow for one device: the devices work at the same
    time, each on its part of every split layer. Weights, gradients, slots and updates of a part are
    on the part's device. The resulting weights are those of one device.

    `docs/split_layers.md` says which layers are split; the rest of the model is on the first
    device. A layer written as one of `tfparallel.layers` is split as its class says; if that is not
    possible, an error is raised.

    Args:
        model_or_function: A built functional or Sequential model, whose weights are copied and
            which stays as it is, or a function that returns one. A functional model of your own
            class that calls `super().__init__(inputs, outputs)` is accepted, with or without
            `get_config`; one that only defines `call` is not. Nested models are accepted; if an
            inner one lacks `get_config`, pass the function. A model that a function builds is
            never held whole: each layer is initialized, with the values that it has on one device,
            and split before the next one.
        devices: Names of the devices, such as `["GPU:0", "GPU:1"]`, or their number; two or more.
        split: How to split single layers, by name, where it differs from what the model's graph
            suggests: "column" or "row" for `Dense` and `Conv2D`, "heads" for attention,
            "vocabulary" for `Embedding`, "height" for `Conv2D`, `DepthwiseConv2D` and pooling, an
            axis of the kernel, such as 0, for `EinsumDense`, None to leave a layer in place. It
            overrides the class as which a layer was written (see `tfparallel.layers`). Or a
            function that returns this for the model.
        convolutions: "channels": split convolutions and their weights by channels. "height": split
            convolutions, and the layers between them, by the height of the picture; each device
            holds some rows of each activation, reads the whole kernels, and exchanges the rows at
            the border. For large pictures and small kernels.

    Returns:
        A `keras.Model`; `fit`, `evaluate`, `predict` and callbacks work as always, and `save`
        writes plain Keras, with whole weights. `print(model.layout)` shows where each layer is,
        and `split` how each layer is split.

    Raises:
        ValueError: If the model is not functional or Sequential, is compiled for a step of its own
            or under a strategy, nothing in it can be split, a layer cannot be split as requested,
            or a device is unknown.

    Example:
        >>> model = tfparallel.tensor_parallel(build_model, devices=["CPU:0", "CPU:1"])
        >>> model.compile("adam", "mse")
        >>> model.fit(x, y)
    """
    refuse_scope("`tensor_parallel`")
    problems = Problems()
    names = usable_devices(devices, problems)
    with problems.gathered():
        if len(names) < 2:
            raise PlacementError(
                f"A layer must be split over at least two devices. Received: devices={names}."
            )
    with problems.gathered():
        if convolutions not in ("channels", "height"):
            raise PlacementError(
                "`convolutions` must be 'channels' or 'height'. Received: "
                f"convolutions={convolutions!r}."
            )
    request = SplitRequest(split or {}, convolutions == "height")
    if problems and split:  # The model has not been seen; otherwise its layers are checked below.
        with problems.gathered():
            parts_planned(seen_model(model_or_function), len(names), request)
    problems.raise_all()
    if isinstance(model_or_function, keras.Model):
        return _copy_of(model_or_function, names, request)
    try:
        built = StoragelessModel(lambda: model_of(model_or_function))
    except NeedsStorage:
        return _copy_of(model_of(model_or_function), names, request)
    check_model(built.model)
    if not all(built.waits_for(variable) for variable in built.model.variables):
        # A layer from elsewhere has its variables already.
        built.initialize_rest()
        return _copy_of(built.model, names, request)
    built.initialize_drawn(lambda _: names[0])
    model = _split(
        built.model,
        names,
        request,
        lambda layer: built.initialize(layer.variables, names[0]),
    )
    built.initialize_rest()
    return model


def _copy_of(model: keras.Model, devices, request) -> keras.Model:
    check_model(model)
    with tf.device(devices[0]):
        copy = copy_layers(model, like) if is_its_graph(model) else rebuilt(model)
        pairs = copy_state(model, copy)
    for source, target in pairs:
        note(target, hint_of(source))
    _split(copy, devices, request, lambda layer: None)
    compile_alike(model, copy)
    return copy


def _split(model, devices, request, initialize) -> keras.Model:
    """Splits a model's layers in place, one by one."""
    splits = split_in_place(model, lambda _: devices, len(devices), request, initialize)
    if not splits:
        raise PlacementError(_nothing_to_split(model, len(devices)))
    layout = Layout(Mesh(tensor=len(devices)), devices, splits=splits)
    return extend(model, SplitModel, _layout=layout)


def split_in_place(
    model: keras.Model,
    devices_of: Callable[[keras.Layer], Sequence[str]],
    num_parts: int,
    request: SplitRequest,
    initialize: Callable[[keras.Layer], None],
    stage_of: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Splits the layers of a model, including those of nested models and composite layers.

    Args:
        model: The model.
        devices_of: Returns the devices of a layer.
        num_parts: The number of devices of a layer.
        request: How to split layers.
        initialize: Initializes a layer's weights, unless they have values.
        stage_of: As for `split_plan.plan`.

    Returns:
        How each split layer is split, by name.
    """
    plans = parts_planned(model, num_parts, request, stage_of)
    if not splits_of(plans):
        return {}
    for group, kinds in plans:
        _split_layers(group, devices_of, kinds, initialize)
        if group.owner is not model:
            initialize(group.owner)
            mixin = NestedLayer if has_graph(group.owner) else CompositeLayer
            extend(group.owner, mixin, _first_devices=devices_of(group.owner))
    if request.by_positions:
        sequence_plan.warn_of_whole(plans)
    elif split_plan.HEIGHT not in splits_of(plans).values():  # Splitting by height divides none.
        warn_of_whole(model, [group for group, _ in plans])
    return splits_of(plans)


def parts_planned(
    model: keras.Model,
    num_devices: int,
    request: SplitRequest,
    stage_of: Mapping[str, int] | None = None,
) -> list[tuple[Group, dict[str, str]]]:
    """Plans how to split the layers of a model, including nested ones, by their names.

    A layer of several groups is split with the outermost, the last of them.

    Raises:
        PlacementError: If a layer cannot be split as requested.
    """
    groups, problems = groups_in(model), Problems()
    requested = dict(request.split(model) if callable(request.split) else request.split)
    names = {id(layer): group.name_of(layer) for group in groups for layer in group.layers}
    with problems.gathered():
        _check_names(names.values(), requested)
    with problems.gathered():
        _refuse_hidden(model, names)
    counts = collections.Counter(id(layer) for group in groups for layer in group.layers)
    inner = {
        id(each)
        for group in groups
        for layer in group.layers
        if not has_graph(layer) and not is_composite(layer)
        for each in layers_in(layer, include_self=False)
    }
    shared = {key for key, number in counts.items() if number > 1}
    plans = []
    for group in groups:
        # A layer inside a Keras layer, such as a projection of attention, is split with that layer.
        in_place = [each for each in group.layers if id(each) in inner.union(request.whole)]
        whole = dict.fromkeys(map(group.name_of, in_place))
        with problems.gathered():
            if request.by_positions:
                plan = sequence_plan.plan(group, num_devices, whole | requested, shared)
            else:
                how = (num_devices, whole | requested, request.by_height, shared)
                plan = split_plan.plan(group, *how, {} if group.prefix else stage_of)
            members = {names[id(layer)] for layer in group.layers}
            plans.append((group, {name: kind for name, kind in plan.items() if name in members}))
    problems.raise_all()
    return plans


def splits_of(plans: Iterable[tuple[Group, Mapping[str, str]]]) -> dict[str, str]:
    """Returns how each split layer is split, by name."""
    return {name: kind for _, kinds in plans for name, kind in kinds.items()}


def _check_names(names, requested) -> None:
    unknown = [name for name in requested if name not in names]
    if unknown:
        raise PlacementError(
            f"`split` must name layers of the model. Received: no such layer: {', '.join(unknown)}."
            f" The layers are {', '.join(sorted(names))}."
        )


def _split_layers(group, devices_of, kinds, initialize) -> None:
    graph = split_plan.Graph(group.graph)
    sizes: dict[str, list[int]] = {}
    for layer in group.layers:
        if has_graph(layer) or is_composite(layer) or isinstance(layer, SplitLayer):
            continue  # Its own group splits it, or another group has split it.
        kind, devices = kinds.get(group.name_of(layer)), devices_of(layer)
        initialize(layer)
        cls, attributes = _extension(layer, kind)
        extend(layer, cls, _first_devices=devices, **attributes)
        if not issubclass(cls, SplitLayer):
            continue
        source = next(map(sizes.get, graph.sources[layer.name]), None)
        # Keras would refuse a tensor in parts.
        object.__setattr__(layer, "_allow_non_tensor_positional_args", True)
        nodes = graph.nodes[layer.name]
        layer.split(**_options(layer, kind, source, nodes))
        if kind == split_plan.COLUMN:
            sizes[layer.name] = sizes_of(getattr(layer, layer._count), devices)
        elif kind == split_plan.FEATURES:
            factor = getattr(layer, "depth_multiplier", 1)
            sizes[layer.name] = [size * factor for size in source]
        elif kind == split_plan.JOINED:
            sizes[layer.name] = [tensor.shape[-1] for tensor in nodes[0].input_tensors]


def _extension(layer, kind) -> tuple[type, dict]:
    """Returns the class that extends a layer, and its attributes."""
    if kind is None:
        return WholeLayer, {}
    if kind in sequence_plan.KINDS:
        return sequence_plan.extension_of(layer)
    return _class_of(layer, kind), {}


def _class_of(layer, kind) -> type:
    if kind == split_plan.HEIGHT:
        return spatial_plan.class_of(layer)
    if kind == split_plan.FEATURES:
        if isinstance(layer, keras.layers.Dropout):
            return PartwiseDropout
        if layer.variables:
            return featurewise.FeaturewiseWeights
        return PartwiseLayer
    if isinstance(layer, keras.layers.EinsumDense):
        return ParallelEinsum
    if kind == split_plan.VOCABULARY and hasattr(layer, "tie_weights"):
        return ReversibleVocabParallelEmbedding
    if isinstance(layer, keras.layers.Conv2D):
        return ChannelReducingConv2D if kind == split_plan.ROW else ChannelParallelConv2D
    return {
        split_plan.COLUMN: ColumnParallelDense,
        split_plan.GATHERED: ColumnParallelDense,
        split_plan.ROW: RowParallelDense,
        split_plan.HEADS: ParallelMultiHeadAttention,
        split_plan.VOCABULARY: VocabParallelEmbedding,
        split_plan.JOINED: featurewise.FeaturewiseJoin,
    }[kind]


def _options(layer, kind, source, nodes) -> dict:
    if kind == split_plan.HEIGHT:
        return {"shape": nodes[0].input_tensors[0].shape, "height": nodes[0].outputs[0].shape[1]}
    if isinstance(layer, ColumnParallel) and kind == split_plan.GATHERED:
        return {"gather": True}
    if kind in (split_plan.ROW, split_plan.FEATURES, split_plan.JOINED):
        return {"sizes": source}
    if kind.startswith(split_plan.AXIS):
        return {"axis": int(kind.removeprefix(split_plan.AXIS))}
    return {}


def _nothing_to_split(model, num_devices) -> str:
    layers = [
        f"{group.name_of(layer)} ({original_class(layer).__name__})"
        for group in groups_in(model)
        for layer in group.layers
    ]
    return (
        f"Nothing in model '{model.name}' can be split over {num_devices} devices. It needs at "
        f"least one Keras layer without activity regularizer that is a Dense or Conv2D with "
        f"{num_devices} units or filters, an attention with {num_devices} heads, or an Embedding "
        f"of {num_devices} ids. Received: {', '.join(layers)}. Use fewer devices, or "
        "`tfparallel.data_parallel`."
    )


def _refuse_hidden(model, seen) -> None:
    """Refuses hinted layers that no graph shows: their readers are unknown."""
    hidden = [
        f"'{layer.name}' written as {written.__name__}"
        for layer in layers_in(model)
        if (written := hint_of(layer)) is not None and id(layer) not in seen
    ]
    if hidden:
        raise PlacementError(
            "A split layer must belong to a functional or Sequential model, to a model nested in "
            "it, or to a composite layer. Received, inside other Keras layers: "
            f"{', '.join(hidden)}. Use plain Keras layers there."
        )
