"""The programs behind the `tfparallel` command: a file for each, and what starts a parallelism."""
