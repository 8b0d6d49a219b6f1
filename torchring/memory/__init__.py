"""Memory that peers on the same host can touch."""
