"""What griffe must be told to read the package as its users do, without importing it."""

import ast

import griffe

FACES = ("tfparallel", "tfparallel.data")


class Face(griffe.Extension):
    """Adds the names of each lazy `_FACE` to its module, and knows the house's section names."""

    def on_package(self, *, pkg, **kwargs):
        """Reads the literals, which say where a public name is defined."""
        for path in FACES if pkg.name == "tfparallel" else ():
            module = pkg if path == pkg.name else pkg[path.removeprefix("tfparallel.")]
            for name, where in ast.literal_eval(str(module["_FACE"].value)).items():
                home, attribute = where if isinstance(where, tuple) else (where, name)
                if attribute is not None:
                    module[name] = griffe.Alias(name, f"{home}.{attribute}", parent=module)

    def on_instance(self, *, obj, **kwargs):
        """Reads `Example:` as the section `Examples:`, which is shown as code."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
