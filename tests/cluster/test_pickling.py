"""What another process is sent keeps the names of its files."""

import pickle

from tfparallel.cluster.launcher.sent_function import pickled


def test_a_function_keeps_the_name_of_its_file():
    namespace = {"__name__": "__main__"}
    source = "def outer(x):\n    def inner():\n        return x\n    return inner\n"
    exec(compile(source, "/no/such/folder/cell.py", "exec"), namespace)
    outer = pickle.loads(pickled(namespace["outer"]))
    assert outer.__code__.co_filename == "/no/such/folder/cell.py"
    inner = pickle.loads(pickled(outer(5)))
    assert inner.__code__.co_filename == "/no/such/folder/cell.py"
    assert inner() == 5


def test_a_lambda_is_sent_with_what_it_closes_over():
    factor = 3
    assert pickle.loads(pickled(lambda x: factor * x))(2) == 6
