"""Benchmarks, installed as torchring.bench: `torchring bench allreduce` runs `bench/allreduce.py`. See README.md."""
