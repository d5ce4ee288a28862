"""One copy of the model on each local device, updated in step."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.collectives import choice, cross_device, replica_sums
from tfparallel.collectives.choice import ChosenAllReduce
from tfparallel.seams.tensorflow import MirroredExtended
from tfparallel.strategies.program import ProgramExtended, ProgramStrategy

_OF_THE_HOST = tf.distribute.ReductionToOneDevice()  # As TensorFlow: int32 is the host's.


class _MirroredExtended(ProgramExtended, MirroredExtended):
    """The local devices, as a program sees them."""

    def _get_cross_device_ops(self, value):
        # TensorFlow would take collectives instead wherever `merge_call` is not used.
        is_int32 = any(tensor.dtype == tf.int32 for tensor in tf.nest.flatten(_terms(value)))
        if is_int32 and self._cross_device_ops is self._container_strategy().all_reduce_ops:
            return _OF_THE_HOST
        return self._cross_device_ops

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        # TensorFlow refuses pairs of which the host reduces some; here they go apart.
        pairs, results, by_ops = list(value_destination_pairs), {}, {}
        for index, (value, _) in enumerate(pairs):
            by_ops.setdefault(self._get_cross_device_ops(value), []).append(index)
        for indices in by_ops.values():
            own = [pairs[index] for index in indices]
            found = super()._batch_reduce_to(reduce_op, own, options)
            results.update(zip(indices, found, strict=True))
        return [results[index] for index in range(len(pairs))]

    def _update(self, var, fn, args, kwargs, group):
        args = tuple(replica_sums.on_each_device(arg) for arg in args)
        return super()._update(var, fn, args, kwargs, group)


def _terms(value):
    return list(value.values) if isinstance(value, tf.distribute.DistributedValues) else [value]


class MirroredStrategy(ProgramStrategy, tf.distribute.MirroredStrategy):
    """Replicates the model on the local devices and trains it as one device would.

    A drop-in for `tf.distribute.MirroredStrategy`. Plain Keras code under its scope keeps the
    promise of `tfparallel.data_parallel`: the weights, losses and metrics that one device gives.
    Custom loops (`strategy.run` around a `GradientTape`) work as with TensorFlow's strategy; see
    `tfparallel.reduce_gradients` and `tfparallel.distribute_optimizer` for exact ones.

    Args:
        devices: Names of the devices, one replica each, such as `["GPU:0", "GPU:1"]`, or how many.
            Default: all GPUs, or all logical CPUs where there is no GPU.
        cross_device_ops: A `tf.distribute.CrossDeviceOps` for the collectives between replicas.
            Default: `tf.distribute.NcclAllReduce()` where each replica has a GPU, else
            `tf.distribute.ReductionToOneDevice()`, the fastest in one process on CPUs.
        all_reduce: Instead, the name of the algorithm that sums the replicas' gradients, one of
            `tfparallel.collectives.cross_device.NAMES`, such as `"ring"`; or `"auto"` for the
            fastest on these devices, from a profile (`tfparallel bench all_reduce
            --save_profile`) or, without one, measured at the first step, in less than 2 s.
            Default: `"nccl"` where each replica has a GPU, else each sum on the first device,
            from where the others read it.
        calibrate: Whether `"auto"` may measure. If not, and without a profile, it takes the
            default.

    Raises:
        ValueError: If a device is unknown or named twice, or there is none; if the algorithm is
            unknown or cannot run on the devices; if both it and `cross_device_ops` are given; or
            if the profile is another machine's.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     model = build_model()
        ...     model.compile(optimizer="adam", loss="mse")
        >>> model.fit(x, y, batch_size=64)
    """

    def __init__(
        self,
        devices: Sequence[str] | int | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        all_reduce: str | None = None,
        calibrate: bool = True,
    ):
        names = device_lib.choose_devices(devices=devices)
        if all_reduce is not None and cross_device_ops is not None:
            raise ValueError(
                "`all_reduce` and `cross_device_ops` both say how replicas are summed; give one of "
                f"the two. Received: all_reduce={all_reduce!r}, "
                f"cross_device_ops={cross_device_ops!r}."
            )
        self.all_reduce_is_default = all_reduce is None and cross_device_ops is None
        if self.all_reduce_is_default and choice.default(names) != choice.DEFAULT:
            all_reduce = choice.default(names)
        if all_reduce == "auto":
            self.all_reduce_ops = ChosenAllReduce(names, calibrate=calibrate)
        elif all_reduce is not None:
            self.all_reduce_ops = cross_device.make(all_reduce, names)
        self.all_reduce_name = all_reduce
        cross_device_ops = cross_device_ops or self.all_reduce_ops
        extended = _MirroredExtended(
            self,
            devices=[f"/device:{name}" for name in names],
            cross_device_ops=cross_device_ops or tf.distribute.ReductionToOneDevice(),
        )
        tf.distribute.Strategy.__init__(self, extended)
