"""What ranks do and did: times of steps (`recorder`), and who waits for whom (`flight_recorder`)."""

from typing import Final

# Variables that `torchring run` sets for its ranks. Imports nothing, so that the launcher starts fast.
TRACE: Final = "TORCHRING_TRACE"  # a folder; from --trace
