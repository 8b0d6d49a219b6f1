"""Point-to-point transfers between hosts, through an engine that exists."""
