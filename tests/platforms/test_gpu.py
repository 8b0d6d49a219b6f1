"""Two ranks that share the GPU train by Lightning, the Trainer and Accelerate. A plain loop does it again.

The loop trains on the batches that the ranks have seen. For 16 bits it also takes each batch in parts, as the ranks do:
the distance between these two is the rounding's own.
"""

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.devices.test_gpu import DEADLINE, SHARED
from tests.platforms.cases import Cases
from torchring.bench.step import distance, flat_weights

pytestmark = [pytest.mark.platforms, pytest.mark.gpu]
case = Cases(__name__, deadline=DEADLINE, env=SHARED)

_ROWS, _STEPS = 16, 5
_CLIP: Final = 0.5
_DIRECT: Final[dict[str, Any]] = {"algorithm": "direct"}  # "auto" would try NCCL, which refuses ranks that share a GPU
_DTYPES: Final = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Learns to reverse rows. Keeps the batches that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen.append(x.cpu())
        return {"loss": nn.functional.mse_loss(self.layers(x).float(), x.flip(1))}


def _data() -> Any:
    return [{"x": x} for x in torch.randn(2 * _STEPS * _ROWS, 64, generator=torch.Generator().manual_seed(1))]


def _sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)


def _plain(batches: Tensor, kind: str, *, num_parts: int) -> Tensor:
    device, dtype = torchring.device().type, _DTYPES[kind]
    net = Net().to(device)
    optimizer, scaler = _sgd(net), torch.amp.GradScaler(device, enabled=kind == "fp16")
    for batch in batches.to(device):
        optimizer.zero_grad()
        for part in batch.chunk(num_parts):
            with torch.autocast(device, dtype, enabled=dtype is not None):
                loss = net(part)["loss"]
            scaler.scale(loss / num_parts).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), _CLIP)
        scaler.step(optimizer)
        scaler.update()
    return flat_weights(net)


def _assert_as_alone(net: Net, kind: str = "32") -> None:
    batches = torch.stack(list(map(torchring.all_gather, net.seen)))
    assert batches.shape == (_STEPS, 2 * _ROWS, 64)
    start, ours = (flat_weights(each.to(torchring.device())) for each in (Net(), net))
    whole, parts = (_plain(batches, kind, num_parts=number) for number in (1, 2))
    off = distance(ours, whole, start)
    assert off <= (1e-3 if kind == "32" else 1e-2)
    assert kind == "32" or off <= 2 * distance(parts, whole, start)


@case
def test_lightning(rank: int) -> None:
    import lightning

    import torchring.lightning

    class Module(Net, lightning.LightningModule):  # type: ignore[misc]
        def training_step(self, batch: dict[str, Tensor]) -> Any:
            return self(**batch)

        configure_optimizers = _sgd

    torchring.init(process_group=True)
    shared = {"accelerator": torchring.device().type, "devices": 2}  # Lightning does not know that there is one
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    for kind, precision in (("32", "32-true"), ("bf16", "bf16-mixed")):
        strategy, net = torchring.lightning.RingStrategy(**_DIRECT), Module()
        options = {"strategy": strategy, "precision": precision, "gradient_clip_val": _CLIP, "max_epochs": 1}
        lightning.Trainer(**options, **shared, **quiet).fit(net, torch.utils.data.DataLoader(_data(), _ROWS))
        _assert_as_alone(net, kind)


@case
def test_accelerate(rank: int) -> None:
    from torchring.accelerate import RingAccelerator

    accelerator = RingAccelerator(mixed_precision="fp16", wrap_options=_DIRECT)
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, _sgd(net), torch.utils.data.DataLoader(_data(), _ROWS))
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        if step == 2:
            accelerator.save_state("state")
            accelerator.wait_for_everyone()
            nn.init.zeros_(next(net.parameters()))
            accelerator.load_state("state")
    _assert_as_alone(net, "fp16")


@case
def test_transformers(rank: int) -> None:
    from transformers import TrainingArguments

    from torchring.transformers import RingTrainer

    class Trainer(RingTrainer):
        wrap_options = _DIRECT

    options = {"max_grad_norm": _CLIP, "lr_scheduler_type": "constant", "num_train_epochs": 1}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments("trainer", per_device_train_batch_size=_ROWS, **options, **quiet)
    net = Net()
    Trainer(net, arguments, train_dataset=_data(), optimizers=(_sgd(net), None)).train()
    _assert_as_alone(net)
