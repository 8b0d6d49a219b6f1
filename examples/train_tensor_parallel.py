"""Train a transformer with tensor parallelism and data parallelism: PyTorch cuts the layers, torchring has the rest.

    torchring run -np 4 examples/train_tensor_parallel.py            2 copies of the model, each on 2 ranks
    torchring run -np 4 examples/train_tensor_parallel.py --tp 4     1 copy, on 4 ranks
    python examples/train_tensor_parallel.py                         one process; the losses differ by rounding only

The model reads a handwritten digit of scikit-learn's row by row. docs/guides/mesh.md explains the functions.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import torchring

WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # A rank has some of the heads, so their number is not written here.
        q, k, v = (part(y).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.positions = nn.Linear(8, WIDTH), nn.Parameter(torch.zeros(8, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.classes = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.rows(images) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.classes(x.mean(1))


# --8<-- [start:tp]
def parallelize(model: Reader, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"q": columns, "k": columns, "v": columns, "out": rows}
    plan |= {"up": columns, "down": rows}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)


# --8<-- [end:tp]
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share a copy of the model")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model", default="tensor-parallel.pt", help="file that is written at the end")
    args = parser.parse_args()
    torchring.init(process_group=True)  # the mesh needs a process group of PyTorch's
    tp = min(args.tp, torchring.size())
    mesh = init_device_mesh("cpu", (torchring.size() // tp, tp), mesh_dim_names=("dp", "tp"))

    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    train, test = TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])
    # The ranks that share a copy of the model need the same images, those of a "dp" group need different ones.
    sampler = torchring.data.Sampler(train, global_batch=args.batch_size, group=mesh["dp"])
    batches = DataLoader(train, batch_sampler=sampler)
    test_images, test_labels = test[torchring.rank(mesh["dp"]) :: torchring.size(mesh["dp"])]

    # --8<-- [start:wrap]
    torch.manual_seed(0)  # all ranks build the same model, and keep parts
    model = Reader()
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = torchring.wrap(optimizer, model, group=mesh["dp"])
    # --8<-- [end:wrap]

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        metrics = torchring.recipes.MeanMetric(group=mesh["dp"])
        for images, labels in batches:
            optimizer.zero_grad()
            optimizer.weigh(num_images := sampler.weight())
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            metrics.update({"loss": loss.detach()}, weight=num_images)
        with torch.no_grad():
            metrics.update({"accuracy": (model(test_images).argmax(1) == test_labels).float()})
        means = metrics.compute()
        if torchring.rank() == 0:
            print(f"epoch {epoch}: loss {means['loss']:.4f}, test accuracy {means['accuracy']:.2%}", flush=True)

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # all ranks call it
    if torchring.rank() == 0:
        torch.save(state, args.model)  # loads into the model of one process


if __name__ == "__main__":
    main()
