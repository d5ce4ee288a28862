"""Which of Keras's optimizers treat each element of a weight by itself.

Their update is the same for a part of a weight as for the whole: parts lie on several devices
(`layers/optimizer.py`), or each replica updates a share (`replication/sharded_optimizer.py`).
LAMB's and Adafactor's norms and Muon's matrices are of whole weights.
"""

import keras

from tfparallel.newer_keras import ScheduleFreeAdamW

__all__ = ["NAMES", "is_elementwise"]

_optimizers = keras.optimizers
# Looked through one by one: their `update_step` is element by element.
_ELEMENTWISE = (
    _optimizers.SGD, _optimizers.Adam, _optimizers.AdamW, _optimizers.RMSprop, _optimizers.Adagrad,
    _optimizers.Adadelta, _optimizers.Adamax, _optimizers.Nadam, _optimizers.Ftrl,
    _optimizers.Lion, ScheduleFreeAdamW,
)  # fmt: skip
NAMES = ", ".join(sorted(cls.__name__ for cls in _ELEMENTWISE))


def is_elementwise(cls: type) -> bool:
    """Whether an optimizer of this class, and not of one derived from it, is known to be so."""
    return cls in _ELEMENTWISE
