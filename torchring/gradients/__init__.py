"""From autograd to the result: the gradients of one optimizer, and what takes part in reducing them.

The way of a gradient, in reading order:

    hooks.py        autograd has accumulated a gradient, and calls the gradient's hook; backward() is about to return
    reducer.py      the first gradient of a backward: does it reduce?
    reductions.py   begins and finishes a reduction
    launcher.py     finds the gradient's bucket, and launches full buckets in plan order
    bucket.py       counts and packs gradients, and gives them back reduced
    places.py       the same where gradients live in the wire buffer: when they are in `.grad`, and when they are not
    packing.py      copies gradients to the wire buffer, scaled, and back; looks for NaN
    views.py        the tensors in the wire buffer that a script sees as `.grad`
    ledger.py       what is known about each `.grad`
    group.py        finishes the reducers of all optimizers that the backward has reached
    reduction.py    the state of a reduction, and the message in which each rank tells the others, once, what it knows
    agreement.py    whether the gradients were finite, and how long the reduction took

Everything else that takes part in a reduction is a participant, in `participants/`, `observe/` or `elastic/`: sparse
gradients, buffers, the checks that ranks hold the same parameters and read data of their own, the noise scale,
recording, and elastic jobs. A participant adds fields to the message, and overrides what it needs of the methods of
`reduction.Participant`. To add a feature, add a file there and a line in `rooms.py`. Weights are part of each
reduction: `weights.py`. What happens to a step and its buckets is said to `World.observer`, see `observer.py`.

Decided beforehand, as data: `plan.py`, which `layout.py` lays out. In a world of one rank: `local.py`.
"""
