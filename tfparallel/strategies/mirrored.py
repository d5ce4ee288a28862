"""One copy of the model on each local device, updated in step."""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from tfparallel import devices as device_lib
from tfparallel.strategies.program import ProgramExtended, ProgramStrategy


class _MirroredExtended(ProgramExtended, mirrored_strategy.MirroredExtended):
    """The local devices, as a program sees them."""

    def _get_cross_device_ops(self, value):
        # TensorFlow would take collectives instead wherever `merge_call` is not used.
        del value
        return self._cross_device_ops


class MirroredStrategy(ProgramStrategy, tf.distribute.MirroredStrategy):
    """Replicates the model on the local devices and trains it as one device would.

    A drop-in for `tf.distribute.MirroredStrategy`. Plain Keras code under its scope keeps the
    promise of `tfparallel.data_parallel`: the weights, losses and metrics that one device gives.
    Custom loops (`strategy.run` around a `GradientTape`) work as with TensorFlow's strategy; see
    `tfparallel.reduce_gradients` and `tfparallel.distribute_optimizer` for exact ones.

    Args:
        devices: Names of the devices, one replica each, such as `["GPU:0", "GPU:1"]`. Default:
            all GPUs, or all logical CPUs where there is no GPU.
        cross_device_ops: A `tf.distribute.CrossDeviceOps` for the collectives between replicas.
            Default: `tf.distribute.ReductionToOneDevice()`, the fastest in one process on CPUs
            and the one that runs inside `tf.while_loop`.

    Raises:
        ValueError: If a device is unknown or named twice, or there is none.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     model = build_model()
        ...     model.compile(optimizer="adam", loss="mse")
        >>> model.fit(x, y, batch_size=64)
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
    ):
        names = device_lib.choose_devices(devices=devices)
        extended = _MirroredExtended(
            self,
            devices=[f"/device:{name}" for name in names],
            cross_device_ops=cross_device_ops or tf.distribute.ReductionToOneDevice(),
        )
        tf.distribute.Strategy.__init__(self, extended)
