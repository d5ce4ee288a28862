"""The strategies' base: their devices, variables with a copy on each, and the replica trace."""
