"""Training with few messages: ranks step alone, and average what they have changed every H steps.

local_sgd.py has LocalSGD and DiLoCo, options.py what they take, fragments.py the parts of the parameters that are sent
at once, outer_exchange.py what ranks send, delta_codes.py deltas in 4 or 2 bits.
"""
