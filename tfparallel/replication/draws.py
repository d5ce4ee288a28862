"""Which layers draw random numbers in training, and which of them draw otherwise on pieces."""

from collections.abc import Iterator
from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.notice import notice
from tfparallel.seams.keras import layers_in

__all__ = ["RATES", "draws", "is_rate", "note_other_draws"]

# The attributes that say how strongly Keras's random layers draw.
RATES = ("rate", "stddev", "dropout", "recurrent_dropout", "_dropout", "drop_rate")
_SHOWN = 5


def draws(layer: keras.Layer) -> bool:
    """Whether a layer itself, not one that it holds, draws random numbers in training."""
    if not any(isinstance(v, keras.random.SeedGenerator) for v in vars(layer).values()):
        return False
    rates = [getattr(layer, name) for name in RATES if is_rate(getattr(layer, name, None))]
    return not rates or any(rate > 0 for rate in rates)


def is_rate(value: Any) -> bool:
    """Whether an attribute of one of these names is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def note_other_draws(model: keras.Model) -> None:
    """Names, in a line at the terminal, the layers that draw other numbers than on one device.

    Each piece of a batch draws its own numbers, but for `Dropout` layers: see `random.py`.
    """
    found = [f"{layer.name} ({original_class(layer).__name__})" for layer in _drawing(model)]
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    notice(
        f"These layers draw other random numbers than on one device: {', '.join(found[:_SHOWN])}"
        f"{more}. The same seed gives the same run. `Dropout` layers draw those of one device.",
        once=True,
    )


def _drawing(model) -> Iterator[keras.Layer]:
    if draws(model):
        yield model
    for layer in layers_in(model, include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _drawing(layer)
        elif any(draws(part) and not _is_indexed(part) for part in layers_in(layer)):
            yield layer


def _is_indexed(layer) -> bool:
    return isinstance(layer, keras.layers.Dropout)
