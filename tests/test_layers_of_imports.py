"""The architecture: imports run one way, models know nothing of parallelism.

Read from the source, not from `sys.modules`, so that an import hidden in a
function counts too.
"""

import ast
import functools
import pathlib
import re
import sys

import pytest

TOP = pathlib.Path(__file__).parents[1]
LIBRARY = TOP / "tfparallel"

# From the ground up. A package may import what stands in a row above its own,
# and itself; a new package is given its row here.
ROWS = [
    ["activity", "chatter", "compute_context", "installed", "texts"],
    ["startup", "cluster", "cuda_driver", "device_names", "layout", "keras_compat", "seams"],
    ["device_listing", "device_memory", "starter_tasks"],
    ["device_setup"],
    ["devices", "data", "task", "extend", "piece", "user_log", "flight"],
    ["problems", "ray"],
    ["tracing"],
    ["judge", "variables", "xla"],
    ["collectives", "draws", "step", "join_job"],
    ["update"],
    ["cloning"],
    ["bench"],
    ["strategies", "checkpoint"],
    ["callbacks"],
    ["asynchronous"],
    ["replication", "placement"],
    ["pipeline", "layers", "warm_spare"],
    ["hybrid"],
    ["planning"],
    ["diagnostics"],
    ["command_line"],
    ["commands"],
    ["__main__"],
]
ROW_OF = {package: row for row, packages in enumerate(ROWS) for package in packages}

# What decides in plain Python, and can be imported in milliseconds.
PLAIN = ["", "startup", "cluster", "ray", "device_names", "task"]
PLAIN += ["data.example_order", "data.partition"]
PLAIN += ["checkpoint.folder", "checkpoint.stored", "diagnostics.faults"]
PLAIN += ["commands.main", "command_line.runner"]
PLAIN += ["command_line.contradictions", "flight.culprit", "starter_tasks.kinds"]
PLAIN += ["commands.launch", "commands.init", "commands.bench_pipeline"]
PLAIN += ["bench.measure", "bench.table", "commands.plan_all_reduce"]
PLAIN += ["collectives.algorithms", "collectives.cost_model", "collectives.profile"]
PLAIN += ["planning.candidates", "planning.calibration", "planning.prediction"]
PLAIN += ["planning.reasons"]
PLAIN += ["activity", "layout", "texts", "flight.record", "flight.job", "commands.trace"]
HEAVY = {"tensorflow", "keras"}


def parse(path):
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def modules():
    """Maps each of the library's modules to its tree: `"data.example_order"` and so on."""
    trees = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        parts = path.relative_to(LIBRARY).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        trees[".".join(parts)] = parse(path)
    return trees


def imported_names(nodes):
    """Yields the full dotted name of everything the nodes import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import has no module name to judge; the library has none.
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value


def resolve(name):
    """Returns which of the library's modules a dotted name means, or None."""
    if name.partition(".")[0] != "tfparallel":
        return None
    inside = name.partition(".")[2]
    while inside and inside not in modules():
        inside = inside.rpartition(".")[0]
    return inside


def edges(module, nodes):
    targets = {resolve(name) for name in imported_names(nodes)}
    return {target for target in targets if target is not None and target != module}


