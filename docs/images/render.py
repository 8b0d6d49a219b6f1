"""Render the pictures of README: the top of the report on a job of two
ranks, of which rank 1 has a slow disk.

    python docs/images/render.py

writes report-light.png and report-dark.png beside this file. It needs
`pip install -e '.[report]'`, and Chromium or Chrome on PATH.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchring
from torch import nn
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LOOK = ["--window-size=900,474", "--force-device-scale-factor=1.3333"]
SCHEMES = "color-scheme: light dark;"
HIDDEN = (
    "<style>header, .link, .panel ~ * { display: none !important }</style>"
)


class Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 60 * 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002 if torchring.rank() == 1 else 0.0)  # the disk
        return torch.randn(3, 32, 32)


def train() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = torchring.wrap(optimizer, model)
    for images in DataLoader(Images(), batch_size=16):
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def torchring_command(*arguments: str) -> None:
    command = [sys.executable, "-m", "torchring", *arguments]
    subprocess.run(command, check=True)


def render() -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"No browser on PATH: none of {', '.join(BROWSERS)}.")
    browser_command = [browser, "--headless=new", "--no-sandbox", *LOOK]
    with tempfile.TemporaryDirectory() as folder:
        job = [__file__, "--train"]
        torchring_command("run", "-np", "2", "--trace", folder, *job)
        torchring_command("report", folder)
        page = Path(folder, "report.html").read_text(encoding="utf-8")
        page = page.replace("</head>", f"{HIDDEN}</head>")
        for scheme in ("light", "dark"):
            html = Path(folder, f"{scheme}.html")
            shown = page.replace(SCHEMES, f"color-scheme: {scheme};")
            html.write_text(shown, encoding="utf-8")
            image = f"--screenshot={HERE}/report-{scheme}.png"
            command = [*browser_command, "--hide-scrollbars", image, html]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    train() if "--train" in sys.argv else render()
