"""Every test starts from the same seed; a GPU test on a machine that should have a GPU must not skip."""

import gc
import os
import signal
from collections.abc import Generator

import pytest
import torch

from torchring.gradients.views import CAN_SWAP

# Folders with long files begin first: at the end of a run with several processes, all have something to do.
_LONG = ("transport", "launch", "world", "collectives", "doctor", "devices", "kernels", "elastic", "docs/test_examples")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(_LONG))


# PyTorch's store asks the name server for the name of each host that connects, 127.0.0.1 included. Where a question now
# and then gets no answer, that stops the store for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support import interpreted  # noqa: F401


def pytest_configure() -> None:
    """Tests send themselves these signals, which a process started with nohup or in the background ignores."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _no_garbage() -> None:
    """A worker that a DataLoader forks aborts where it collects a group of Gloo, whose threads the parent has."""
    gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    takes_2_12 = item.get_closest_marker("takes_2_12") or item.nodeid.startswith(
        ("tests/sharding/", "tests/elastic/test_shards")
    )
    if takes_2_12 and not CAN_SWAP:
        pytest.skip("takes PyTorch 2.12")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    needs_release = skipped and "PyTorch 2." in str(report.longrepr)
    expects_gpu = item.get_closest_marker("gpu") and os.environ.get("TORCHRING_EXPECT_GPU") == "1"
    if skipped and expects_gpu and not needs_release:
        report.outcome = "failed"
        report.longrepr = f"TORCHRING_EXPECT_GPU=1, but a gpu test was skipped: {report.longrepr}"
    return report
