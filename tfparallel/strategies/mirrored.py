"""One copy of the model on each local device, updated in step.

`MirroredStrategy` is `tf.distribute.MirroredStrategy` with one addition, a *program*: code that
is written, and traced, once for the global batch, as if there were one device. Inside
`with strategy.program():` TensorFlow is outside any replica, `num_replicas_in_sync` is 1 (Keras
scales its losses by it), a variable is read from its first copy and written to all, and a Keras
optimizer updates each copy on its own device. Only what is handed to `strategy.run` is spread
over the devices.

Rests on internals of TensorFlow (`MirroredExtended`): the extended object of a strategy is where
variables are made and where `merge_call` is chosen, and there is no public way to give a
`tf.distribute.MirroredStrategy` another one.
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy

from tfparallel import devices as device_lib
from tfparallel.strategies import keras_trainer, variables


class _MirroredExtended(mirrored_strategy.MirroredExtended):
    """Makes this package's variables, and lets optimizers run in a program."""

    def _use_merge_call(self):
        # Keras's optimizers reach the copies of a variable through `merge_call`, which exists in
        # a replica alone (keras#20582), or directly, where a strategy says that it needs none.
        in_program = (
            self._container_strategy().program_is_running
            and tf.distribute.in_cross_replica_context()
        )
        if not in_program:
            keras_trainer.refuse_unprepared_optimizer()
        return not in_program and super()._use_merge_call()

    def _get_cross_device_ops(self, value):
        # TensorFlow would take collectives instead wherever `merge_call` is not used.
        del value
        return self._cross_device_ops

    def _create_variable(self, next_creator, **kwargs):
        like = kwargs.pop("colocate_with", None)
        if like is not None and not hasattr(like, "_devices"):
            # The host of an input pipeline, which keeps one copy.
            return super()._create_variable(next_creator, colocate_with=like, **kwargs)
        copy_devices = self._devices if like is None else like._devices

        def create_copies(**kwargs):
            made = []
            for index, device in enumerate(copy_devices):
                with tf.device(device):
                    kwargs["initial_value"] = self._get_variable_creator_initial_value(
                        replica_id=index,
                        device=device,
                        primary_var=made[0] if made else None,
                        **kwargs,
                    )
                    if made:
                        kwargs["name"] = f"{made[0].name.split(':')[0]}/replica_{index}/"
                    made.append(next_creator(**kwargs))
            return made

        return variables.create(self._container_strategy(), create_copies, **kwargs)


class MirroredStrategy(tf.distribute.MirroredStrategy):
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
        self._program_depth = 0
        extended = _MirroredExtended(
            self,
            devices=[f"/device:{name}" for name in names],
            cross_device_ops=cross_device_ops or tf.distribute.ReductionToOneDevice(),
        )
        tf.distribute.Strategy.__init__(self, extended)

    @property
    def devices(self) -> tuple[str, ...]:
        """Full names of the devices, in the order of the replicas."""
        return tuple(self.extended.worker_devices)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas; 1 inside a program, which is one device's."""
        return 1 if self.program_is_running else super().num_replicas_in_sync

    @property
    def program_is_running(self) -> bool:
        """Whether a program is being traced or run."""
        return getattr(self, "_program_depth", 0) > 0

    @contextlib.contextmanager
    def program(self) -> Iterator[None]:
        """Within it, code acts for the global batch, as on one device, outside any replica."""
        with self.scope(), tf.device(self.devices[0]):
            self._program_depth += 1
            try:
                yield
            finally:
                self._program_depth -= 1

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on each replica; a Keras model's own step runs as one program instead."""
        model = None if self.program_is_running else keras_trainer.calling_model()
        if model is not None:
            self.extend_model(model)
            with self.program():
                return fn(*args, **(kwargs or {}))
        return super().run(fn, args, kwargs, options)

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a data set; Keras, whose steps run as programs, gets global batches."""
        model = keras_trainer.calling_model()
        if model is not None:
            self.extend_model(model)
            return dataset
        return super().experimental_distribute_dataset(dataset, options)

    def extend_model(self, model) -> None:
        """Called with each Keras model that trains under this strategy, before its steps run."""