def top_level(tree):
    """The nodes that run when a module is imported: all but the bodies of functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


@functools.cache
def everywhere():
    return {module: edges(module, ast.walk(tree)) for module, tree in modules().items()}


@pytest.mark.slow
def test_every_package_has_its_row():
    packages = {module.partition(".")[0] for module in modules()} - {""}
    assert packages <= set(ROW_OF), "name the row of a new package in ROWS"


def test_imports_run_one_way():
    against = []
    for module, targets in everywhere().items():
        # The face names everything, lazily; that is its work.
        if module == "":
            continue
        own_package = module.partition(".")[0]
        for target in sorted(targets):
            package = target.partition(".")[0]
            # The library does not use its own face: package "" has no row.
            if package != own_package and ROW_OF.get(package, len(ROWS)) >= ROW_OF[own_package]:
                against.append(f"tfparallel.{module} imports tfparallel.{target}")
    assert against == []


def test_there_is_no_cycle():
    graph = {module: sorted(targets) for module, targets in everywhere().items() if module}
    done, path = set(), []

    def visit(module):
        if module in path:
            pytest.fail("import cycle: " + " -> ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for target in graph.get(module, ()):
            visit(target)
        done.add(path.pop())

    for module in graph:
        visit(module)


@pytest.mark.slow
def test_imports_are_absolute():
    relative = [
        f"tfparallel.{module}: {name}"
        for module, tree in modules().items()
        for name in imported_names(ast.walk(tree))
        if name.startswith(".")
    ]
    assert relative == []


@pytest.mark.parametrize("plain", PLAIN)
def test_plain_python_stays_plain(plain):
    waiting = [
        module
        for module in modules()
        if module == plain or (plain and module.startswith(f"{plain}."))
    ]
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        nodes = list(top_level(modules()[module]))
        loaded = {name.partition(".")[0] for name in imported_names(nodes)}
        assert not loaded & HEAVY, f"tfparallel.{module} loads {loaded & HEAVY}"
        # A package's own __init__ runs too.
        targets = edges(module, nodes) | {module.rpartition(".")[0]}
        waiting.extend(targets - seen)
        seen |= targets


def names_of(module):
    """What a module offers by a name: what it defines or imports at its top level, and modules."""
    names = {other.rpartition(".")[2] for other in modules() if other.rpartition(".")[0] == module}
    for node in top_level(modules()[module]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "tests", "tfparallel"])
def test_what_is_imported_by_name_is_there(folder):
    """A benchmark is run seldom, and a function imports when it is called."""
    missing = []
    for path in sorted((TOP / folder).rglob("*.py")):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            name, _, inside = node.module.partition(".")
            if name != "tfparallel" or not inside:  # The face names everything, lazily.
                continue
            faces = {"data", "callbacks", "layers"}
            offered = names_of(inside) if inside in modules() else set()
            missing += [
                f"{path.relative_to(TOP)}: {alias.name} of {node.module}"
                for alias in node.names
                if alias.name not in offered and inside not in faces
            ]
    assert missing == []


def test_tensorflow_config_has_one_caller_for_devices():
    callers = {
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "config"
        and ast.unparse(node.value) in ("tf", "tensorflow")
    }
    # How functions run, and determinism of the arithmetic, are no settings of a device. Where a
    # worker runs `cluster.trained_alone`, there need not be anything else of this package.
    assert callers <= {
        "cloning.verify_clone",
        "cluster.trained_alone",
        "device_listing",
        "device_memory",
        "device_setup",
        "devices",
        "diagnostics.check",
    }


def test_the_library_asserts_nothing():
    asserting = [
        f"tfparallel.{module}:{node.lineno}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert asserting == []


def test_no_test_asserts_that_something_is_quick():
    """On a busy machine nothing is. A deadline is for what would not end; `<` compares with it."""
    now = re.compile(r"^time\.(time|monotonic|perf_counter|process_time)(_ns)?\(\) - ")
    timed = [
        f"{path.relative_to(TOP)}:{node.lineno}"
        for path in (TOP / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
        for part in ast.walk(node)
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Lt | ast.LtE)
        if now.match(ast.unparse(part.left))
    ]
    assert timed == []


def test_the_library_never_imports_models():
    names = {path.stem for path in (TOP / "models").glob("*.py")} | {"models"}
    importing = [
        f"tfparallel.{module} imports {name}"
        for module, tree in modules().items()
        for name in imported_names(ast.walk(tree))
        if name.partition(".")[0] in names
    ]
    assert importing == []


@pytest.mark.parametrize(
    "path", sorted((TOP / "models").glob("*.py")), ids=lambda path: path.stem
)
def test_models_know_nothing_of_parallelism(path):
    neighbours = {other.stem for other in path.parent.glob("*.py")}
    allowed = {"keras", "nibabel", "numpy", "sklearn"} | neighbours | sys.stdlib_module_names
    if path.stem in ("burgers", "molecules", "vae"):
        allowed.add("tensorflow")  # They take gradients, for which Keras has no name.
    loaded = {name.partition(".")[0] for name in imported_names(ast.walk(parse(path)))}
    assert loaded <= allowed
