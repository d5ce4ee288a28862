"""The command line of the programs among the tests that run some of what has names, or all."""

import argparse
from collections.abc import Collection

__all__ = ["parse_names"]


def parse_names(
    doc: str,
    kind: str,
    names: Collection[str],
    flag: str,
    flag_help: str,
    only_named: Collection[str] = (),
) -> argparse.Namespace:
    """Returns `names`, those that the command line has, or all; and the flag.

    Args:
        doc: The program's docstring, of which `--help` shows the first line.
        kind: What is named, such as "notebook".
        names: All of them.
        flag: A flag that is there or not, such as "--check".
        flag_help: What it is for.
        only_named: Further ones, which are not among "all".
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    listed = ", ".join([*names, *only_named])
    parser.add_argument("names", nargs="*", metavar=kind.upper(), help=f"of {listed}")
    parser.add_argument(flag, action="store_true", help=flag_help)
    args = parser.parse_args()
    if unknown := set(args.names) - {*names, *only_named}:
        parser.error(f"a {kind} is one of {listed}. Received: {', '.join(sorted(unknown))}")
    args.names = args.names or list(names)
    return args
