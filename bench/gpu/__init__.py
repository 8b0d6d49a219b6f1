"""Benchmarks of GPUs: all-reduce by size (`torchring bench gpu`), and figures of one GPU (`check.py`)."""
