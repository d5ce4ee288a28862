"""Which rows of a batch a replica computes, and which of them count."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.piece import Piece, current, of_any_number, working_on

ROWS = np.arange(12, dtype="float32").reshape(6, 2)


def of_static_size(*piece):
    """Its rows are known when a step is traced."""
    return Piece(*piece)


def of_dynamic_size(replica, num_replicas, *numbers):
    """Its rows are known only when a step runs."""
    return Piece(replica, num_replicas, *map(tf.constant, numbers))


def sparse(rows):
    return tf.sparse.from_dense(rows)


def ragged(rows):
    """Rows 0, 1, 2, … of 1, 2, 1, 2, … elements."""
    return tf.RaggedTensor.from_tensor(rows, lengths=[1 + k % 2 for k in range(len(rows))])


def dense_of(tensor):
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy().tolist()


@pytest.mark.parametrize("make", [of_static_size, of_dynamic_size])
@pytest.mark.parametrize("kind", [tf.constant, sparse, ragged])
def test_a_replica_computes_its_own_rows(make, kind):
    local_rows = make(1, 3, 2, 3, 6).rows_used(kind(ROWS))
    expected = [[4], [6, 7], [8]] if kind is ragged else ROWS[2:5].tolist()
    assert dense_of(local_rows) == expected


@pytest.mark.parametrize("make", [of_static_size, of_dynamic_size])
@pytest.mark.parametrize("kind", [tf.constant, sparse, ragged])
def test_an_idle_replica_computes_the_last_row(make, kind):
    local_rows = make(3, 4, 6, 0, 6).rows_used(kind(ROWS))
    assert dense_of(local_rows) == ROWS[5:].tolist()


@pytest.mark.parametrize("make", [of_static_size, of_dynamic_size])
@pytest.mark.parametrize("kind", [tf.constant, sparse, ragged])
def test_rows_are_counted_from_the_first_of_the_inputs(make, kind):
    """Row 10 of a global batch of 40 is row 2 of inputs that hold rows 8 to 13 of it."""
    local_rows = make(5, 20, 10, 1, 40)._replace(inputs=(8, 14)).rows_used(kind(ROWS))
    assert dense_of(local_rows) == ([[4]] if kind is ragged else ROWS[2:3].tolist())
    # An idle one takes the last row of its inputs, not of the global batch.
    local_rows = make(5, 20, 14, 0, 40)._replace(inputs=(8, 14)).rows_used(kind(ROWS))
    assert dense_of(local_rows) == ROWS[5:].tolist()


@pytest.mark.parametrize("make", [of_static_size, of_dynamic_size])
def test_a_single_row_stands_for_inputs_without_rows(make):
    local_rows = make(1, 2, 0, 0, 0)._replace(inputs=(0, 1)).rows_used(tf.constant(ROWS[:1]))
    assert dense_of(local_rows) == ROWS[:1].tolist()


def test_a_mask_goes_with_its_rows():
    tensor = tf.constant(ROWS)
    tensor._keras_mask = tf.constant(ROWS > 5)
    local_rows = Piece(1, 2, 2, 2, 6).rows_used(tensor)
    assert local_rows._keras_mask.numpy().tolist() == [[False, False], [True, True]]
    assert not hasattr(Piece(1, 2, 2, 2, 6).rows_used(tf.constant(ROWS)), "_keras_mask")


@pytest.mark.parametrize("make", [of_static_size, of_dynamic_size])
def test_the_dummy_row_counts_for_nothing(make):
    idle, busy = make(3, 4, 6, 0, 6), make(0, 4, 0, 2, 6)
    assert idle.may_be_idle and busy.may_be_idle == (make is of_dynamic_size)
    outputs, term = tf.constant([[5.0]]), tf.constant([5.0, np.nan])
    assert idle.without_dummy_row(outputs).shape == (0, 1)
    assert idle.rows(tf.constant(ROWS)).shape == (0, 2)
    assert idle.weight("float64").numpy() == 0
    # What a dummy row gives may be no number.
    assert idle.if_it_has_rows(term).numpy().tolist() == [0, 0]
    assert idle.if_it_has_rows(tf.constant(7)).numpy() == 0
    assert busy.without_dummy_row(tf.constant(ROWS[:2])).shape == (2, 2)
    assert busy.rows(tf.constant(ROWS)).numpy().tolist() == ROWS[:2].tolist()
    assert busy.if_it_has_rows(tf.constant(7)).numpy() == 7


@pytest.mark.parametrize("make", [of_static_size, of_dynamic_size])
def test_an_example_may_have_several_rows(make):
    """Each of four examples has three rows."""
    rows, idle = tf.range(12), make(3, 4, 4, 0, 4)
    for per_example in (3, tf.constant(3)):
        assert make(1, 2, 2, 2, 4).rows(rows, per_example).numpy().tolist() == [*range(6, 12)]
        assert make(1, 2, 2, 2, 4).without_dummy_row(rows[:6], per_example).shape == 6
        assert idle.without_dummy_row(rows[:3], per_example).shape == 0
    assert make(0, 1, 0, 4, 4).rows(rows, None) is rows
    assert make(1, 2, 2, 2, 4).without_dummy_row(rows[:6]).shape == 6  # Of any number.
    assert idle.without_dummy_row(rows[:3]).shape == 0


@pytest.mark.parametrize("make", [of_static_size, of_dynamic_size])
def test_weights_are_shares_of_the_global_batch(make):
    pieces = [make(0, 3, 0, 1, 4), make(1, 3, 1, 3, 4), make(2, 3, 4, 0, 4)]
    weights = [piece.weight("float64") for piece in pieces]
    assert [weight.dtype for weight in weights] == [tf.float64] * 3
    assert [float(weight) for weight in weights] == [0.25, 0.75, 0]


def test_a_trace_does_not_know_the_number_of_rows():
    seen = []

    @tf.function
    def step(tensor):
        rows = Piece(1, 2, 2, 3, 6).rows_used(tensor)
        seen.append(rows.shape.as_list())
        return rows

    local_rows = step(tf.constant(ROWS))
    assert seen == [[None, 2]]
    assert dense_of(local_rows) == ROWS[2:5].tolist()
    assert of_any_number(None) is None


def test_pieces_are_nested_and_of_one_thread():
    outer, inner = Piece(0, 2, 0, 2, 4), Piece(1, 4, 1, 1, 4)
    seen_elsewhere = []
    assert current() is None
    with working_on(outer):
        with pytest.raises(KeyError), working_on(inner):
            assert current() is inner
            raise KeyError("a failure")
        assert current() is outer
        thread = threading.Thread(target=lambda: seen_elsewhere.append(current()))
        thread.start()
        thread.join()
    assert current() is None
    assert seen_elsewhere == [None]
