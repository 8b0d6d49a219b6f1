"""Figures of one GPU against what they have to be, and scripts that share a GPU against one process."""
