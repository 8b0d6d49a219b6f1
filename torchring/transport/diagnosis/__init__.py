"""Finds out which rank is at fault when a transfer between hosts fails."""
