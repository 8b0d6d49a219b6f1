"""Render the pictures of README: the top of the report on a job of two ranks, of which rank 1 has a slow disk.

    python docs/images/render.py          writes report-light.png and report-dark.png beside this file

Needs `pip install -e '.[report]'`, and Chromium or Chrome on PATH.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchring

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT, PIXEL_RATIO = 900, 466, 4 / 3
HIDE_THE_REST = "<style>header, .link, .panel ~ * { display: none !important; }</style>"


class Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 60 * 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002 if torchring.rank() == 1 else 0.0)  # the disk
        return torch.randn(3, 32, 32)


def train() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for images in DataLoader(Images(), batch_size=16):
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def render() -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"There is no browser on PATH that renders pages: none of {', '.join(BROWSERS)}.")
    with tempfile.TemporaryDirectory() as folder:
        torchring_ = [sys.executable, "-m", "torchring"]
        subprocess.run([*torchring_, "run", "-np", "2", "--trace", folder, __file__, "--train"], check=True)
        subprocess.run([*torchring_, "report", folder], check=True)
        page = Path(folder, "report.html").read_text(encoding="utf-8").replace("</head>", f"{HIDE_THE_REST}</head>")
        for scheme in ("light", "dark"):
            path = Path(folder, f"{scheme}.html")
            path.write_text(page.replace("color-scheme: light dark;", f"color-scheme: {scheme};"), encoding="utf-8")
            subprocess.run(
                [
                    browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}",
                    f"--force-device-scale-factor={PIXEL_RATIO}", f"--screenshot={HERE}/report-{scheme}.png", path,
                ],
                check=True,
            )  # fmt: skip


if __name__ == "__main__":
    train() if "--train" in sys.argv else render()
