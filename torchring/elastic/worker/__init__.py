"""A worker of an elastic job: its state, its training loop, its data."""
