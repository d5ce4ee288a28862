"""Python reads this first, in the processes that tests start: they start a third faster.

Keras imports scikit-learn and Matplotlib if they are there, and does without them if they are not:
1.5 s in each of some hundreds of processes. What a program imports by itself is not touched.
"""

import sys

OPTIONAL = {"IPython", "matplotlib", "pandas", "scipy", "sklearn"}


class NotForKeras:
    """Hides what is optional for as long as TensorFlow and Keras are being imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        importing = any(
            getattr(getattr(sys.modules.get(library), "__spec__", None), "_initializing", False)
            for library in ("tensorflow", "keras")
        )
        if importing and name in OPTIONAL:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


sys.meta_path.insert(0, NotForKeras)
