"""Completes the copy of a model that was built from its config.

```
   config ──► layers, shapes          Keras builds the copy from them
   model ───► weights, flags of each variable, LoRA, adapted state, attributes set later
   model ───► preprocessors and other layers without weights outside of the graph, shared
              └── compared at the end; remaining differences raise (`verify_clone.py`)
```
"""

import contextlib
import itertools
import random
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence

import keras

from tfparallel.cloning.attributes import CannotCarry, carry_attributes, read_by, same
from tfparallel.cloning.verify_clone import OF_A_VARIABLE, NotAlike, differences
from tfparallel.extend import original_class
from tfparallel.seams.functional import calls_of
from tfparallel.seams.keras import (
    layers_held_by,
    layers_in,
    metrics_held_by,
    seed_generators_of,
    untrack,
    variables_held_by,
)

__all__ = ["NotAlike", "copy_state", "without_draws"]


@contextlib.contextmanager
def without_draws() -> Iterator[None]:
    """Restores Python's random state, so layers created within do not change later seeds."""
    random_state = random.getstate()
    try:
        yield
    finally:
        random.setstate(random_state)


def copy_state(
    model: keras.Model,
    copy: keras.Model,
    scope: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> list[tuple[keras.Layer, keras.Layer]]:
    """Completes `copy`, which Keras built from the config of `model`; both are built.

    Args:
        model: The model.
        copy: Its copy, changed in place.
        scope: Returns the scope of the copy's variables.

    Returns:
        Pairs of the layers of both.

    Raises:
        NotAlike: If the copy still differs: in its layers, its variables and their flags, its
            config, or its outputs for a batch. The message lists the differences.
    """
    _share_beside_the_graph(model, copy)
    pairs = _pairs(model, copy)
    problems = _reading_others([source for source, _ in pairs])
    with scope():
        for source, target in pairs:
            try:
                _carry_layer(source, target)
            except (CannotCarry, ValueError, TypeError, AttributeError) as error:
                problems.append(f"layer '{_path(source)}': {error}")
        _refuse(model, problems)
        variables = _matched(model, pairs)
        for source, target in variables:
            target.assign(source)
            target._path = source.path  # An optimizer names its slots by it.
        _read_copies(pairs, variables)
        for source, target in pairs:
            target.trainable = source.trainable
        for source, target in variables:
            for name in OF_A_VARIABLE:
                if not same(getattr(source, name, None), getattr(target, name, None)):
                    setattr(target, name, getattr(source, name))
    _refuse(model, differences(model, copy, pairs, variables))
    return pairs


def _reading_others(layers: Sequence[keras.Layer]) -> list[str]:
    """Reports functions that read other layers of the model: a copy would read those, too."""
    names = {id(one): one.name for each in layers for one in (each, *variables_held_by(each))}
    return [
        f"layer '{_path(layer)}': `{attribute}` reads '{names[id(read)]}', which belongs to the "
        "original model"
        for layer in layers
        for attribute, value in vars(layer).items()
        if isinstance(value, types.FunctionType)
        for read in read_by(value)
        if id(read) in names and read is not layer  # Keras's own methods of a layer read that.
    ]


def _share_beside_the_graph(model, copy) -> None:
    """Shares layers without weights that the model holds but does not call.

    For example, the vocabulary of a tokenizer is in no config.
    """
    for name in {*vars(model), *vars(copy)} if hasattr(model, "operations") else ():
        value, copied = vars(model).get(name), vars(copy).get(name)
        if _is_beside_the_graph(model, value) or _is_beside_the_graph(copy, copied):
            untrack(copy, copied)
            setattr(copy, name, value)


def _is_beside_the_graph(model, value) -> bool:
    in_graph = any(value is operation for operation in getattr(model, "operations", [value]))
    return isinstance(value, keras.Layer) and not in_graph and not value.variables


def _compared(model) -> list[keras.Layer]:
    """All layers of a model except those that it shares with its copy."""
    shared = {
        id(inner)
        for layer in layers_held_by(model)
        if _is_beside_the_graph(model, layer)
        for inner in layers_in(layer)
    }
    return [layer for layer in layers_in(model) if id(layer) not in shared]


def _pairs(model, copy) -> list[tuple[keras.Layer, keras.Layer]]:
    layers, copies = _compared(model), _compared(copy)
    kinds = [[original_class(layer).__name__ for layer in each] for each in (layers, copies)]
    if kinds[0] != kinds[1]:
        _refuse(model, _shared_no_more(model, copy))
        both = itertools.zip_longest(*kinds, fillvalue="nothing")
        index, (kind, copied) = next((i, pair) for i, pair in enumerate(both) if len({*pair}) > 1)
        path = layers[index].path if index < len(layers) else "after the last"
        _refuse(model, [f"layer '{path}' is a {kind}, but its clone has {copied}"])
    return list(zip(layers, copies, strict=True))


def _shared_no_more(model, copy) -> list[str]:
    """Reports layers that several others share, which no config says: their clones have copies."""
    of_model, of_copy = _holders(model), _holders(copy)
    return [
        f"layer '{name}' is shared by {' and '.join(map(repr, holders))}, but the clone would have "
        "a separate copy in each"
        for name, holders in of_model.items()
        if len(holders) > 1 and len(of_copy.get(name, ())) < len(holders)
    ]


def _holders(model) -> dict[str, list[str]]:
    """The names of each layer's holders, by its name; for a duplicate name, the longest list."""
    holders_by_id: dict[int, tuple[str, list[str]]] = {}
    for holder in layers_in(model):
        for layer in {id(layer): layer for layer in layers_held_by(holder)}.values():
            holders_by_id.setdefault(id(layer), (layer.name, []))[1].append(holder.name)
    ordered = sorted(holders_by_id.values(), key=lambda named: len(named[1]))
    return dict(ordered)


def _carry_layer(source: keras.Layer, target: keras.Layer) -> None:
    if getattr(source, "lora_enabled", False) and not getattr(target, "lora_enabled", False):
        # For an inner layer, such as attention's projections, the outer config omits it.
        target.enable_lora(source.lora_rank, lora_alpha=source.lora_alpha)
    _carry_policy(source, target)
    if hasattr(source, "load_assets"):
        with tempfile.TemporaryDirectory() as folder:  # The vocabulary of an adapted lookup.
            source.save_assets(folder)
            target.load_assets(folder)
    carry_attributes(source, target)
    target.name = source.name  # Keras chooses a name if the config has none.
    for metric, copied in zip(metrics_held_by(source), metrics_held_by(target), strict=True):
        carry_attributes(metric, copied)


def _carry_policy(source, target) -> None:
    if same(source.dtype_policy, target.dtype_policy):
        return
    if source.dtype_policy.quantization_mode or target.dtype_policy.quantization_mode:
        raise CannotCarry(
            f"it is quantized ({source.dtype_policy.name}), but its clone is not "
            f"({target.dtype_policy.name})"
        )
    target.dtype_policy = source.dtype_policy


def _matched(model, pairs) -> list[tuple[keras.Variable, keras.Variable]]:
    """Pairs of the distinct variables of a model and its copy."""
    problems, matches = [], {}
    for source, target in pairs:
        ours, theirs = _variables_of(source), _variables_of(target)
        shapes = [[(tuple(v.shape), v.dtype) for v in variables] for variables in (ours, theirs)]
        if shapes[0] != shapes[1]:
            problems.append(
                f"layer '{_path(source)}' has the variables {_listed(ours)}, but its clone has "
                f"{_listed(theirs)}"
            )
            continue
        for variable, copied in zip(ours, theirs, strict=True):
            if matches.setdefault(id(variable), (variable, copied))[1] is not copied:
                problems.append(
                    f"layer '{_path(source)}' shares variable '{variable.path}' with another "
                    "layer, but its clone has a separate one"
                )
    _refuse(model, problems)
    return list(matches.values())


def _read_copies(pairs, variables) -> None:
    """Makes operations of the copy read its variables, where those of the model read its own.

    `keras.ops.matmul(x, layer.kernel)` has the variable itself as an argument, and no config.
    """
    copies = {id(source): target for source, target in variables}
    for source, target in pairs:
        for node, copied in zip(calls_of(source), calls_of(target), strict=False):
            arguments = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
            if copies.keys() & map(id, arguments):
                of_copy = (copied.arguments.args, copied.arguments.kwargs)
                flat = [
                    copies.get(id(argument), other)
                    for argument, other in zip(arguments, keras.tree.flatten(of_copy), strict=True)
                ]
                of_copy = keras.tree.pack_sequence_as(of_copy, flat)
                copied.arguments.args, copied.arguments.kwargs = of_copy


def _variables_of(layer) -> list[keras.Variable]:
    states = variables_held_by(layer)
    states += [generator.state for generator in seed_generators_of(layer)]
    return states + [variable for metric in metrics_held_by(layer) for variable in metric.variables]


def _path(layer) -> str:
    return layer.path or layer.name  # An unbuilt layer has no path.


def _listed(variables) -> str:
    return ", ".join(f"{v.name} {tuple(v.shape)} {v.dtype}" for v in variables) or "none"


def _refuse(model, problems: list[str]) -> None:
    if problems:
        raise NotAlike(
            f"The clone of model '{model.name}' would differ from it. A model that can be rebuilt "
            f"from its config is required. Received: {'; '.join(problems)}. Pass the function that "
            "builds the model instead."
        )
