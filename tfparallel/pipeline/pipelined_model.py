"""The Keras model of `pipeline_parallel`: its stages work on several micro-batches at once."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfparallel.data.batch_size import KERAS_BATCH_SIZE
from tfparallel.draws.replica_seeds import drawing_by_row, global_seed_generator
from tfparallel.extend import attach
from tfparallel.judge.check_rows import check_rows
from tfparallel.layout.schedule import Schedule
from tfparallel.pipeline.accumulate import AccumulateBatches
from tfparallel.pipeline.allowed_writes import writable
from tfparallel.pipeline.micro_batch_loss import COMPARES, check_decomposes
from tfparallel.pipeline.pass_options import PassOptions
from tfparallel.pipeline.pipeline_step import Step
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.pipeline.stages import cut_stages
from tfparallel.pipeline.traced_once import MustTraceEach
from tfparallel.placement.placed_model import PlacedModel
from tfparallel.problems import PlacementError
from tfparallel.replication.sync.policy import EveryStep, HasPolicy
from tfparallel.seams.compiled import compiled_loss
from tfparallel.seams.functional import as_outputs
from tfparallel.step.one_step import PassResult
from tfparallel.step.row_counts import why_unaligned
from tfparallel.step.where_rows_meet import WhereRowsMeet, said_in
from tfparallel.variables.mesh_replica import replicas_of


class PipelinedModel(HasPolicy, WhereRowsMeet, PlacedModel):
    """Extends a functional or Sequential model of placed layers; training uses micro-batches.

    Attributes:
        batch_normalization: None, or "deferred".
        check_rows: Whether to raise an error if the model mixes examples.
    """

    _metrics_may_be_own = False  # Each worker reads the whole batch.
    _shards_parameters = False  # Whether each replica keeps only its share of the large weights.
    _traces_each = False  # Whether to trace each micro-batch.
    _may_begin_anew = False  # Whether the caller can restart a step that must trace each.

    @property
    def schedule(self) -> Schedule:
        """The instructions of each device, in order."""
        return self._layout.make_schedule()

    def _prepare_compiled(self):
        super()._prepare_compiled()
        self.trace_each(False)
        if self.schedule.name != "gpipe":
            check_decomposes(self, self.schedule.name)

    def _begin(self, call):
        if call.kind == "fit":
            self._check_batch_size(call.arguments.get("x"), call.arguments.get("batch_size"))
            call.enter(_as_placement_error())
        super()._begin(call)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        super()._maybe_symbolic_build(iterator, data_batch)
        global_seed_generator()  # A layer may draw from it, and must not create it in the step.

    def trace_each(self, is_needed: bool = True) -> None:
        """Traces each micro-batch, or only the first."""
        attach(self, _traces_each=is_needed)

    def tracing_once(self, first: Callable, again: Callable | None = None):
        """Traces a step with a single trace for all micro-batches if possible.

        Inside a user's own function each is traced, since no one could trace the step again.

        Args:
            first: Traces the step.
            again: Traces it again if each micro-batch must be traced. Default: `first`.
        """
        attach(self, _may_begin_anew=True)
        try:
            return first()
        except MustTraceEach:
            self.trace_each()
            return (again or first)()
        finally:
            attach(self, _may_begin_anew=False)

    def make_train_function(self, force=False):
        """Builds the step of `fit`; rebuilds it if each micro-batch must be traced."""
        previous = self.train_function
        function = super().make_train_function(force)
        if function is previous:
            return function

        @functools.wraps(function)
        def retried(iterator):
            # `train_on_batch` passes a generator, which can be read only once.
            batches = None if isinstance(iterator, tf.data.Iterator) else [*iterator]

            def fresh_iterator():
                return iterator if batches is None else iter(batches)

            return self.tracing_once(
                lambda: function(fresh_iterator()),
                lambda: self.make_train_function(force=True)(fresh_iterator()),
            )

        self.train_function = retried
        return retried

    @tf.autograph.experimental.do_not_convert
    def _take_step(self, kind, of_keras, data):
        step = functools.partial(super()._take_step, kind, of_keras)
        return self._policy.step(data, step) if kind == "fit" else step(data)

    def _make_policy(self, sync) -> EveryStep:
        return AccumulateBatches(self, sync) if sync.accumulates else EveryStep(self, sync)

    def _partial_gradients(self):
        return None  # A step sums all terms.

    def _passes(self, x, y, sample_weight) -> PassResult:
        if self.check_rows and self._layout.mesh.data * self._layout.num_micro_batches > 1:
            call = drawing_by_row(self.__call__)
            check_rows(self, call, (x,), {"training": True}, tells=self._is_chief)
        return self.passes(x, y, sample_weight).run(x, y, sample_weight)

    def passes(self, x, y, sample_weight, *, timed: bool = False) -> Step:
        """Returns the step that runs the passes."""
        if compiled_loss(self) is not None and not compiled_loss(self).built:
            self._build_loss(x, y, sample_weight)
        other = why_unaligned((x, y, sample_weight))
        if other is not None and self.schedule.name != "gpipe":
            raise PlacementError(
                f"schedule={self.schedule.name!r} computes the loss of each micro-batch. Inputs, "
                f"targets and weights must have a row for each example. Received: {other}. "
                "Use schedule='gpipe', or give each example a row."
            )
        way = self._way((x, y, sample_weight), "fit")
        options = PassOptions(
            self,
            cut_stages(self, self._layout.stage_of, self._layout.num_stages),
            self.schedule,
            self._devices_of_stages,
            # An eager operation runs at once and holds its inputs anyway.
            recompute="never" if tf.executing_eagerly() else self._layout.recompute,
            metrics=way.metrics if way.rows_stay else None,
            traces_each=self._traces_each or not self._may_begin_anew,
            has_parts=self._layout.mesh.parts > 1,
            timed=timed,
            writable=writable(self, self._layout.recompute),
            parts_of=self._parts_of_output,
        )
        others = Others(self._layout.mesh.data, self._workers)
        stay = self._accumulates and not self._shards_parameters
        return Step(options, replicas_of(self._layout), others, gradients_stay=stay)

    def _parts_of_output(self, tensor: tf.Tensor) -> list[tf.Tensor] | None:
        """Returns the positions of an output on each device of its stage; None if it is whole."""
        return None

    @property
    def _devices_of_stages(self) -> list[str]:
        """The first device of each pipeline coordinate, in the first replica."""
        mesh = self._layout.mesh
        return self.devices[: mesh.pipeline * mesh.parts : mesh.parts]

    def _build_loss(self, x, y, sample_weight):
        """Builds the loss for its targets, as Keras does before its first step."""
        try:
            self._symbolic_build(data_batch=(x, y, sample_weight))
        except Exception:
            # The model rejects dense tensors, or calls outside of training; or a metric reads
            # values, which only an eager step has.
            outputs = as_outputs(self, self.outputs)
            with tf.init_scope():
                compiled_loss(self).build(y, outputs)

    def _check_batch_size(self, x, batch_size):
        if isinstance(x, tf.data.Dataset):
            specs = [s for s in tf.nest.flatten(x.element_spec) if hasattr(s, "shape")]
            batch_size = next((spec.shape[0] for spec in specs if spec.shape.rank), None)
        elif batch_size is None and not hasattr(x, "__next__") and hasattr(x, "shape"):
            batch_size = KERAS_BATCH_SIZE
        per_replica, replicas = self.schedule.num_micro_batches, self._layout.mesh.data
        number = per_replica * replicas
        if batch_size is not None and batch_size < number:
            pieces = f"{replicas} replicas x {per_replica}" if replicas > 1 else f"{per_replica}"
            raise PlacementError(
                "A batch must have an example for each micro-batch (the last of an epoch may have "
                f"fewer). Received: batches of {batch_size} for {pieces} micro-batches. Use "
                f"batch_size={number} or more, or fewer micro-batches."
            )


@contextlib.contextmanager
def _as_placement_error() -> Iterator[None]:
    """Raises the assertion of a loss comparison in a graph as a `PlacementError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        message = said_in(error, COMPARES)
        if message is None:
            raise
        raise PlacementError(message) from None
