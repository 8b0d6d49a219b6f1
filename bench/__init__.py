"""Benchmarks, installed as torchring.bench: `torchring bench allreduce` runs `bench/allreduce.py`.

The benchmarks ship in the wheel so that `torchring bench` compares torchring with DDP, Gloo, Horovod and MPI on the
user's own machine, with one command. Results and notes do not ship: `bench/README.md` and `bench/NOTES.md` are in the
repository.
"""
