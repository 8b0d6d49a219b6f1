"""The driver of an elastic job, which `torchring run --elastic` runs: it starts workers on hosts that come and go, and
decides which workers train together.

    hosts.py        which hosts there are: fixed ones, those of a file, those that a script prints
    cooldown.py     how long a place is left out where workers fail
    coordinator.py  decides who starts, who belongs to a generation, and when the job is over; no input or output
    store.py        the store through which driver and workers talk
    driver.py       processes, signals, and the loop around the decisions

torchring/rendezvous/protocol.py says what driver and workers tell each other.
"""
