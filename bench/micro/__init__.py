"""Microbenchmarks under pytest-benchmark: hooks, pack/unpack/accumulate.

    pytest bench/micro                        print tables with rivals side by side
    pytest bench/micro --benchmark-disable    run everything once and only check the results, in seconds

Each benchmark checks its results. `torchring bench micro` runs the benchmarks from an installed wheel.
"""
