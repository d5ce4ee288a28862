"""Programs: steps that are written once, for the global batch, under a strategy of many replicas.

A *program* is code that is written, and traced, once for the global batch, as if there were one
device. Inside `with strategy.program():` TensorFlow is in the cross-replica context,
`num_replicas_in_sync` is 1 (Keras scales its losses by it), a variable is read from its first
copy and written to all, and a Keras optimizer updates each copy on its own device. Only functions
passed to `strategy.run` run on all devices.

Each of several workers runs the program on the same global batch, and computes its own rows in
`strategy.run`. The workers then exchange the results (`ProgramStrategy.workers`), so the program
continues with the same tensors on every worker.

Relies on internals of TensorFlow (`MirroredExtended`): the extended object of a strategy creates
variables and decides on `merge_call`, and there is no public way to replace it.
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfparallel.collectives.algorithm_selection import choice_of
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.data.partition import check_weights
from tfparallel.device_names import canonical
from tfparallel.layout.layout import Layout, replicas_in_words
from tfparallel.layout.mesh import Mesh
from tfparallel.piece import RowsOfWorker
from tfparallel.seams.datasets import copied_from_python
from tfparallel.seams.distribute import replica_index, strategy_of
from tfparallel.strategies import distributed_data, keras_trainer, variables

_OF_ANOTHER_STRATEGY = "Mixing different tf.distribute.Strategy objects"


class ProgramExtended:
    """Mixin for a `MirroredExtended`: this package's variables, and optimizers in a program."""

    def _use_merge_call(self):
        # Keras's optimizers update the copies of a variable through `merge_call`, which exists only
        # in a replica (keras#20582), or directly, if the strategy does not need it.
        in_program = (
            strategy_of(self).program_is_running and tf.distribute.in_cross_replica_context()
        )
        if not in_program:
            keras_trainer.refuse_unprepared_optimizer(strategy_of(self))
        return not in_program and super()._use_merge_call()

    def _update(self, var, fn, args, kwargs, group):
        index = replica_index()
        if index is None:
            return super()._update(var, fn, args, kwargs, group)
        return fn(variables.copies(var)[index], *args, **kwargs)  # An update at one place.

    def _create_variable(self, next_creator, **kwargs):
        strategy, model = strategy_of(self), keras_trainer.compiling_model()
        if model is not None and model._distribute_strategy is not strategy:
            strategy.check_foreign_model(model)
        elif model is not None and not strategy.has_extended(model):
            strategy.extend_model(model)
        like = kwargs.pop("colocate_with", None)
        if like is not None and not hasattr(like, "_devices"):
            # On the host of an input pipeline, which keeps one copy.
            return super()._create_variable(next_creator, colocate_with=like, **kwargs)
        copy_devices = self._devices if like is None else like._devices

        def create_copies(**kwargs):
            copies = []
            for index, device in enumerate(copy_devices):
                with tf.device(device):
                    kwargs["initial_value"] = self._get_variable_creator_initial_value(
                        replica_id=index,
                        device=device,
                        primary_var=copies[0] if copies else None,
                        **kwargs,
                    )
                    if copies:
                        kwargs["name"] = f"{copies[0].name.split(':')[0]}/replica_{index}/"
                    copies.append(next_creator(**kwargs))
            return copies

        return variables.create(strategy_of(self), create_copies, **kwargs)


