"""What scripts do around local steps: load weights, cut few parameters, go on after shutdown()."""

import pytest
import torch

import torchring
from tests.support.harness import ranks


@ranks(2)
def test_weights_that_are_loaded_before_the_first_step_are_where_training_begins() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torchring.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.0), model, every=1)
    optimizer.state_dict()  # as torchring.elastic.State calls it
    loaded = {"weight": torch.full((1, 3), 10.0), "bias": torch.ones(1)}
    model.load_state_dict(loaded)
    saved = optimizer.state_dict()["local_steps"]["parameters"]
    assert [values.flatten().tolist() for values in saved] == [[10.0] * 3, [1.0]]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[10.0] * 3]
    torchring.shutdown()
    with pytest.raises(ValueError, match="belongs to a world that was shut down"):
        optimizer.step()


@ranks(2)
def test_fragments_are_never_empty() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 1))
    sgd, some = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=1.0)
    with pytest.raises(ValueError, match="outer has other parameters"):
        torchring.DiLoCo(sgd, model, every=4, outer=some)
    with pytest.raises(ValueError, match="fragments=5, but the optimizer has 4 parameters"):
        torchring.DiLoCo(sgd, model, every=5, fragments=5)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = torchring.DiLoCo(sgd, model, every=4, fragments=4, bits=4, outer=outer)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(4):
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
