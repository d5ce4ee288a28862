"""Jobs on a Ray cluster: `tfparallel.ray.fit`. Ray itself is imported when it is first needed."""

from tfparallel.ray.fit import fit

__all__ = ["fit"]
