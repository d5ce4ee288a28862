"""Gradient compression between workers: `compression=`.

| name | sent for n elements, m x k as a matrix | bytes |
| --- | --- | --- |
| `bf16`, `fp16` | each in 16 bits | 1/2 |
| `topk:F` | the F·n largest by magnitude, with their indices | 2F |
| `powersgd:R` | two factors of rank R, m x R and k x R | R(m + k)/mk |

All of them are lossy. Each worker adds the error e of its last gradient to the next gradient g
(error feedback), so that the lost part is delayed rather than dropped:

    sent = C(g + e)        e ← g + e - sent        total = Σ_w sent

The error is state of the worker: one number per element of a gradient. The weights are no longer
exactly those of one device. Small tensors are sent uncompressed: biases and, under `powersgd`,
tensors that two factors would not shrink. So are embedding gradients (only the rows that were
looked up), sums of losses and metrics, and batch-normalization moments.

References:
    Error feedback: Sai Praneeth Karimireddy et al., "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", arXiv:1901.09847, 2019.
    Top-k: Yujun Lin et al., "Deep Gradient Compression", arXiv:1712.01887, 2018, without momentum
    correction, which depends on the optimizer.
    Low rank: Thijs Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", arXiv:1905.13727, 2019.
"""

import abc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.collectives.compression_name import CompressionName
from tfparallel.collectives.packing import by_dtype
from tfparallel.seams.tensorflow import ResourceVariable

NewState = tuple[tf.Variable, tf.Tensor]  # A worker's state, and its next value.

_COMPRESSED = (tf.float32, tf.float64)
# `topk` sends tensors with fewer elements (biases, scales) whole.
_SMALL = 1024


class _State:
    """One variable for each weight, for as long as the weight is alive."""

    def __init__(self):
        self._variables: dict[int, tuple[weakref.ref, tf.Variable]] = {}

    def get(self, weight: keras.Variable) -> tf.Variable | None:
        """Returns the weight's variable; None if it has none yet."""
        owner, variable = self._variables.get(id(weight), (lambda: None, None))
        return variable if owner() is weight else None

    def get_or_create(
        self, weight: keras.Variable, device: str, initial: Callable[[], tf.Tensor]
    ) -> tf.Variable:
        """Returns the weight's variable, and creates it if needed, in any scope."""
        variable = self.get(weight)
        if variable is None:
            alive = {key: pair for key, pair in self._variables.items() if pair[0]() is not None}
            with tf.init_scope(), tf.device(device):
                variable = ResourceVariable(initial(), trainable=False)
            self._variables = alive | {id(weight): (weakref.ref(weight), variable)}
        return variable


