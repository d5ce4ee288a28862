"""What all devices add or stack is an all-reduce in their programs, and comes to the same."""

import numpy as np
import pytest
import tensorflow as tf

from tests.step.uncompiled import sums_run_on_cpus
from tfparallel.seams.tensorflow import traced_graph
from tfparallel.tracing.graphs import of_programs
from tfparallel.xla import exchanges
from tfparallel.xla.clusters import plan_of
from tfparallel.xla.compiled_step import in_programs
from tfparallel.xla.exchanges import exchange_inside

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]


def on_each(function, *by_device):
    results = []
    for device, *arguments in zip(DEVICES, *by_device, strict=True):
        with tf.device(device):
            results.append(function(*arguments))
    return results


def added(terms, devices=DEVICES):
    return [result for d, result in zip(DEVICES, _of(tf.add_n, terms), strict=True) if d in devices]


def _of(combine, terms):
    return on_each(lambda: combine([tf.identity(term) for term in terms]))


def two_depths(x):
    """Sums and stacks; and sums of what follows from them."""
    rows = on_each(lambda k: x * (k + 1.0), [0, 1, 2])
    numbers = on_each(lambda k: x[0] + k, [4, 5, 6])
    sums, stacks = added(rows), _of(tf.stack, numbers)
    again = on_each(lambda a, b: a * b[1], sums, stacks)
    return [*sums, *stacks, *added(again)]


X = tf.constant([1.0, 2.0])
SUM, STACK = [6.0, 12.0], [5.0, 6.0, 7.0]
EXPECTED = [*[SUM] * 3, *[STACK] * 3, *[[3 * 6 * a for a in SUM]] * 3]


def graph_of(function, spec):
    with tf.Graph().as_default():
        return traced_graph("step", of_programs(function), (tf.compat.v1.placeholder(*spec),))


FLOATS = (tf.float32, [2])


def test_sums_of_one_depth_share_an_all_reduce():
    graph = graph_of(two_depths, FLOATS)
    all_reduces = exchange_inside(graph, DEVICES)
    # Two sums and a place for the number of each; then two sums, and one number of those before.
    sizes = [
        [graph.get_operation_by_name(name).inputs[0].shape.num_elements() for name in names]
        for names in all_reduces
    ]
    assert sizes == [[2 + 3] * 3, [2 + 1] * 3]
    devices = [graph.get_operation_by_name(name).device[-5:] for name in all_reduces[0]]
    assert devices == DEVICES


def test_the_results_are_the_same(monkeypatch):
    programs = sums_run_on_cpus(monkeypatch)

    @tf.function(autograph=False)
    def step(x):
        return in_programs(two_depths, DEVICES, x, exchanges_inside=True)

    for result, expected in zip(step(X), EXPECTED, strict=True):
        np.testing.assert_array_equal(result, expected)
    assert sorted(device[-5:] for device, _ in programs.traced) == DEVICES


def sums_of_rows(x):
    return added(on_each(lambda k: x * k, [1.0, 2.0, 3.0]))


def sums_on_one(x):
    return added(on_each(lambda k: x * k, [1.0, 2.0, 3.0]), DEVICES[:1])


def sums_on_one_before_all(x):
    terms = on_each(lambda k: x * k, [1.0, 2.0, 3.0])
    return [*added(terms, DEVICES[:1]), *added(on_each(lambda t: t + 1.0, terms))]


def sums_on_one_of_a_later_type(x):
    """The first device alone reads the last, of the type that comes last at the same depth."""
    wide = on_each(lambda k: tf.cast(x * k, tf.float64), [1.0, 2.0, 3.0])
    return [*added(on_each(lambda k: x + k, [1.0, 2.0, 3.0])), *added(wide, DEVICES[:1])]


def stacks_on_another_axis(x):
    rows = on_each(lambda k: x * k, [1.0, 2.0, 3.0])
    return _of(lambda terms: tf.stack(terms, 1), rows)


