"""A warning if most of a model's weights are outside its split layers."""

import math
from collections.abc import Sequence

import keras
from absl import logging

from tfparallel.extend import original_class
from tfparallel.layers.composite import Group
from tfparallel.seams.keras import variables_held_by
from tfparallel.variables.split import SplitVariable, share_in_parts

_FEW = 0.5
_MOST_NAMES = 4


def warn_of_whole(model: keras.Model, groups: Sequence[Group]) -> None:
    """Warns if most of the weights are whole, and names the layers that hold them."""
    share = share_in_parts(model.weights)
    if share >= _FEW:
        return
    owners = {id(group.owner) for group in groups}
    sizes = {}
    for group in groups:
        for layer in group.layers:
            # The weights that a model or composite layer owns, besides those of its named layers.
            weights = variables_held_by(layer) if id(layer) in owners else layer.weights
            whole = [math.prod(v.shape) for v in weights if not isinstance(v, SplitVariable)]
            sizes[f"{group.name_of(layer)} ({original_class(layer).__name__})"] = sum(whole)
    total = sum(math.prod(v.shape) for v in model.weights)
    largest = sorted(filter(sizes.get, sizes), key=sizes.get, reverse=True)[:_MOST_NAMES]
    logging.warning(
        "%.0f%% of the weights of model '%s' are split; the rest are on the first device. The "
        "largest unsplit layers are %s. docs/split_layers.md lists the layers that can be split.",
        100 * share,
        model.name,
        ", ".join(f"{name}: {sizes[name] / total:.0%}" for name in largest),
    )
