"""The builder `distribute`: Keras's own description of a distribution, on TensorFlow.

    keras.distribution                  here
    DataParallel(devices)               data_parallel(devices)
    ModelParallel(layout_map)           tensor_parallel, or hybrid_parallel(Mesh(data, tensor))
      mesh ("batch", "model")             the mesh axes data and tensor
      kernel (None, "model")              column
      kernel ("model", None)              row
      kernel ("batch", None)              shard="parameters", if the axis "model" has one device

A layout map says which axis of each variable lies along which mesh axis. tfparallel splits layers,
so the variables of a layer must agree; those that the map leaves whole follow the others.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.extend import original_class
from tfparallel.hybrid.hybrid_parallel import hybrid_parallel
from tfparallel.layers.composite import class_of_keras, groups_in
from tfparallel.layers.einsum import axes_of
from tfparallel.layers.tensor_parallel import tensor_parallel
from tfparallel.layout.mesh import Mesh
from tfparallel.problems import PlacementError, Problems
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.seams.functional import has_graph
from tfparallel.seams.keras import layers_in, layout_map_of, variables_held_by

_layers = keras.layers
_PROJECTIONS = ("query", "key", "value", "gate")
_HEADS = {
    **{f"{name}/kernel": 1 for name in _PROJECTIONS},
    "attention_output/kernel": 0,
    **{f"{name}/bias": 0 for name in _PROJECTIONS},
}
_VOCABULARY = {"embeddings": 0, "reverse_embeddings": 1}
# How layers can be split: the axis of each variable that is divided.
_SPLITS: dict[type, dict[str, dict[str, int]]] = {
    _layers.Dense: {"column": {"kernel": 1, "bias": 0}, "row": {"kernel": 0}},
    _layers.Conv2D: {"column": {"kernel": 3, "bias": 0}, "row": {"kernel": 2}},
    _layers.MultiHeadAttention: {"heads": _HEADS},
    _layers.GroupQueryAttention: {"heads": _HEADS},
    _layers.Embedding: {"vocabulary": _VOCABULARY},
    # Keras before 3.14 has no ReversibleEmbedding.
    getattr(_layers, "ReversibleEmbedding", _layers.Embedding): {"vocabulary": _VOCABULARY},
}
_DECIDED = {"devices", "mesh", "split", "strategy"}


def distribute(
    model_or_function: keras.Model | Callable[[], keras.Model],
    distribution: keras.distribution.DataParallel | keras.distribution.ModelParallel,
    **options: Any,
) -> keras.Model:
    """Trains a Keras model as a `keras.distribution` object says, on TensorFlow.

    Use it for code that was written for Keras's distribution API, which runs on JAX. The resulting
    weights are those of one device. `DataParallel` becomes `data_parallel`. `ModelParallel` becomes
    `hybrid_parallel`; or `tensor_parallel` if only the layers are divided and you pass no options,
    and `data_parallel` if only rows are. A layer that the layout map leaves whole stays whole.

    Args:
        model_or_function: As for `data_parallel`; functional or Sequential for `ModelParallel`.
        distribution: A `keras.distribution.DataParallel` or `ModelParallel`. Its mesh has the
            devices of this process; in a job of several workers, each has as many.
        **options: Other options of the builder, such as `shard="optimizer"`.

    Returns:
        A `keras.Model`, as the builder returns it.

    Raises:
        ValueError: If the mesh has too many axes; a variable cannot be divided along the axis that
            its layout names; and as for the builder. Lists all such layers.

    Example:
        >>> devices = ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
        >>> mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
        >>> layouts = keras.distribution.LayoutMap(mesh)
        >>> layouts[".*dense.*kernel"] = ("model", None)
        >>> model = tfparallel.distribute(
        ...     build_model, keras.distribution.ModelParallel(layout_map=layouts)
        ... )
    """
    both = (keras.distribution.DataParallel, keras.distribution.ModelParallel)
    if not isinstance(distribution, both):
        raise PlacementError(
            "`distribution` must be a `keras.distribution.DataParallel` or `ModelParallel`. "
            f"Received: {distribution!r} (of type {type(distribution).__name__})."
        )
    if decided := sorted(_DECIDED & options.keys()):
        raise PlacementError(
            "The distribution decides devices, mesh and splits. Received: "
            f"{', '.join(f'{name}={options[name]!r}' for name in decided)}. Leave it out, or call "
            "`data_parallel` or `hybrid_parallel` yourself."
        )
    is_alone = options.get("allow_independent_workers", False)
    num_workers = 1 if is_alone else Cluster.from_env().num_workers
    if num_workers > 1 and not distribution.auto_shard_dataset:
        raise PlacementError(
            f"Each of the {num_workers} workers must get the whole data set, and computes its own "
            "rows. Received: auto_shard_dataset=False. Remove it, and pass the whole data set."
        )
    if isinstance(distribution, keras.distribution.DataParallel):
        devices = list(map(str, distribution.device_mesh.devices.flatten()))
        return data_parallel(model_or_function, devices=devices, **options)
    axes = _Axes(distribution, num_workers)
    if axes.num_parts > 1:
        split = functools.partial(_split_of, distribution, axes, options)
        if axes.num_replicas == 1 and not options:
            return tensor_parallel(model_or_function, axes.devices, split=split)
        mesh = Mesh(data=axes.num_replicas, tensor=axes.num_parts)
        return hybrid_parallel(model_or_function, mesh, axes.devices, split=split, **options)
    if axes.num_replicas > 1 and axes.batch in axes.named:
        options = {"shard": "parameters", **options}
    return data_parallel(model_or_function, devices=axes.devices, **options)


class _Axes:
    """The axes of a `ModelParallel`'s mesh that have several devices.

    Attributes:
        batch: The name of the axis that divides rows.
        model: The name of the axis that divides layers; None if there is none.
        num_replicas: The number of devices along the batch's axis, in all workers.
        num_parts: The number of devices along the model's axis.
        devices: The devices of a worker, the model's axis fastest.
        named: The axes that layouts name.
    """

    def __init__(self, distribution, num_workers):
        mesh, self.batch = distribution.device_mesh, distribution.batch_dim_name
        names = list(mesh.axis_names)
        sizes = dict(zip(names, mesh.shape, strict=True))
        others = [name for name in names if name != self.batch and sizes[name] > 1]
        if self.batch not in names or len(others) > 1:
            raise PlacementError(
                f"The mesh must have the axis {self.batch!r} for the batch, and may have one more "
                "axis of several devices, for the layers. Received: a mesh of "
                f"{', '.join(f'{name}={size}' for name, size in sizes.items())}."
            )
        self.model = next(iter(others), None)
        self.num_replicas = sizes[self.batch] * num_workers
        self.num_parts = sizes.get(self.model, 1)
        devices = np.moveaxis(mesh.devices, names.index(self.batch), 0)
        self.devices = [str(device) for device in devices.flatten()]
        layouts = layout_map_of(distribution).values()
        self.named = {name for layout in layouts for name in layout.axes}


def _split_of(
    distribution: keras.distribution.ModelParallel,
    axes: _Axes,
    options: Mapping[str, Any],
    model: keras.Model,
) -> dict[str, str | int | None]:
    """Returns how a model's layers are split, by name, as `tensor_parallel` takes it."""
    problems = Problems()
    layouts: dict[int, tuple] = {}
    for variable in model.variables:
        with problems.gathered():
            layouts[id(variable)] = _layout_of(variable, distribution, axes, options)
    problems.raise_all()
    waiting = {id(v): v for v in model.variables if axes.model in layouts[id(v)]}
    # A layer of several groups is split with the last of them.
    layers = {id(layer): (g.name_of(layer), layer) for g in groups_in(model) for layer in g.layers}
    split: dict[str, str | int | None] = {}
    for name, layer in layers.values():
        if has_graph(layer) or not (kinds := _kinds_of(layer)):
            continue
        variables = dict(_named(layer))
        divided = {
            key: layouts[id(variable)].index(axes.model)
            for key, variable in variables.items()
            if waiting.pop(id(variable), None) is not None
        }
        split[name] = None
        if divided:
            with problems.gathered():
                split[name] = _kind_of(layer, kinds, divided, variables, layouts, axes.model)
    with problems.gathered():
        _refuse_rest(waiting.values(), layouts)
    problems.raise_all()
    if not any(kind is not None for kind in split.values()):
        raise PlacementError(
            f"No layout divides a variable of model '{model.name}' along the axis {axes.model!r} "
            f"of {axes.num_parts} devices. Received: layouts for "
            f"{', '.join(map(repr, layout_map_of(distribution))) or 'nothing'}; variables such as "
            f"{', '.join(repr(variable.path) for variable in model.variables[:4])}. "
            "A key is a regular expression for a path; begin it with '.*' to match the end of one."
        )
    return split


