"""What not every version of Keras has which tfparallel runs on.

Where Keras lacks a class, one stands in its place that nothing is an instance of: whoever asks
`isinstance(optimizer, MultiOptimizer)` is told no, which is right.
"""

import keras
from packaging.version import Version

__all__ = ["ACTIVITY_IS_SUMMED", "MultiOptimizer", "ScheduleFreeAdamW", "renormalizes"]

# Whether an activity regularizer is a sum over the batch; since Keras 3.14 it is a mean, to which
# the pieces of a batch add up.
ACTIVITY_IS_SUMMED = Version(keras.__version__) < Version("3.14")


def _class_or_none_such(name: str) -> type:
    return getattr(keras.optimizers, name, None) or type(name, (), {"__module__": __name__})


MultiOptimizer = _class_or_none_such("MultiOptimizer")
ScheduleFreeAdamW = _class_or_none_such("ScheduleFreeAdamW")


def renormalizes(layer: keras.layers.BatchNormalization) -> bool:
    """Whether batch normalization corrects by averages that move in each call (Ioffe, 2017)."""
    return getattr(layer, "renorm", False)
