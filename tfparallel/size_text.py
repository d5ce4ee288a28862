"""A number of bytes as people read it."""

__all__ = ["size_text"]


def size_text(size_bytes: float) -> str:
    """A number of bytes for people: "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"