def _layout_of(variable, distribution, axes, options) -> tuple[str | None, ...]:
    layout = tuple(distribution.get_variable_layout(variable).axes)
    received = f"Received: '{variable.path}' of shape {tuple(variable.shape)}: {layout}."
    if len(layout) > len(variable.shape) or layout.count(axes.model) > 1:
        raise PlacementError(
            "A layout has one entry for each axis of a variable, and names a mesh axis once. "
            f"{received}"
        )
    may_be_copied = axes.num_replicas == 1 or "shard" in options
    if axes.batch in layout and not may_be_copied:
        raise PlacementError(
            f"Weights can be divided along the axis {axes.batch!r} or along {axes.model!r}, not "
            f"along both. {received} Use a mesh in which one of the two has one device; or pass "
            "shard='optimizer', which divides the optimizer's state along "
            f"{axes.batch!r}, or shard=None, which divides nothing along it."
        )
    return layout


def _kinds_of(layer) -> dict[str | int, dict[str, int]]:
    """Returns how a layer can be split, as in `_SPLITS`; empty if it cannot."""
    cls = class_of_keras(layer)
    if cls is _layers.EinsumDense:
        return {axis: {"kernel": axis} for axis in axes_of(layer)}
    return _SPLITS.get(cls, {})


def _named(layer) -> Iterator[tuple[str, keras.Variable]]:
    """Yields the variables of a layer, each with its name in it."""
    for inner in layers_in(layer):
        prefix = "" if inner is layer else f"{inner.name}/"
        yield from ((prefix + variable.name, variable) for variable in variables_held_by(inner))


