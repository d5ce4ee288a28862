"""Jobs that run only the parts that the chosen tests need.

    @pytest.fixture(scope="module")
    def job(request):
        return run_workers(PROGRAM, arguments=[parts_asked_for(request)])

    @pytest.mark.part("dropout")
    def test_dropout(job): ...

Where each case of a test is a part: `parametrize("case", each_a_part(CASES))`.
"""

import pytest


def parts_asked_for(request: pytest.FixtureRequest) -> list[str]:
    """Returns the names in the markers `part` of a module's chosen tests, in their order.

    Args:
        request: Of a fixture of the module.
    """
    of_module = [item for item in request.session.items if item.path == request.path]
    marks = [mark for item in of_module for mark in item.iter_markers("part")]
    return list(dict.fromkeys(name for mark in marks for name in mark.args))


def each_a_part(names) -> list:
    """Returns parameters of which each has a part of its name."""
    return [pytest.param(name, marks=pytest.mark.part(name)) for name in names]
