"""Flight records: each worker's last events, in a file that outlives it, and their analysis."""
