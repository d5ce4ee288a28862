"""What not every version of Keras has which tfparallel runs on.

Where Keras lacks a class, one stands in its place that nothing is an instance of: whoever asks
`isinstance(optimizer, MultiOptimizer)` is told no, which is right.
"""

import keras
from packaging.version import Version

__all__ = [
    "ACTIVITY_IS_SUMMED",
    "MASKED_SCORES",
    "MultiOptimizer",
    "ScheduleFreeAdamW",
    "renormalizes",
]

# Whether an activity regularizer is a sum over the batch; since Keras 3.14 it is a mean, to which
# the pieces of a batch add up.
ACTIVITY_IS_SUMMED = Version(keras.__version__) < Version("3.14")

# What a softmax makes of masked scores: it takes a number from them, puts the least in their place,
# or gives them no weight even where all are masked.
_SOFTMAX = keras.layers.Softmax.call.__code__
_IS_REPLACED, _IS_ZERO = "where" in _SOFTMAX.co_names, 0.0 in _SOFTMAX.co_consts
MASKED_SCORES = "less" if not _IS_REPLACED else "zero" if _IS_ZERO else "least"


def _class_or_none_such(name: str) -> type:
    return getattr(keras.optimizers, name, None) or type(name, (), {"__module__": __name__})


MultiOptimizer = _class_or_none_such("MultiOptimizer")
ScheduleFreeAdamW = _class_or_none_such("ScheduleFreeAdamW")


def renormalizes(layer: keras.layers.BatchNormalization) -> bool:
    """Whether batch normalization corrects by averages that move in each call (Ioffe, 2017)."""
    return getattr(layer, "renorm", False)
