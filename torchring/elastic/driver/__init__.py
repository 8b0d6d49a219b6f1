"""The driver of an elastic job, which `torchring run --elastic` runs: it starts workers on hosts that come and go, and
decides which workers train together.

    host_list.py    which hosts there are: fixed ones, those of a file, those that a script prints
    workers.py      what is known of a worker, and the limits that the user sets
    endings.py      when losses show that the script is wrong, or a slot; how far the job is from its end
    coordinator.py  decides who starts, who belongs to a generation, and when the job is over; no input or output
    driver_store.py the store through which driver and workers talk
    driver.py       processes, signals, and the loop around the decisions

torchring/elastic/protocol.py has the messages between driver and workers.
"""
