"""Collectives between ranks: for scripts in functions.py, for the rest of torchring in service.py."""