class Compression(abc.ABC):
    """Compresses a worker's gradients before the collective that sums them."""

    def __init__(self, spec: str):
        self.spec = spec
        self._left_over = _State()

    def __str__(self) -> str:
        return self.spec

    def left_over(self, weight: keras.Variable) -> tf.Variable | None:
        """Returns the unsent error of a weight's gradient; None before the first step."""
        return self._left_over.get(weight)

    @property
    def _states(self) -> dict[str, tuple[_State, bool]]:
        """The state of each weight, by name, and whether it differs between workers."""
        return {"left over": (self._left_over, True)}

    def describe(self, workers, weights: Sequence[keras.Variable]) -> list[list]:
        """Returns `[name, shape, dtype]` of each array of `capture`."""
        return [
            [name, [workers.num_workers] * is_own + list(variable.shape), variable.dtype.name]
            for name, variable, is_own in self._variables_of(weights)
        ]

    def capture(self, workers, weights: Sequence[keras.Variable]) -> Iterator[np.ndarray]:
        """Yields the state of all workers; every worker must call it and consume all of it."""
        for _, variable, is_own in self._variables_of(weights):
            value = variable.read_value()
            if is_own:
                (value,) = workers.all_gather([value[None]], [1] * workers.num_workers)
            yield value.numpy()

    def restore(
        self,
        workers,
        weights: Sequence[keras.Variable],
        names: Sequence[str],
        arrays: Iterable[np.ndarray],
    ) -> None:
        """Restores the state of `capture`, from any number of workers.

        If the number of workers has changed, the first worker takes all of the error. State that
        belongs to another compression is dropped.
        """
        by_place = {str(i): weight for i, weight in enumerate(weights)}
        for name, array in zip(names, arrays, strict=True):
            place, _, kind = name.partition("/")
            state, is_own = self._states.get(kind, (None, False))
            if state is None or place not in by_place:
                continue
            if is_own:
                is_same = len(array) == workers.num_workers
                by_worker = array if is_same else _on_the_first(array, workers.num_workers)
                array = by_worker[workers.worker_index]
            variable = state.get_or_create(
                by_place[place], workers.device, lambda array=array: array
            )
            variable.assign(array)

    def _variables_of(self, weights):
        for i, weight in enumerate(weights):
            for kind, (state, is_own) in self._states.items():
                if (variable := state.get(weight)) is not None:
                    yield f"{i}/{kind}", variable, is_own

    def totals(
        self,
        workers,
        gradients: Sequence[tf.Tensor],
        weights: Sequence[keras.Variable | None],
    ) -> tuple[list[tf.Tensor], list[NewState]]:
        """Sums gradients over the workers; the totals are bitwise equal on all of them.

        Args:
            workers: The `ProcessGroup`.
            gradients: The gradients, of the same shapes on all workers.
            weights: The weight of each gradient; None for other tensors, which are summed
                uncompressed.

        Returns:
            The totals; and the new state of the worker, for `assign_if_finite` once the totals of
            the whole step are known.
        """
        results: list = [None] * len(gradients)
        places = [
            i for i, pair in enumerate(zip(gradients, weights, strict=True)) if self._takes(*pair)
        ]
        rest = [i for i in range(len(gradients)) if i not in places]
        unsent = [
            self._left_over.get_or_create(
                weights[i],
                workers.device,
                lambda like=gradients[i]: tf.zeros(like.shape, like.dtype),
            )
            for i in places
        ]
        corrected = [
            gradients[i] + error.read_value() for i, error in zip(places, unsent, strict=True)
        ]
        totals, sent, others = self._sums(
            workers, corrected, [weights[i] for i in places], [gradients[i] for i in rest]
        )
        parts = zip(corrected, sent, strict=True)
        new_states = list(zip(unsent, [whole - part for whole, part in parts], strict=True))
        for i, total in zip([*places, *rest], [*totals, *others], strict=True):
            results[i] = total
        return results, new_states

    def _takes(self, gradient, weight) -> bool:
        is_known = gradient.shape.is_fully_defined()
        return weight is not None and is_known and gradient.dtype in _COMPRESSED

    @abc.abstractmethod
    def _sums(self, workers, gradients, weights, rest):
        """Returns the sums, the part that this worker sent of each, and the sums of `rest`."""


class Halved(Compression):
    """`bf16` and `fp16`: 16 bits an element."""

    def __init__(self, spec: str, dtype: tf.DType):
        super().__init__(spec)
        self._dtype = dtype

    def _sums(self, workers, gradients, weights, rest):
        halves = [self._rounded(gradient, workers.num_workers) for gradient in gradients]
        sums = workers.all_reduce_halves(halves) if halves else []
        totals, sent = (
            [tf.cast(half, gradient.dtype) for half, gradient in zip(some, gradients, strict=True)]
            for some in (sums, halves)
        )
        return totals, sent, workers.all_reduce(rest)

    def _rounded(self, gradient, num_workers):
        if self._dtype == tf.float16:
            # The sum must not overflow if no term does; the clipped part goes into the error.
            largest = self._dtype.max / num_workers
            clipped = tf.clip_by_value(gradient, -largest, largest)
            gradient = tf.where(tf.math.is_finite(gradient), clipped, gradient)
        return tf.cast(gradient, self._dtype)


class TopK(Compression):
    """`topk`: the largest elements of each gradient, with their indices."""

    def __init__(self, spec: str, fraction: float):
        super().__init__(spec)
        self._fraction = fraction

    def _takes(self, gradient, weight):
        return super()._takes(gradient, weight) and gradient.shape.num_elements() >= _SMALL

    def _sums(self, workers, gradients, weights, rest):
        others = workers.all_reduce(rest)
        if not gradients:
            return [], [], others
        counts = [
            max(1, round(self._fraction * gradient.shape.num_elements())) for gradient in gradients
        ]
        largest = [_largest(*pair) for pair in zip(gradients, counts, strict=True)]
        sent = [
            _put([value], [place], gradient)
            for (value, place), gradient in zip(largest, gradients, strict=True)
        ]
        totals: list = [None] * len(gradients)
        for indices in by_dtype(gradients).values():
            vectors = [tf.concat([largest[i][n] for i in indices], 0)[None] for n in (0, 1)]
            joined = workers.all_gather(vectors, [1] * workers.num_workers)
            widths = [counts[i] for i in indices]
            by_gradient = zip(*(tf.split(each, widths, axis=1) for each in joined), strict=True)
            for i, (values, places) in zip(indices, by_gradient, strict=True):
                totals[i] = _put(tf.unstack(values), tf.unstack(places), gradients[i])
        return totals, sent, others


