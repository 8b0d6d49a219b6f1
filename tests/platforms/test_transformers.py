"""`torchring.transformers` trains as the Trainer does with DDP, and as one process that has all of the data.

One job of two ranks tries all cases, because importing transformers takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import torchring
from tests.support.documents import ROOT, blocks
from tests.support.harness import run_ranks
from tests.support.training import attempt

pytestmark = pytest.mark.platforms

PAGE = ROOT / "docs" / "platforms" / "transformers.md"
_folders = itertools.count()


class _Rows(Dataset[dict[str, Tensor]]):
    """Of 2 to 11 tokens that count, so ranks and micro-batches have different numbers of them."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 64, (size, 12), generator=generator)
        self.lengths = torch.randint(2, 12, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def _gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(torchring.rank())  # ranks begin with rank 0's weights, whatever they have made
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, **quiet))


def _arguments(arguments: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6, "logging_steps": 1}
    folder = options.pop("output_dir", f"run{next(_folders)}")
    given = {"use_cpu": True, "learning_rate": 1e-2, **usual, **quiet, **options}
    return (arguments or TrainingArguments)(output_dir=folder, **given)


def _trained(kind: Any, *, model: Any = None, size: int = 160, resume: Any = None, **options: Any) -> Any:
    extra = {
        key: options.pop(key) for key in ("optimizers", "eval_dataset", "model_init", "callbacks") if key in options
    }
    if "model_init" not in extra:
        extra["model"] = model or _gpt()
    trainer = kind(args=_arguments(**options), train_dataset=_Rows(size), **extra)
    with contextlib.redirect_stdout(io.StringIO()):  # the logged losses
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _weights(trainer: Any) -> list[float]:
    weights: list[float] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()
    return weights


def _num_reductions(trainer: Any) -> int:
    return int(trainer.optimizer.optimizer.stats().num_reductions)


@contextlib.contextmanager
def _launched_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


def _parity(ring: Any) -> dict[str, Any]:
    from transformers import Trainer

    schedule = {"lr_scheduler_type": "cosine", "warmup_steps": 5, "max_grad_norm": 0.5}
    fifty = {"max_steps": 50, **schedule}
    mine, ddp = _trained(ring, **fifty), _trained(Trainer, **fifty)
    with _launched_alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchring, "rank", lambda: 0)  # the weights of rank 0
        one = _trained(Trainer, **{**fifty, "gradient_accumulation_steps": 4})
    assert (type(ddp.model_wrapped).__name__, type(one.model_wrapped).__name__) == (
        "DistributedDataParallel",
        "GPT2LMHeadModel",
    )
    half = {"bf16": True, **schedule}
    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return {
        "losses": [_losses(mine), _losses(ddp), _losses(one)],
        "weights": [_weights(mine), _weights(ddp), _weights(one)],
        "num_reductions": _num_reductions(mine),
        "bf16": [_weights(_trained(ring, **half)), _weights(_trained(Trainer, **half))],
        "checkpointed": [_weights(_trained(ring, **checkpointed)), _weights(_trained(ring))],
        # The last step of an epoch has a single micro-batch then.
        "uneven": [_weights(_trained(ring, size=21, max_steps=5)), _weights(_trained(Trainer, size=21, max_steps=5))],
    }


def _options(ring: Any) -> dict[str, Any]:
    class Sharded(ring):  # type: ignore[misc]
        @property
        def wrap_options(self) -> dict[str, Any]:
            return {"shard": self.args.optim == "adamw_torch"}

    model = _gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    given = _trained(ring, model=model, optimizers=(optimizer, None))
    before = _weights(given)
    with contextlib.redirect_stdout(io.StringIO()):
        given.train()
    found = {
        "given": [before, _weights(_trained(ring, optim="adamw_torch")), int(_num_reductions(given))],
        "twice": before != _weights(given),
        "another": attempt(lambda: _trained(ring, model=model, max_steps=1)),  # while the first trainer is there
        "seen": _weights(_trained(ring, optim="adamw_torch", use_cpu=False)),
    }
    saving = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "lr_scheduler_type": "linear"}
    for name, kind in (("resumed", ring), ("sharded", Sharded)):
        whole = _trained(kind, output_dir=name, **saving)
        again = _trained(kind, output_dir=name, resume=f"{name}/checkpoint-3", **saving)
        found[name] = [_weights(whole), _weights(again), len(whole.optimizer.state)]
    return found


