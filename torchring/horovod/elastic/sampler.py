"""A sampler that knows which samples of the epoch are done, and shares out the others."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sized

from torch.utils.data import Sampler

import torchring.horovod as hvd


class ElasticSampler(Sampler[int]):
    """Shares the samples that are left of an epoch equally out to the ranks: `horovod.torch.elastic.ElasticSampler`.

    Call `record_batch` after each batch, and `set_epoch` at the end of an epoch, not at its beginning: it forgets what
    was recorded. Part of a `TorchState`, the sampler is committed, restored and synchronised with it.

    With samples 0 to 9 unshuffled, two ranks and batches of two, rank 0 takes 0, 2 | 4, 6 | 8 and rank 1 takes
    1, 3 | 5, 7 | 9. After one batch and a reset in a world of three, 4 to 9 are left: 4, 7 | 5, 8 | 6, 9.

    Where the samples that are left are no multiple of the ranks, the first of them are repeated. `seed` is equal on all
    ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch that all ranks together have done
        self.reset()

    def reset(self) -> None:
        """Share out anew what is left of the epoch, to the ranks that there are now. No communication."""
        self.rank = hvd.rank()
        self.num_replicas = hvd.size()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Begin with an epoch, of which no sample is done."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Each rank has done a batch of `batch_size` samples. What a running iteration yields does not change."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Epoch and number of samples done."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on where `state_dict` says."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return iter(list(padded)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
