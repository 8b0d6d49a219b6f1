"""Point-to-point transfers between hosts, by an existing engine: Gloo or MPI."""