def _evaluation(ring: Any) -> dict[str, Any]:
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best |= {"load_best_model_at_end": True, "save_total_limit": 1, "greater_is_better": True}  # the first is the best
    trainer = _trained(ring, eval_dataset=_Rows(10), **best)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {
        "losses": losses,
        "best": trainer.evaluate()["eval_loss"],
        "copy": pickle.dumps(copy.deepcopy(trainer.model)),
    }


def _trials(ring: Any) -> list[list[float]]:
    import optuna

    optuna.logging.disable_default_handler()
    trainer = ring(args=_arguments(), train_dataset=_Rows(160), eval_dataset=_Rows(10), model_init=lambda _: _gpt())
    found: list[list[float]] = []

    def objective(_: dict[str, float]) -> float:
        found.append(_weights(trainer))
        return 0.0

    with contextlib.redirect_stdout(io.StringIO()):
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
            compute_objective=objective,
            n_trials=2,
            backend="optuna",
        )
        trainer.train()
    return [*found, _weights(trainer)]


def _sequences(ring_mixin: Any) -> list[list[float]]:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    class RingSeq2SeqTrainer(ring_mixin, Seq2SeqTrainer):  # type: ignore[misc]
        pass

    found = []
    for kind in (RingSeq2SeqTrainer, Seq2SeqTrainer):
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, dropout_rate=0.0, **sizes))
        options = {"arguments": Seq2SeqTrainingArguments, "predict_with_generate": True, "generation_max_length": 4}
        trainer = _trained(kind, model=model, eval_dataset=_Rows(6), **options)
        found.append([*_weights(trainer), *trainer.predict(_Rows(6)).predictions.flatten().tolist()])
    return found


def _mistakes(ring: Any) -> dict[str, str]:
    from accelerate import PartialState
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Trainer, TrainerCallback

    class Bypassing(ring):  # type: ignore[misc]
        """Prepares the model alone, as a trainer does that steps its optimizer itself."""

        def create_optimizer(self, *arguments: Any) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-2)
            prepare = self.accelerator.prepare
            self.accelerator.prepare = lambda model, optimizer: (prepare(model), optimizer)
            return self.optimizer

    class Compressing(ring):  # type: ignore[misc]
        wrap_options = {"compression": "fp15"}  # noqa: RUF012

    def unfreezing() -> None:
        """In mid-training, a callback unfreezes what the Trainer has left out of its optimizer."""

        class Unfreeze(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
                model.transformer.wte.requires_grad_(state.global_step >= 2)

        frozen = _gpt()
        frozen.transformer.wte.requires_grad_(False)
        _trained(ring, model=frozen, callbacks=[Unfreeze()], max_steps=8)

    PartialState()
    model = _gpt()
    wrapped = torchring.wrap(torch.optim.AdamW(model.parameters()), model)
    engine = _arguments()
    engine.fsdp = ["full_shard"]  # which TrainingArguments refuses itself on CPUs
    return {
        "ddp": attempt(lambda: _trained(ring, model=DistributedDataParallel(_gpt()))),
        "both": attempt(lambda: _trained(Trainer, model=model, optimizers=(wrapped, None))),
        "engine": attempt(lambda: ring(args=engine, model=_gpt())),
        "none": attempt(lambda: _trained(Bypassing)),
        "option": attempt(lambda: _trained(Compressing)),
        "unfrozen": attempt(unfreezing),
    }


def _page(rank: int) -> dict[str, Any]:
    code, mixin = [block.code for block in blocks(PAGE, "python")]
    exec(compile(mixin, PAGE.name, "exec"), {})
    outcome: dict[str, Any] = {}
    for name, text in (
        ("ring", code),
        ("ddp", code.replace("from torchring.transformers import RingTrainer as", "from transformers import")),
    ):
        assert name == "ring" or text != code
        namespace: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, PAGE.name, "exec"), namespace)
        outcome[name] = _weights(namespace["trainer"])
        assert Path("gpt2-tiny", "model.safetensors").exists() or rank > 0
    return outcome