def _kind_of(layer, kinds, divided, variables, layouts, model_axis) -> str | int:
    """Returns the kind of split that divides the variables as their layouts say."""
    has_kernel = not all(key.endswith("bias") for key in divided)
    for kind, could in kinds.items():
        if has_kernel and divided.items() <= could.items():
            return kind
    possible = []
    for could in kinds.values():
        each = [
            f"{key}: {tuple(model_axis if k == axis else None for k in range(len(v.shape)))}"
            for key, v in variables.items()
            if (axis := could.get(key)) is not None
        ]
        possible.append("{" + ", ".join(each) + "}")
    received = [f"'{variables[key].path}': {layouts[id(variables[key])]}" for key in divided]
    raise PlacementError(
        f"Layer '{layer.name}' ({original_class(layer).__name__}) cannot be divided in this way. "
        f"Possible layouts are {' or '.join(possible)}; what they name as well may be left out, "
        f"except for the kernel. Received: {', '.join(received)}."
    )


def _refuse_rest(variables, layouts) -> None:
    """Refuses variables of layers that cannot be split by request."""
    received = [f"'{variable.path}': {layouts[id(variable)]}" for variable in variables]
    if received:
        raise PlacementError(
            "Only Dense, Conv2D, EinsumDense, attention and embeddings, outside of other Keras "
            f"layers, can be divided. Received: {', '.join(received)}. Leave these variables out "
            "of the layout map."
        )