def sums_behind_what_is_waited_for(x):
    """Two updates of a step: the second's terms are made behind the first's sums."""
    first = added(on_each(lambda k: x * k, [1.0, 2.0, 3.0]))
    behind = on_each(lambda total: tf.identity(total).op, first)

    def second(k, op):
        with tf.control_dependencies([op]):
            return x + k

    return [*first, *added(on_each(second, [1.0, 2.0, 3.0], behind))]


def sums_of_two(x):
    with tf.device(DEVICES[0]):
        first = x + 1.0
    with tf.device(DEVICES[1]):
        second = x + 2.0
    return _of(tf.add_n, [first, second])


def sums_of_one_devices(x):
    with tf.device(DEVICES[0]):
        terms = [x, x + 1.0, x + 2.0]
    return added(terms)


def sums_that_are_waited_for(x):
    sums = added(on_each(lambda k: x * k, [1.0, 2.0, 3.0]))
    with tf.control_dependencies(sums[:1]):
        return [*sums, tf.identity(x)]


WHOLE = (tf.int32, [2])
OF_ANY_NUMBER = (tf.float32, [None])


@pytest.mark.parametrize(
    ("function", "spec", "number"),
    [
        (sums_of_rows, FLOATS, 1),
        (sums_of_rows, OF_ANY_NUMBER, 0),
        (lambda x: added(on_each(lambda k: x * k, [1, 2, 3])), WHOLE, 0),
        (sums_on_one, FLOATS, 0),
        (sums_on_one_before_all, FLOATS, 1),
        (sums_on_one_of_a_later_type, FLOATS, 1),
        (stacks_on_another_axis, FLOATS, 0),
        (sums_behind_what_is_waited_for, FLOATS, 2),
        (sums_of_two, FLOATS, 0),
        (sums_of_one_devices, FLOATS, 0),
        (sums_that_are_waited_for, FLOATS, 0),
    ],
)
def test_how_many_exchanges_are_seen(function, spec, number):
    assert len(exchange_inside(graph_of(function, spec), DEVICES)) == number


def test_a_sum_of_sums_reads_no_other_device():
    graph = graph_of(lambda x: added(sums_of_rows(x)), FLOATS)
    all_reduces = exchange_inside(graph, DEVICES)
    assert len(all_reduces) == 2
    programs = plan_of(graph, DEVICES, {}, all_reduces=all_reduces)
    assert {getattr(unit, "level", 0) for unit in programs} == {0}


def test_all_parts_of_an_all_reduce_are_of_one_level():
    """Or each of two programs would wait for the other."""

    def late_on_one(x):
        terms = on_each(lambda k: tf.matmul(x, x) * k, [1.0, 2.0, 3.0])
        with tf.device(DEVICES[2]):
            terms[2] += tf.matmul(terms[0], terms[0])
        return added(terms)

    graph = graph_of(late_on_one, (tf.float32, [2, 2]))
    all_reduces = exchange_inside(graph, DEVICES)
    units = [
        unit
        for unit in plan_of(graph, DEVICES, {}, all_reduces=all_reduces)
        if any(op.name in all_reduces[0] for op in getattr(unit, "operations", ()))
    ]
    assert [(unit.device, unit.level) for unit in sorted(units)] == [(0, 1), (1, 1), (2, 1)]


def test_nan_stays_in_its_place_of_a_stack(monkeypatch):
    sums_run_on_cpus(monkeypatch)

    def stacks(x):
        return _of(tf.stack, on_each(lambda k: tf.math.log(x * k), [1.0, -1.0, 2.0]))

    @tf.function(autograph=False)
    def step(x):
        return in_programs(stacks, DEVICES, x, exchanges_inside=True)

    for result in step(X):
        assert np.isnan(result.numpy()).all(axis=1).tolist() == [False, True, False]


def test_an_all_reduce_has_one_key_whatever_was_traced_before():
    """Story: a trace that failed between two devices, and all later ones waited for ever."""
    graph = graph_of(two_depths, FLOATS)
    exchanges._keys.get_instance_key(exchanges._keys.get_group_key(DEVICES), DEVICES[0])
    for names in exchange_inside(graph, DEVICES):
        ops = [graph.get_operation_by_name(name) for name in names]
        assert len({op.inputs[2].op.get_attr("value").int_val[0] for op in ops}) == 1
