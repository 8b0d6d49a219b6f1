"""What bounds a job, and what would help, as plain data."""
