"""The fuzzer draws programs that Keras trains, tells a wrong result and makes it smaller."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.forked import run_python

# By their whole names: the processes of a job look for the same ones.
from tests.fuzz import catalogue, known, shrink, workers
from tests.fuzz.generator import draw_program, drawn, filled
from tests.fuzz.judge import (
    CRASH,
    EXACT,
    FORMS,
    REFUSED,
    SEQUENCE,
    SHARED_OPTIMIZER,
    SHARED_PARAMETERS,
    SILENT,
    Discarded,
    OneDevice,
    Outcome,
    fits,
    form_of,
    judge,
    sharing_small_weights,
)
from tests.fuzz.program import Block, Head, Input, Program, load, source
from tests.fuzz.report import report, summary
from tests.fuzz.run import Session
from tests.parity.case import Builder, Plain
from tfparallel.replication import sharding
from tfparallel.variables.sharded import ShardedVariable

DENSE = Head((Block("layers.Dense(3)"),), "real", (3,), "'mse'")
SMALLEST = Program(inputs=(Input("real", (5,)),), blocks=(), heads=(DENSE,))
DEVICES = ["CPU:0", "CPU:1"]


def test_a_seed_draws_the_same_program_and_json_keeps_it():
    programs = [drawn(f"test/{index}")[0] for index in range(50)]
    assert programs == [drawn(f"test/{index}")[0] for index in range(50)]
    assert len(set(programs)) > 45
    assert [Program.from_json(program.to_json()) for program in programs] == programs
    for program in programs:
        compile(source(program), "program", "exec")


def test_one_program_in_four_keeps_its_sequences():
    programs = [drawn(f"test/{index}")[0] for index in range(200)]
    assert sum(program.heads[0].steps > 0 for program in programs) > 50
    assert any("TiedEmbedding" in source(program) for program in programs)
    assert {program.step for program in programs} == {"", *catalogue.STEPS}
    for program in programs:
        assert fits(SEQUENCE, program) == any(
            value.holds == "ids" or len(value.shape) == 2 for value in program.inputs
        )


def test_the_simplest_choices_make_the_simplest_program():
    assert draw_program(lambda count: 0) == SMALLEST


@pytest.mark.parametrize("entry", catalogue.LAYERS, ids=lambda entry: entry.make)
def test_a_layer_puts_out_the_shape_that_the_catalogue_says(entry, in_float64):
    shapes = {1: (5,), 2: (4, 3), 3: (4, 4, 2)}
    for rank in entry.ranks:
        for call in entry.call:
            fields = {"same": str(shapes[rank][-1]), "first": str(shapes[rank][0])}
            make = filled(random.Random(1).randrange, entry.make, fields)
            after = entry.shape(shapes[rank], fields)
            if after != shapes[rank] and call != entry.call[0]:
                continue
            program = Program(
                inputs=(Input("real", shapes[rank]),),
                blocks=(Block(make, call),),
                heads=(Head((), "real", after, "'mse'"),),
            )
            model = load(program)["build_model"]()
            assert model.output_shape[1:] == after


@pytest.mark.parametrize("entry", catalogue.INPUTS, ids=lambda entry: f"{entry[0]}-{entry[2]}")
def test_an_input_makes_the_shape_that_the_catalogue_says(entry, in_float64):
    holds, shape, makes, after = entry
    # Keras 3.10 takes no model whose outputs are its inputs.
    blocks = tuple(Block(make) for make in makes) or (Block("layers.Identity()"),)
    head = Head((), "real", after, "'mse'")
    model = load(Program((Input(holds, shape, blocks),), (), (head,)))["build_model"]()
    assert model.output_shape[1:] == after


WORDS = Input("ids", (6,), (Block("WordsAndPositions()"),))
LABELS = Head((Block("layers.Dense(4)"),), "real", (6, 4), "'mse'", steps=6)
SENTENCES = Program((WORDS,), (Block("Transformer(True)"),), (LABELS,))


def test_small_weights_are_shared_out_too(in_float64):
    with sharing_small_weights():
        model = form_of(SHARED_PARAMETERS, SMALLEST).make(load(SMALLEST)["build_model"])
    assert all(isinstance(weight, ShardedVariable) for weight in model.weights)
    assert sharding._FEWEST == 4096


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "replicas", "start"),
    [
        (SEQUENCE, 3, "compiled"),
        (SHARED_OPTIMIZER, 4, "built"),
        (SHARED_PARAMETERS, 2, "function"),
    ],
)
def test_a_program_of_sequences_is_exact(form, replicas, start):
    """`interleaved` would be refused where a mesh has one stage."""
    program = dataclasses.replace(SENTENCES, schedule="interleaved", replicas=replicas, start=start)
    then = ("reload", "resume", "save")
    program = dataclasses.replace(program, then=then, optimizer="optimizers.Adam(0.01)")
    assert judge(form, OneDevice.train(program)).verdict == EXACT


class Faulty(Builder):
    """A form that does something to the model that it makes."""

    def __init__(self, fault):
        super().__init__(DEVICES)
        self.fault = fault

    def make(self, build, compile=None):
        model = Plain().make(build, compile)
        self.fault(model)
        return model


def other_rate(model):
    model.optimizer.learning_rate.assign(model.optimizer.learning_rate * 1.000001)


def another_unit(model):
    kernel = model.trainable_variables[0]
    kernel.assign(kernel * (1.0 + 2e-16))


@pytest.mark.slow
def test_rounding_is_exact_and_a_rate_that_is_a_millionth_larger_is_not():
    one_device = OneDevice.train(SMALLEST)
    assert judge(Faulty(lambda model: None), one_device) == Outcome(Builder.name, EXACT)
    assert judge(Faulty(another_unit), one_device).verdict == EXACT
    seen = judge(Faulty(other_rate), one_device)
    assert seen.verdict == SILENT and seen.is_finding and 1e-9 < seen.relative < 1e-5


@pytest.mark.slow
def test_a_maximum_of_equal_windows_is_rounding():
    """Which of two equal tokens has the gradient: Adam squares them one by one."""
    convolution = Block("layers.Conv1D(3, 2, padding='causal', dilation_rate=2)")
    maximum = Block("layers.MaxPooling1D(2, padding='same', strides=1)")
    program = Program(
        inputs=(Input("ids", (6,), (Block("layers.Embedding(9, 4)"),)),),
        blocks=(convolution, maximum),
        heads=(Head((Block("layers.Dense(3)"),), "real", (6, 3), "'mape'"),),
        optimizer="optimizers.Adam(0.01)",
        num_examples=17,
        batch_size=3,
        replicas=4,
    )
    assert judge("data_parallel", OneDevice.train(program)).verdict == EXACT


def raising(error):
    def fault(model):
        raise error

    return fault


@pytest.mark.slow
def test_only_an_error_of_ours_that_says_what_it_received_is_a_refusal():
    one_device = OneDevice.train(SMALLEST)
    for error in (KeyError("x"), ValueError("No. Received: x"), TypeError("No. Received: x")):
        assert judge(Faulty(raising(error)), one_device).verdict == CRASH
    lamb = dataclasses.replace(SMALLEST, optimizer="optimizers.Lamb(0.1)")
    seen = judge("tensor_parallel", OneDevice.train(lamb))
    assert seen.verdict == REFUSED and "each element independently" in seen.detail


def test_what_one_device_does_not_train_is_discarded():
    with pytest.raises(Discarded, match="Could not interpret"):
        OneDevice.train(dataclasses.replace(SMALLEST, optimizer="'no such optimizer'"))


def test_an_optimizer_that_a_file_holds_may_have_a_variable_without_a_name():
    changes = {"optimizer": "optimizers.Nadam(0.01)", "blocks": (Block("layers.Dense(4)"),)}
    program = dataclasses.replace(SMALLEST, then=("resume",), **changes)
    assert judge("model_parallel", OneDevice.train(program)).verdict == EXACT


@pytest.mark.slow
def test_a_finding_shrinks_to_the_layer_that_shows_it(monkeypatch):
    """Without training: whatever has a RunningSum is wrong."""
    trained = []

    def judge_by_source(form, program):
        trained.append(program)
        return Outcome(form, SILENT if "RunningSum()" in source(program) else EXACT)

    monkeypatch.setattr(shrink, "judge", judge_by_source)
    monkeypatch.setattr(shrink.OneDevice, "train", lambda program: program)
    for index in range(2000):
        program, choices = drawn(f"shrink/{index}")
        if len(program.blocks) > 2 and "RunningSum()" in source(program):
            break
    wrong = Outcome("data_parallel", SILENT)
    smallest, outcome = shrink.shrink(choices, wrong)
    assert smallest.blocks == (Block("RunningSum()"),)
    assert smallest.optimizer == SMALLEST.optimizer and smallest.heads[0].loss == "'mse'"
    assert outcome == wrong and len(trained) < 1000  # 50 to 300, by the version of hypothesis.
    assert "class RunningSum" in report(smallest, outcome)


def test_a_new_family_is_found_once_and_a_known_one_is_counted(capsys, monkeypatch):
    sums = known.Family("a running sum", r"RunningSum", ("data_parallel",))
    monkeypatch.setattr(known, "KNOWN", [sums])

    def with_blocks(*makes):
        return dataclasses.replace(SMALLEST, blocks=tuple(Block(make) for make in makes))

    session = Session("test")
    wrong = Outcome("data_parallel", SILENT, "weight:dense/kernel: 1.0e+00", 1.0)
    session.count(with_blocks("layers.ReLU()"), wrong)
    session.count(with_blocks("layers.ReLU()", "layers.PReLU()"), wrong)
    session.count(with_blocks("layers.ReLU()"), dataclasses.replace(wrong, form=workers.NAME))
    assert [finding.count for finding in session.findings] == [3]
    session.count(with_blocks("layers.PReLU()"), wrong)
    session.count(with_blocks("layers.ReLU()"), dataclasses.replace(wrong, form="model_parallel"))
    for number in (3, 4):
        session.count(SMALLEST, Outcome("data_parallel", CRASH, f"KeyError: 'dense_{number}'"))
    assert [finding.count for finding in session.findings] == [3, 1, 1, 2]
    session.count(with_blocks("RunningSum()"), wrong)
    session.count(with_blocks("RunningSum()"), Outcome("data_parallel", REFUSED, "No."))
    session.count(SMALLEST, Outcome("data_parallel", EXACT))
    assert len(session.findings) == 4 and session.num_known.total() == 1
    assert "New: 5 silent differences, 2 crashes" in summary(session)
    assert capsys.readouterr().out.count("build_model()") >= 4


@pytest.mark.slow
def test_a_report_runs_by_itself_and_shows_the_difference(tmp_path):
    file = tmp_path / "finding.py"
    program = dataclasses.replace(SMALLEST, start="compiled")
    file.write_text(report(program, Outcome("data_parallel", SILENT)))
    result = run_python([file], timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    differences = [float(line.split()[-1]) for line in result.stdout.splitlines()[2:]]
    assert len(differences) == 2 and max(differences) < 1e-12


def test_every_form_is_reported():
    for form in (*FORMS, *map(workers.name_of, workers.SHARED)):
        for start, replicas in (("function", 2), ("built", 3), ("compiled", 4)):
            program = dataclasses.replace(SMALLEST, start=start, replicas=replicas)
            text = report(program, Outcome(form, SILENT))
            compile(text, "report", "exec")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fixed_seeds_in_every_form():
    """Two programs of a seed that take little time; the others are for `make fuzz`."""
    session, batch, index = Session("make test"), [], 113
    while len(batch) < 2:
        one_device = session.run(index)
        batch += [one_device] if one_device else []
        index += 1
    session.run_workers(batch)
    assert not session.findings, summary(session)
    assert {form for form, _ in session.pairs} == {*FORMS, workers.NAME}
    assert sum(n for (_, verdict), n in session.pairs.items() if verdict == EXACT) >= 5
