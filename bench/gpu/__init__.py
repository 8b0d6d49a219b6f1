"""Benchmarks of one GPU: `torchring bench gpu`."""
