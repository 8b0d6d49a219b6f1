"""Collectives between hosts, by an existing engine: Gloo or MPI."""
