"""Names and behaviours that not every supported version of Keras has.

A missing class is replaced by one without instances, so `isinstance(optimizer, MultiOptimizer)` is
False, which is right.
"""

import keras
from packaging.version import Version

# Whether an activity regularizer is a sum over the batch. Since Keras 3.14 it is a mean, which
# pieces of a batch add up to.
ACTIVITY_IS_SUMMED = Version(keras.__version__) < Version("3.14")

# How a softmax treats masked scores: it subtracts a number, replaces them by the least value, or
# gives them no weight even if all are masked.
_SOFTMAX = keras.layers.Softmax.call.__code__
_IS_REPLACED, _IS_ZERO = "where" in _SOFTMAX.co_names, 0.0 in _SOFTMAX.co_consts
MASKED_SCORES = "less" if not _IS_REPLACED else "zero" if _IS_ZERO else "least"


def _class_or_none_such(name: str) -> type:
    return getattr(keras.optimizers, name, None) or type(name, (), {"__module__": __name__})


MultiOptimizer = _class_or_none_such("MultiOptimizer")
ScheduleFreeAdamW = _class_or_none_such("ScheduleFreeAdamW")


def renormalizes(layer: keras.layers.BatchNormalization) -> bool:
    """Whether batch normalization uses renormalization, with moving averages (Ioffe, 2017)."""
    return getattr(layer, "renorm", False)
