"""The drop-in strategies: plain Keras code in their scope trains as on one device."""

from tfparallel.replication import data_parallel_model as models
from tfparallel.replication import refusals, sample_partition
from tfparallel.replication.extend_members import extend_parts
from tfparallel.strategies import keras_trainer, mirrored, multi_worker


class _ExtendsModels:
    """Extends a Keras model in place when it is compiled or first predicts."""

    def check_foreign_model(self, model) -> None:
        """Refuses to compile a model for training if it was built outside the scope.

        Raises:
            ValueError: If its weights are not this strategy's.
        """
        if model.optimizer is not None:
            refusals.check_updated(model.trainable_variables, self, model)

    def has_extended(self, model) -> bool:
        """Whether the model itself, not a model around it, is data parallel here."""
        return isinstance(model, models.DataParallelModel) and model._strategy is self

    def extend_model(self, model) -> None:
        """Makes a model that Keras trains under this strategy data parallel.

        Raises:
            ValueError: If the model was built outside the strategy's scope.
        """
        if self.num_replicas > 1:
            refusals.check_variables(model, self)
        if self.has_extended(model):
            refusals.check_compile(model, self)
            extend_parts(model)
        else:  # New, or a part of a data parallel model that is used alone for the first time.
            models.extend_model(
                model,
                self,
                synchronize_batch_norm=getattr(model, "_synchronize_batch_norm", True),
                check_rows=getattr(model, "_check_rows", None),
            )

    def data_of_steps(self, dataset):
        """As in the base class, with the batches of a sample partition marked."""
        return super().data_of_steps(sample_partition.marked(dataset))


class MirroredStrategy(_ExtendsModels, mirrored.MirroredStrategy):
    """Replicates the model on the local devices and trains it as one device would.

    A drop-in for `tf.distribute.MirroredStrategy`. Plain Keras code in its scope keeps the promise
    of `tfparallel.data_parallel`: the same weights, losses and metrics as on one device. Custom
    loops (`strategy.run` around a `GradientTape`) work as with TensorFlow's strategy; to make them
    exact, see `tfparallel.reduce_gradients` and `tfparallel.distribute_optimizer`.

    Args:
        devices: Names of the devices, one replica each, such as `["GPU:0", "GPU:1"]`, or their
            number. Default: all GPUs, or all logical CPUs where there is no GPU.
        cross_device_ops: A `tf.distribute.CrossDeviceOps` for the collectives between replicas.
            Default: `tf.distribute.NcclAllReduce()` where each replica has a GPU, else
            `tf.distribute.ReductionToOneDevice()`, the fastest in one process on CPUs.
        all_reduce: Instead of `cross_device_ops`, the name of the algorithm that sums the
            replicas' gradients, one of `tfparallel.collectives.cross_device.NAMES`, such as
            `"ring"`; or `"auto"` for the fastest on these devices, from a profile (`tfparallel
            bench all_reduce --save_profile`) or, without one, measured at the first step, in less
            than 2 s. Or `"xla"`, experimental: sums inside the programs of `jit_compile=True`, on
            whole GPUs. Default: `"nccl"` where each replica has a GPU, else each sum is computed
            on the first device, where the others read it.
        calibrate: Whether `"auto"` may measure. If not, and there is no profile, it uses the
            default.

    Raises:
        ValueError: If a device is unknown or named twice, or there is none; if the algorithm is
            unknown or cannot run on the devices; if both it and `cross_device_ops` are given; or
            if the profile is from another machine.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     model = build_model()
        ...     model.compile(optimizer="adam", loss="mse")
        >>> model.fit(x, y, batch_size=64)
    """


class MultiWorkerMirroredStrategy(_ExtendsModels, multi_worker.MultiWorkerMirroredStrategy):
    """Replicates the model on all devices of all workers and trains it as one device would.

    A drop-in for `tf.distribute.MultiWorkerMirroredStrategy`. Plain Keras code in its scope keeps
    the promise of `tfparallel.data_parallel`: the same weights, losses and metrics as on one
    device. Every worker gets the same data, in global batches, and computes its own rows;
    `predict` returns all predictions on every worker.

    Create it before anything else starts TensorFlow's runtime.

    Args:
        cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`. Default: what
            `tfparallel.Cluster.from_env()` finds (TF_CONFIG, Slurm, MPI, Kubernetes, torchrun).
        communication_options: A `tf.distribute.experimental.CommunicationOptions`; its
            `timeout_seconds` is how long each collective waits for the others (default: forever; a
            dead worker is detected without it, a hanging one by `stall_timeout`).
        devices: Names of this worker's devices, one replica each, the same number on every worker.
            Default: all GPUs, or all logical CPUs where there is no GPU.
        start_timeout: How many seconds to wait for the other workers.
        stall_timeout: How many seconds a step of `fit`, `evaluate` or `predict`, or the pause
            between two, may last before the worker exits (`callbacks/stall.py`).
        all_reduce: What carries tensors between the workers: "ring_tuned" or "ring", TensorFlow's
            own over gRPC; "nccl", for GPUs; "mpi", or one of its algorithms, through host memory
            (needs `tfparallel[mpi]`). `tfparallel.collectives.transport` lists them all. The
            default, None, is NCCL between GPUs; on one host "mpi", if all workers have it; else
            "ring_tuned". "auto" is the fastest for this model, from a profile or measured when
            `fit` begins, as in a `tfparallel.MirroredStrategy`. The environment variable
            TFPARALLEL_ALL_REDUCE, which `tfparallel launch --transport=mpi` sets, overrides the
            default and "auto".
        bucket_bytes: How many bytes of gradients to sum at once, while the rest is still being
            computed. The default, None, sums all of them together (`docs/mpi.md` says when buckets
            pay).
        compression: How to compress gradients between the workers, which is not exact: "bf16",
            "fp16", "topk:FRACTION" or "powersgd:RANK" (see `docs/synchronization.md`). Custom
            loops that call `reduce_gradients`, and the gradients of embeddings, are not
            compressed.
        calibrate: Whether "auto" may measure.
        facts: What all workers must agree on besides the cluster and the versions, as a value
            that JSON can hold: a seed, a batch size.

    Raises:
        ValueError: If the environment does not describe a cluster, a device is unknown,
            `all_reduce` is unknown or cannot run here, `compression` is none of these, or the
            profile is from another machine.
        RuntimeError: If TensorFlow's runtime has already started, a worker is missing at the
            deadline, a port is taken, or the workers disagree.

    Example:
        >>> strategy = tfparallel.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     model = build_model()
        ...     model.compile(optimizer="adam", loss="mse")
        >>> model.fit(x, y, batch_size=64)
    """

    def extend_model(self, model) -> None:
        """Makes a model that Keras trains under this strategy data parallel, when it is compiled.

        Raises:
            ValueError: If it was compiled outside the scope, and `fit` does not know the chief.
        """
        is_late = model.compiled and not self.has_extended(model)
        if self.workers is not None and is_late and keras_trainer.compiling_model() is not model:
            raise ValueError(
                f"Model '{model.name}' was compiled outside the scope of the strategy that trains "
                "it, so every worker would print and write what only the chief should. It must be "
                "compiled within the scope. Received: a model whose losses and metrics belong to "
                "no strategy. Write `with strategy.scope(): model.compile(...)`."
            )
        super().extend_model(model)