class ProgramStrategy:
    """Mixin for a TensorFlow strategy whose extended object is a `ProgramExtended`."""

    workers: ProcessGroup | None = None  # The process group of the job; None for one worker.
    all_reduce_ops: tf.distribute.CrossDeviceOps | None = None  # None: on the first device.
    sums_in_programs = False  # Whether XLA programs sum the gradients on all devices.
    all_reduce_is_open = False  # Whether the all-reduce between workers is still to be chosen.
    compression: str | None = None  # How gradients are compressed between workers; None: not.
    check_rows = True  # Whether to refuse a call that mixes examples; see `data_parallel`.
    stream = 0  # The random stream of the replicas: the worker's index if it is apart.
    place: RowsOfWorker | None = None  # The place of its rows in the global batch if it is apart.
    _first_in_job: int | None = None
    _program_depth = 0
    _replica_weights: tuple[int, ...] | None = None

    @contextlib.contextmanager
    def apart(self, place: RowsOfWorker | None = None) -> Iterator[None]:
        """Makes this worker's replicas the only ones within the block.

        Traces within it are the program of a job with one worker, on a separate batch.

        Args:
            place: The place of that batch in the global batch, for which its replicas draw random
                numbers. Without it, they draw different numbers than any other worker.
        """
        workers, first, weights = self.workers, self.first_replica, self._replica_weights
        self.workers, self.place, self._first_in_job = None, place, first
        if place is None and workers is not None:
            self.stream = workers.worker_index
        self._replica_weights = weights and weights[first : first + len(self.devices)]
        try:
            yield
        finally:
            self.workers, self._replica_weights = workers, weights
            self.stream, self.place, self._first_in_job = 0, None, None

    @property
    def replica_weights(self) -> tuple[int, ...] | None:
        """Each replica's share of the rows of a batch, as integers; None for equal shares."""
        return self._replica_weights

    @replica_weights.setter
    def replica_weights(self, weights: Sequence[int] | None) -> None:
        check_weights(weights, self.num_replicas)
        self._replica_weights = None if weights is None else tuple(map(int, weights))

    @property
    def num_replicas(self) -> int:
        """N, the number of replicas of all workers, even inside a program."""
        return len(self.devices) * (self.workers.num_workers if self.workers else 1)

    @property
    def first_replica(self) -> int:
        """The index of this worker's first replica among all N."""
        return len(self.devices) * (self.workers.worker_index if self.workers else 0)

    @property
    def first_in_job(self) -> int:
        """The same, even if the worker is apart; `tf.random` draws by it."""
        return self.first_replica if self._first_in_job is None else self._first_in_job

    @property
    def devices(self) -> tuple[str, ...]:
        """The full names of this worker's devices, in the order of its replicas."""
        return tuple(self.extended.worker_devices)

    @property
    def layout(self) -> Layout:
        """A layout with a replica on each device of each worker, and the reduction."""
        names = self._all_devices()
        return Layout(Mesh(data=len(names)), names, reduction=self._reduction())

    def __str__(self):
        worker = ""
        if self.workers is not None:
            worker = f"; this is worker {self.workers.worker_index}"
        return f"tfparallel.{type(self).__name__}: {replicas_in_words(self.layout)}{worker}"

    def __repr__(self):
        return f"<{self}>"

    def _all_devices(self) -> list[str]:
        """The devices of all workers."""
        return [canonical(name) for name in self.devices]

    def _reduction(self) -> str | None:
        if self.num_replicas == 1:
            return None
        if self.sums_in_programs:
            return "all-reduce by XLA, inside the program of each replica"
        if self.all_reduce_ops is None and self.workers is None:
            return f"summed on {canonical(self.devices[0])}"
        choice = choice_of(self)
        if choice is None or self.all_reduce_is_open:
            return f"all-reduce, chosen {self._how_chosen()} when training begins"
        compressed = f", compressed by {self.compression}" if self.compression else ""
        return f"all-reduce by {choice.algorithm} ({choice.what_runs}){compressed}"

    def _how_chosen(self) -> str:
        """How "auto" will choose."""
        return self.all_reduce_ops.how

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas; 1 inside a program, which is written for one device."""
        if self.program_is_running:
            return 1
        number = super().num_replicas_in_sync
        if number > 1:
            keras_trainer.note_divided_loss()
        return number

    @property
    def program_is_running(self) -> bool:
        """Whether a program is being traced or run."""
        return self._program_depth > 0

    def scope(self):
        """A context that creates variables on all devices, as under TensorFlow's strategy."""
        model = None if self.program_is_running else keras_trainer.calling_model()
        if model is not None and model.compiled:
            # `train_on_batch` builds an optimizer from outside before it runs a step.
            self.extend_model(model)
        return super().scope()

    def scope_of_variables(self):
        """Like `scope`, for variables of a model that already belongs to this strategy."""
        return super().scope()

    @contextlib.contextmanager
    def program(self) -> Iterator[None]:
        """Runs code for the global batch, as on one device, in the cross-replica context."""
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
                return fn(*distributed_data.joined(args), **(kwargs or {}))
        try:
            return super().run(fn, args, kwargs, options)
        except RuntimeError as error:
            # TensorFlow's error if an optimizer of no strategy creates slots in a replica.
            said = str(error).rpartition(_OF_ANOTHER_STRATEGY)[1:]
            if not said[0]:
                raise
            raise ValueError(
                f"{keras_trainer.MADE_OUTSIDE} Received: {''.join(said)}. "
                f"{keras_trainer.MAKE_WITHIN}"
            ) from error

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a data set; Keras runs its steps as programs and gets global batches."""
        model = keras_trainer.calling_model()
        if model is not None:
            self.extend_model(model)
            return self.data_of_steps(dataset)
        distributed = super().experimental_distribute_dataset(copied_from_python(dataset), options)
        return distributed_data.made_of(distributed, dataset)

    def data_of_steps(self, dataset):
        """The data set that the steps of a Keras model iterate over."""
        return copied_from_python(dataset)

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """Distributes a data set of batches for one replica each; `fit` accepts it, too."""
        return distributed_data.made_by_function(
            lambda function: super(ProgramStrategy, self).distribute_datasets_from_function(
                function, options
            ),
            dataset_fn,
            len(self.devices),
        )

    def has_extended(self, model) -> bool:
        """Whether `extend_model` has extended this model itself."""
        return False

    def extend_model(self, model) -> None:
        """Called with each Keras model that is compiled or trained under this strategy."""

    def check_foreign_model(self, model) -> None:
        """Called with each Keras model that is compiled here but was created outside the scope."""
