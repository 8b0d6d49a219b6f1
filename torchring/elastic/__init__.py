"""Training that survives lost workers, and takes new ones in."""
