"""Names: modules and classes have those of the field, and those of values say what they are."""

import ast
import functools
import pathlib

import pytest

TOP = pathlib.Path(__file__).parents[2]
FOLDERS = ("benchmarks", "models", "tests", "tfparallel")
# What they were called once, and are called.
NAMES = {
    "ahead": "build",
    "anywhere": "ops",
    "between_workers": "process_group",
    "by_hand": "parallel_hints",
    "came_first": "early_init",
    "claims": "launcher_env",
    "complete": "copy_state",
    "door": "acceptor",
    "forms": "parallelism",
    "guarded": "worker_process",
    "guardian": "reaper",
    "host_share": "local_workers",
    "leaving": "coordination",
    "likeness": "verify_clone",
    "lost": "lost_worker",
    "meeting": "worker_rendezvous",
    "newer_keras": "keras_compat",
    "node_news": "control_channel",
    "nodes": "rendezvous",
    "notice": "user_log",
    "on_task": "runner",
    "participants": "group",
    "screening": "output_filter",
    "sendable": "sent_function",
    "standby": "warm_spares",
    "stopping": "coordination",
    "worker_choice": "transport_selection",
    "writes": "processes",
    "Door": "Acceptor",
    "Form": "Parallelism",
    "GuardedWorker": "WorkerProcess",
    "NodeMeeting": "Rendezvous",
    "NodeNews": "ControlChannel",
    "Screening": "OutputFilter",
    "Standbys": "WarmSpares",
    "StopAgreement": "PreemptionSync",
    "WorkerGroup": "ProcessGroup",
    "WrittenByHand": "ParallelHint",
}
# They fit everything, and so say nothing.
VAGUE = {"asked", "found", "given", "held", "kept", "left", "made", "own", "told", "wanted"}
INSTEAD = "name what it is: gradients, local_rows, config"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def bound_name(node):
    """The name that a node gives to something, or None; an import gives one only by `as`."""
    match node:
        case ast.Name(ctx=ast.Store(), id=name) | ast.Attribute(ctx=ast.Store(), attr=name):
            return name
        case ast.arg(arg=name) | ast.alias(asname=name) | ast.MatchMapping(rest=name):
            return name
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
            return node.name
        case ast.MatchAs() | ast.MatchStar():
            return node.name
    return None


def scopes(tree):
    """Yields the nodes of the module, and those of each function without the ones inside it."""
    waiting = [tree]
    while waiting:
        scope, inside = [], list(ast.iter_child_nodes(waiting.pop()))
        while inside:
            node = inside.pop()
            scope.append(node)
            if isinstance(node, FUNCTIONS):
                waiting.append(node)
            else:
                inside += ast.iter_child_nodes(node)
        yield scope


def vague_names(tree):
    """Lines and names. `left` may stand for a side, where `right` is bound in the same function."""
    lines = []
    for scope in scopes(tree):
        names = [(node, name) for node in scope if (name := bound_name(node))]
        words = {name.strip("_").lower() for _, name in names}
        allowed = {"left"} if "right" in words else set()
        lines += [
            (node.lineno, name)
            for node, name in names
            if name.strip("_").lower() in VAGUE - allowed
        ]
    return sorted(lines)


@functools.cache
def trees(folder):
    paths = sorted((TOP / folder).rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_and_classes_have_the_names_of_the_field(folder):
    faults = []
    for path, tree in trees(folder).items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names = [(1, path.stem), *((node.lineno, node.name) for node in classes)]
        faults += [
            f"{path.relative_to(TOP)}:{line}: {name}: write {NAMES[name]}"
            for line, name in names
            if name in NAMES
        ]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_a_value_is(folder):
    faults = [
        f"{path.relative_to(TOP)}:{line}: {name}: {INSTEAD}"
        for path, tree in trees(folder).items()
        for line, name in vague_names(tree)
    ]
    assert not faults, "\n" + "\n".join(faults)


SOURCE = """\
from hypothesis import given
from hypothesis import strategies as found
held: int = 0
class Own:
    kept = given
    def told(self, wanted, *made, left=0, **asked):
        self._own = wanted.left
        del made
def side(left, right):
    return [left for left in right if (found := left)]
def of_others(right):
    left_rows, holder = right, lambda _left: 0
    with holder as given, open(found=1):
        pass
try:
    pass
except ValueError as found_:
    match found_:
        case {"a": kept, **held} | [kept, *held]:
            pass
"""


def test_the_lint_sees_each_way_to_bind_a_name():
    assert vague_names(ast.parse(SOURCE)) == [
        (2, "found"), (3, "held"), (4, "Own"), (5, "kept"), (6, "asked"), (6, "left"), (6, "made"),
        (6, "told"), (6, "wanted"), (7, "_own"), (10, "found"), (12, "_left"), (13, "given"),
        (17, "found_"), (19, "held"), (19, "held"), (19, "kept"), (19, "kept"),
    ]  # fmt: skip
