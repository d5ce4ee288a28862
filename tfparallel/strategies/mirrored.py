"""One copy of the model on each local device, updated in step."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.collectives import algorithm_selection, cross_device
from tfparallel.collectives.algorithm_selection import ChosenAllReduce
from tfparallel.seams.distribute import MirroredExtended, reduction_of, strategy_of
from tfparallel.strategies.program import ProgramExtended, ProgramStrategy

_OF_THE_HOST = tf.distribute.ReductionToOneDevice()  # As in TensorFlow, int32 is on the host.


class _MirroredExtended(ProgramExtended, MirroredExtended):
    """The local devices, from the view of a program."""

    def _get_cross_device_ops(self, value):
        # TensorFlow would use collectives instead where `merge_call` is not used.
        is_int32 = any(tensor.dtype == tf.int32 for tensor in tf.nest.flatten(_terms(value)))
        if is_int32 and reduction_of(self) is strategy_of(self).all_reduce_ops:
            return _OF_THE_HOST
        return reduction_of(self)

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        # TensorFlow refuses pairs if the host reduces some; here they are reduced separately.
        pairs, results, by_ops = list(value_destination_pairs), {}, {}
        for index, (value, _) in enumerate(pairs):
            by_ops.setdefault(self._get_cross_device_ops(value), []).append(index)
        for indices in by_ops.values():
            group = [pairs[index] for index in indices]
            reduced = super()._batch_reduce_to(reduce_op, group, options)
            results.update(zip(indices, reduced, strict=True))
        return [results[index] for index in range(len(pairs))]


def _terms(value):
    return list(value.values) if isinstance(value, tf.distribute.DistributedValues) else [value]


class MirroredStrategy(ProgramStrategy, tf.distribute.MirroredStrategy):
    """Replicates the model on the local devices; see `tfparallel.MirroredStrategy`."""

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
                "`all_reduce` and `cross_device_ops` both define how replicas are summed; pass "
                f"only one of them. Received: all_reduce={all_reduce!r}, "
                f"cross_device_ops={cross_device_ops!r}."
            )
        self.all_reduce_is_default = all_reduce is None and cross_device_ops is None
        if (
            self.all_reduce_is_default
            and algorithm_selection.default(names) != algorithm_selection.DEFAULT
        ):
            all_reduce = algorithm_selection.default(names)
        if all_reduce == "auto":
            self.all_reduce_ops = ChosenAllReduce(names, calibrate=calibrate)
        elif all_reduce is not None:
            self.all_reduce_ops = cross_device.make(all_reduce, names)
            self.sums_in_programs = all_reduce == cross_device.IN_PROGRAMS
        self.all_reduce_name = all_reduce
        cross_device_ops = cross_device_ops or self.all_reduce_ops
        extended = _MirroredExtended(
            self,
            devices=[f"/device:{name}" for name in names],
            cross_device_ops=cross_device_ops or tf.distribute.ReductionToOneDevice(),
        )
        tf.distribute.Strategy.__init__(self, extended)
