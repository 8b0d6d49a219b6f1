"""Training that goes on from the last commit: `horovod.torch.elastic`.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            for state.batch in range(state.batch, num_batches): ...
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0))

A commit copies model, optimizer and the other values to host memory. After a failure, `run` restores the copy, and
calls the function again. Under `torchring run --elastic`, ranks may be lost, leave, and come. Under any other launcher,
a lost rank ends the job, with HorovodInternalError.

    loop.py       run: calls the training function again
    state.py      what a commit keeps
    sampler.py    which samples of an epoch are left
    worker.py     this process as a worker of `torchring run --elastic`

context.py needs worker.py, which is here: so the modules of this folder import torchring.horovod as a whole, and look
up what they need when they are called.
"""

from torchring.horovod.elastic.loop import run
from torchring.horovod.elastic.sampler import ElasticSampler
from torchring.horovod.elastic.state import ObjectState, State, TorchState
from torchring.horovod.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler", "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "ObjectState",
    "State", "TorchState", "run",
]  # fmt: skip
