"""What may be asked for with --inject, and what is said of anything else."""

import pytest

from tfparallel.diagnostics.faults import Fault, parse_fault


@pytest.mark.parametrize(
    "text, fault",
    [
        ("kill:worker=1,step=20", Fault("kill", 1, step=20)),
        ("hang:step=5,worker=0", Fault("hang", 0, step=5)),
        ("exit:worker=1,step=3,code=5", Fault("exit", 1, step=3, code=5)),
        ("slow:worker=1,ms=50", Fault("slow", 1, ms=50)),
        ("corrupt_checkpoint:worker=0,step=9", Fault("corrupt_checkpoint", 0, step=9)),
    ],
)
def test_the_grammar(text, fault):
    assert parse_fault(text) == fault and parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    "text, problems",
    [
        ("", ["the kind must be one of kill, hang, exit, preempt, slow, corrupt_checkpoint, not"]),
        ("explode:worker=1", ["not 'explode'"]),
        ("kill", ["kill needs worker and step"]),
        ("kill:worker=1,step=x", ["step must be a whole number, 0 or more, not 'x'"]),
        ("kill:worker=-1,step=٣", ["worker must be", "step must be", "not '-1'"]),
        ("kill:worker=1,step=2,ms=3", ["kill takes no 'ms'"]),
        ("slow:worker=1,worker=2,ms=1", ["worker is given twice"]),
        ("exit:worker=1,step=1,code=0", ["code must be a whole number, from 1 to 255, not '0'"]),
        ("slow:step=1,ms=", ["slow takes no 'step'", "ms must be", "slow needs worker"]),
    ],
)
def test_all_that_is_wrong_is_told_with_the_grammar(text, problems):
    with pytest.raises(ValueError) as caught:
        parse_fault(text)
    message = str(caught.value)
    assert all(problem in message for problem in problems), message
    assert f"Received: {text!r}" in message and "exit:worker=1,step=3,code=5" in message
