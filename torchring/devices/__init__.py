"""Gradients on accelerators: packing and all-reduces in streams, and memory that the devices of a host share."""
