"""Data that ranks share, and that training can stop in and go on with anywhere."""

from torchring.data.sampler import Sampler as Sampler
