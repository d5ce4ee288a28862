"""The programs behind the `tfparallel` command; flags and printing only."""
