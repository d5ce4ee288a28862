"""What each worker did last, kept in a file that outlives it; and what that says of a job."""
