"""A ratchet: how many of each concept the library has. A number may fall, and never rises.

Counted in the source, so that the counts say what a reader meets.
"""

import ast
import pathlib

LIBRARY = pathlib.Path(__file__).parents[1] / "tfparallel"
NODES = {
    str(path.relative_to(LIBRARY)): list(ast.walk(ast.parse(path.read_text())))
    for path in sorted(LIBRARY.rglob("*.py"))
}
TRAINING = {"fit", "evaluate", "predict", "train_step", "test_step", "predict_step", "compile"}

# Underscored, and public all the same.
PUBLIC = {"_asdict", "_current_frames", "_exit", "_getframe", "_replace"}

# Keras's and TensorFlow's, though classes of the library have attributes of these names.
OTHERS = {"_inputs", "_layers", "_metrics", "_tracker", "_value", "_variables"}

# What there is today.
MOST = {
    "classes that have a `fit`": 1,
    "classes that extend an optimizer": 2,
    "classes that have a method of Keras's trainer": 2,
    "hooks of a call, `_look_at` and `_begin`": 13,
    "hooks of `compile` and of a step, `_prepare_compiled` and `_take_step`": 11,
    "modules that sum gradients over workers": 1,
    "states of a thread": 1,
    "calls of `extend` and `attach`": 71,
    "private attributes of others, outside of `seams/`": 0,
}


def nodes(kind, of=NODES):
    return [node for tree_nodes in of.values() for node in tree_nodes if isinstance(node, kind)]


def methods(cls):
    return {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}


def called(node):
    """The last name of what is called: `attach` of `extend.attach(…)`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def own_names():
    """Private names that the library itself gives."""
    names = {node.name for node in nodes((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    names |= {node.arg for node in nodes(ast.keyword) if node.arg}
    names |= {node.id for node in nodes(ast.Name) if isinstance(node.ctx, ast.Store)}
    for node in nodes(ast.Attribute):
        if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self":
            names.add(node.attr)
    for node in nodes(ast.Call):
        if called(node) in ("setattr", "__setattr__") and len(node.args) > 1:
            names.add(getattr(node.args[1], "value", ""))
    return names


def named(of):
    """Private names of attributes, but for marks of the library's own on what is not its own.

    A name that the library gives, too, is counted where it is surely another's.
    """
    names = [node.attr for node in nodes(ast.Attribute, of)]
    names += [
        f"{node.attr} of another"
        for node in nodes(ast.Attribute, of)
        if node.attr in OTHERS and getattr(node.value, "id", "") != "self"
        if not isinstance(node.value, ast.Call)  # `super()._value`
    ]
    for node in nodes(ast.Call, of):
        if called(node) in ("getattr", "hasattr", "setattr", "__setattr__") and len(node.args) > 1:
            names.append(str(getattr(node.args[1], "value", "")))
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    return [name for name in private if not name.startswith("_tfparallel_")]


def count():
    classes = nodes(ast.ClassDef)
    defined, outside = own_names(), {k: v for k, v in NODES.items() if not k.startswith("seams/")}
    private = [name for name in named(outside) if name not in defined | PUBLIC]
    by_name = [getattr(node.func, "id", "") for node in nodes(ast.Call)]  # Not `list.extend`.
    return {
        "classes that have a `fit`": sum("fit" in methods(cls) for cls in classes),
        "classes that extend an optimizer": sum(cls.name.endswith("Optimizer") for cls in classes),
        "classes that have a method of Keras's trainer": sum(
            bool(methods(cls) & TRAINING) for cls in classes
        ),
        "hooks of a call, `_look_at` and `_begin`": sum(
            len(methods(cls) & {"_look_at", "_begin"}) for cls in classes
        ),
        "hooks of `compile` and of a step, `_prepare_compiled` and `_take_step`": sum(
            len(methods(cls) & {"_prepare_compiled", "_take_step"}) for cls in classes
        ),
        "modules that sum gradients over workers": sum(
            any(called(node) == "all_reduce_gradients" for node in nodes(ast.Call, {"": body}))
            for body in NODES.values()
        ),
        "states of a thread": sum(
            ast.unparse(node.func) in ("threading.local", "contextvars.ContextVar")
            for node in nodes(ast.Call)
        ),
        "calls of `extend` and `attach`": by_name.count("extend") + by_name.count("attach"),
        "private attributes of others, outside of `seams/`": len(private),
    }


def test_no_count_rises_and_a_lower_one_is_kept():
    assert count() == MOST
