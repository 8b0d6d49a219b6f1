"""What the launcher told this process, and where the ranks of a launch meet."""
