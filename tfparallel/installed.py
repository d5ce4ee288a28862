"""The installed distributions of modules: `keras` may come from `keras-nightly`."""

from importlib import metadata


def distribution_of(module: str) -> str | None:
    """Returns the name under which pip installed a module; None if it did not.

    Args:
        module: A top-level module such as "tensorflow", which tensorflow-cpu and tf-nightly also
            provide.
    """
    try:
        metadata.version(module)
    except metadata.PackageNotFoundError:
        return next(iter(metadata.packages_distributions().get(module, [])), None)
    return module


def version_of(module: str) -> str | None:
    """Returns the version of a module; None if it is not installed."""
    distribution = distribution_of(module)
    return None if distribution is None else metadata.version(distribution)
