"""Compression of the gradients that travel between hosts.

    torchring.wrap(optimizer, model, compression="int8")                            # or "powersgd"
    torchring.wrap(optimizer, model, compression=torchring.compression.PowerSGD(rank=8), max_error=0.9)

Ranks of one host reduce in full precision, and a job on one host compresses nothing. Gradients in fp32, fp16 and bf16
are compressed, complex ones as pairs of real numbers. Those in fp64, sparse gradients and buffers of the model travel
as they are. What compression loses in one step is added to the gradient of the next one (error feedback).

    schemes.py    what `compression` may be            transport.py   compresses what the all-reduce of a bucket sends
    int8.py       8-bit integers                       powersgd.py    low-rank matrices
    custom.py     an object of the script              ddp_hook.py    hooks of DistributedDataParallel
    check.py      looks at the error now and then      feedback.py    error feedback in checkpoints
    on_device.py  8-bit integers on GPUs
"""

from torchring.compression.custom import Bucket as Bucket
from torchring.compression.custom import Compressor as Compressor
from torchring.compression.feedback import load_state_dict as load_state_dict
from torchring.compression.feedback import state_dict as state_dict
from torchring.compression.powersgd import PowerSGD as PowerSGD

__all__ = ["Bucket", "Compressor", "PowerSGD", "load_state_dict", "state_dict"]
