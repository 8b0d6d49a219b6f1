"""A gradient's way from autograd to the optimizer's step."""
