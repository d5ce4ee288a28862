"""The task files written by `tfparallel init`: with sample data, or for a user's data file."""
