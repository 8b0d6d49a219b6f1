"""Microbenchmarks under pytest-benchmark: plan, hooks, pack/unpack/accumulate, one all-reduce.

    pytest bench/micro                        tables, rivals side by side
    pytest bench/micro --benchmark-disable    everything once, for its results: seconds

Each one checks what it has timed. `torchring bench micro` runs them from an installed wheel.
"""