def _all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    from torchring.transformers import RingMixin, RingTrainer

    with contextlib.suppress(ImportError):
        from transformers.utils import logging

        logging.set_verbosity_error()
    cases = {case.__name__: case(RingTrainer) for case in (_parity, _options, _evaluation, _trials, _mistakes)}
    return {**cases, "_sequences": _sequences(RingMixin), "_page": _page(rank)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("transformers"))
    return run_ranks(_all, 2, folder, deadline=240, env={"HF_HUB_OFFLINE": "1"})


def test_fifty_steps_are_those_of_ddp_and_of_one_process(outcomes: list[dict[str, Any]]) -> None:
    """The losses are means over tokens, of which ranks and micro-batches have different numbers."""
    for rank in outcomes:
        found = rank["_parity"]
        losses, ddp, one = found["losses"]
        assert len(losses) == found["num_reductions"] == 50
        assert losses[0] - losses[-1] > 0.05
        assert losses == pytest.approx(ddp, abs=1e-6)
        assert losses == pytest.approx(one, abs=1e-5)
        weights, ddp, one = found["weights"]
        assert weights == pytest.approx(ddp, abs=1e-6)
        assert weights == pytest.approx(one, abs=1e-3)  # AdamW makes much of gradients that are 0 but for rounding
        assert weights == outcomes[0]["_parity"]["weights"][0]


@pytest.mark.parametrize("case", ["bf16", "checkpointed", "uneven"])
def test_weights_are_those_of(outcomes: list[dict[str, Any]], case: str) -> None:
    for rank in outcomes:
        weights, expected = rank["_parity"][case]
        assert weights == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert weights == outcomes[0]["_parity"][case][0]
    assert outcomes[0]["_parity"]["bf16"][0] != outcomes[0]["_parity"]["uneven"][0]


def test_an_optimizer_that_is_given_and_a_second_training(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        given, own, num_reductions = rank["_options"]["given"]
        assert given == pytest.approx(own, rel=1e-6, abs=1e-7)
        assert num_reductions == 12  # of both trainings
        assert rank["_options"]["twice"]
        assert rank["_options"]["another"] == ""


def test_without_use_cpu_all_ranks_train_together(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        assert rank["_options"]["seen"] == outcomes[0]["_options"]["given"][1]


@pytest.mark.parametrize("case", ["resumed", "sharded"])
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(outcomes: list[dict[str, Any]], case: str) -> None:
    for rank in outcomes:
        whole, again, _ = rank["_options"][case]
        assert whole == again == outcomes[0]["_options"]["resumed"][0]
    kept = [rank["_options"][case][2] for rank in outcomes]
    everything = outcomes[0]["_options"]["resumed"][2]
    assert kept == [everything] * 2 if case == "resumed" else max(kept) < everything


def test_the_best_model_is_loaded_at_the_end(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        losses, best = rank["_evaluation"]["losses"], rank["_evaluation"]["best"]
        assert best == pytest.approx(losses[0]) != pytest.approx(losses[-1])
        assert b"torchring" not in rank["_evaluation"]["copy"]


def test_trials_train_models_of_their_own(outcomes: list[dict[str, Any]]) -> None:
    first, second, last = outcomes[0]["_trials"]
    assert first != second == last  # with the learning rate of the second trial
    assert last == outcomes[1]["_trials"][-1]


def test_the_mixin_serves_other_trainers(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        ring, ddp = rank["_sequences"]
        assert ring == pytest.approx(ddp, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("ddp", "ValueError: the model is a DistributedDataParallel"),
        ("both", "belongs to a DistributedDataParallel"),
        ("engine", "ValueError: fsdp asks for an engine"),
        ("none", "GradientError: nobody reduces the gradients of the GPT2LMHeadModel"),
        ("option", "compression"),
        ("unfrozen", "transformer.wte.weight"),
        ("unfrozen", "that nobody reduces"),
    ],
)
def test_a_mistake_is_an_error(outcomes: list[dict[str, Any]], case: str, said: str) -> None:
    for rank in outcomes:
        assert said in rank["_mistakes"][case]


def test_the_page_is_run_as_pasted(outcomes: list[dict[str, Any]]) -> None:
    for rank in outcomes:
        assert rank["_page"]["ring"] == pytest.approx(rank["_page"]["ddp"], rel=1e-6, abs=1e-7)
        assert rank["_page"]["ring"] == outcomes[0]["_page"]["ring"]
