"""The driver of an elastic job, which `torchring run --elastic` runs: it starts workers on hosts that come and go, and
decides which workers train together.

    hosts.py        which hosts there are: fixed ones, those of a file, those that a script prints
    cooldown.py     how long a slot is left out where workers fail
    losses.py       when losses of workers show that the script is wrong
    coordinator.py  decides who starts, who belongs to a generation, and when the job is over; no input or output
    actions.py      what the coordinator has the driver do
    store.py        the store through which driver and workers talk
    driver.py       processes, signals, and the loop around the decisions

torchring/elastic/protocol.py has the messages between driver and workers.
"""
