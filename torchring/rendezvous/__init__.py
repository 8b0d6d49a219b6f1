"""Reads what the launcher told this process, and opens the store at which the ranks of a launch meet."""