def _largest(gradient, count):
    flat = tf.reshape(gradient, [-1])
    _, places = tf.math.top_k(tf.abs(flat), count, sorted=False)
    values = tf.gather(flat, places)
    # A NaN might not be selected, and the other workers would never see it.
    return tf.where(_is_finite(flat), values, values * float("nan")), places


def _put(values, places, like):
    """Adds the workers' terms one after the other, so that the order of each sum is fixed."""
    total = tf.zeros([like.shape.num_elements()], like.dtype)
    for value, place in zip(values, places, strict=True):
        total = tf.tensor_scatter_nd_add(total, place[:, None], value)
    return tf.reshape(total, like.shape)


class PowerSgd(Compression):
    """`powersgd`: approximates a gradient as M ≈ P Qᵀ, by one power iteration from the last Q."""

    def __init__(self, spec: str, rank: int):
        super().__init__(spec)
        self._rank = rank
        self._factors = _State()  # The Q of each gradient, equal on all workers.

    @property
    def _states(self):
        return super()._states | {f"factor of rank {self._rank}": (self._factors, False)}

    def _takes(self, gradient, weight):
        if not super()._takes(gradient, weight) or gradient.shape.rank < 2:
            return False
        height, width = _sides(gradient)
        return self._rank * (height + width) < height * width

    def _sums(self, workers, gradients, weights, rest):
        matrices = [tf.reshape(gradient, _sides(gradient)) for gradient in gradients]
        factors = [
            self._factors.get_or_create(
                weight, workers.device, lambda matrix=matrix, i=i: self._first_factor(matrix, i)
            )
            for i, (weight, matrix) in enumerate(zip(weights, matrices, strict=True))
        ]
        left_factors = [
            matrix @ factor.read_value() for matrix, factor in zip(matrices, factors, strict=True)
        ]
        sums = workers.all_reduce([*left_factors, *rest])
        left_factors = [tf.linalg.qr(each).q for each in sums[: len(left_factors)]]
        local_factors = [
            tf.linalg.matmul(matrix, each, transpose_a=True)
            for matrix, each in zip(matrices, left_factors, strict=True)
        ]
        right_factors = workers.all_reduce(local_factors)
        assign_if_finite(list(zip(factors, right_factors, strict=True)), right_factors)
        totals, sent = [], []
        for i, gradient in enumerate(gradients):
            for results, factor in ((totals, right_factors[i]), (sent, local_factors[i])):
                product = tf.linalg.matmul(left_factors[i], factor, transpose_b=True)
                results.append(tf.reshape(product, gradient.shape))
        return totals, sent, sums[len(left_factors) :]

    def _first_factor(self, matrix, place):
        # Stateless, so equal on all workers regardless of earlier draws and models.
        shape = [matrix.shape[1], self._rank]
        return tf.random.stateless_normal(shape, [place, 0], dtype=matrix.dtype)


def _on_the_first(array, num_workers):
    others = np.zeros([num_workers - 1, *array.shape[1:]], array.dtype)
    return np.concatenate([array.sum(0)[None], others])


def _sides(gradient) -> list[int]:
    width = gradient.shape[-1]
    return [gradient.shape.num_elements() // max(width, 1), width]


def _is_finite(tensor):
    return tf.reduce_all(tf.math.is_finite(tensor))


def assign_if_finite(new_states: Sequence[NewState], totals: Sequence[tf.Tensor]) -> None:
    """Assigns new states unless a total is not finite: loss scaling skips such a step.

    All workers have the same totals. Were each to judge by its own gradients, those that sent
    finite ones would take them for sent, and the skipped step would lose them.
    """
    if not new_states:
        return
    variables, values = zip(*new_states, strict=True)
    # `tf.cond` returns existing tensors; `tf.where` would copy each of them.
    next_values = tf.cond(
        tf.reduce_all([_is_finite(total) for total in totals if total.dtype.is_floating]),
        lambda: list(values),
        lambda: [variable.read_value() for variable in variables],
    )
    for variable, value in zip(variables, next_values, strict=True):
        variable.assign(value, read_value=False)


def compression_of(spec: str | None) -> Compression | None:
    """Returns the `Compression` of a spec; see `CompressionName.parse`."""
    name = CompressionName.parse(spec)
    if name is None:
        return None
    if name.kind == "topk":
        return TopK(spec, name.number)
    if name.kind == "powersgd":
        return PowerSgd(spec, name.number)
    return Halved(spec, tf.bfloat16 if name.kind == "bf16" else tf.float16)
