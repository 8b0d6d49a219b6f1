"""`torchring.transformers` trains as the Trainer does with DDP, and as one process that has all of the data."""

import contextlib
import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import torchring
from tests.platforms.cases import Cases, assert_refused, close, flat, run_page, same, without_torchrun
from tests.support.documents import ROOT, blocks
from torchring.gradients.views import CAN_SWAP

pytestmark = pytest.mark.platforms
case = Cases(__name__, deadline=240, env={"HF_HUB_OFFLINE": "1"})

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
    _quietly(trainer.train, resume_from_checkpoint=resume)
    return trainer


def _quietly(act: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Without the logged losses."""
    with contextlib.redirect_stdout(io.StringIO()):
        act(*args, **options)


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _weights(trainer: Any) -> list[float]:
    return flat(trainer.model.parameters())


def _num_reductions(trainer: Any) -> int:
    return int(trainer.optimizer.optimizer.stats().num_reductions)


def _ring() -> Any:
    from transformers.utils import logging

    from torchring.transformers import RingTrainer

    logging.set_verbosity_error()
    return RingTrainer


@case
def test_fifty_steps_are_those_of_ddp_and_of_one_process(rank: int) -> None:
    """The losses are means over tokens, of which ranks and micro-batches have different numbers."""
    from transformers import Trainer

    half = {"bf16": True, "max_grad_norm": 0.5}
    assert _weights(_trained(_ring(), **half)) == close(_weights(_trained(Trainer, **half)))
    fifty = {"lr_scheduler_type": "cosine", "warmup_steps": 5, "max_grad_norm": 0.5, "max_steps": 50}
    mine, ddp = _trained(_ring(), **fifty), _trained(Trainer, **fifty)
    with without_torchrun(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchring, "rank", lambda: 0)  # the weights of rank 0
        one = _trained(Trainer, **{**fifty, "gradient_accumulation_steps": 4})
    kinds = [type(each.model_wrapped).__name__ for each in (mine, ddp, one)]
    assert kinds == ["GPT2LMHeadModel", "DistributedDataParallel", "GPT2LMHeadModel"]
    losses, weights = _losses(mine), same(_weights(mine))
    assert len(losses) == _num_reductions(mine) == 50
    assert losses[0] - losses[-1] > 0.05
    assert losses == close(_losses(ddp))
    assert losses == close(_losses(one), abs=1e-5)
    assert weights == close(_weights(ddp))
    assert weights == close(_weights(one), abs=1e-3)  # AdamW makes much of gradients that are 0 but for rounding


@case
def test_an_optimizer_that_is_given_and_a_second_training(rank: int) -> None:
    model = _gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    given = _trained(_ring(), model=model, optimizers=(optimizer, None))
    before, own = _weights(given), _weights(_trained(_ring(), optim="adamw_torch"))
    assert before == close(own)
    _quietly(given.train)
    assert _num_reductions(given) == 12  # of both trainings
    assert before != _weights(given)
    _trained(_ring(), model=model, max_steps=1)  # while the first trainer is there
    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert _weights(_trained(_ring(), optim="adamw_torch", **checkpointed)) == close(own)
    # Without use_cpu all ranks train together.
    assert _weights(_trained(_ring(), optim="adamw_torch", use_cpu=False)) == same(own)


@case
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(rank: int) -> None:
    class Sharded(_ring()):
        @property
        def wrap_options(self) -> dict[str, Any]:
            return {"shard": CAN_SWAP and self.args.optim == "adamw_torch"}

    saving = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "lr_scheduler_type": "linear"}
    found, kept = [], []
    for name, kind in (("resumed", _ring()), ("sharded", Sharded)):
        whole = _trained(kind, output_dir=name, **saving)
        again = _trained(kind, output_dir=name, resume=f"{name}/checkpoint-3", **saving)
        found += [_weights(whole), _weights(again)]
        kept.append(torchring.all_gather_object(len(whole.optimizer.state)))
    assert same(found) == found[:1] * 4
    assert kept[0] == [kept[0][0]] * 2
    assert (max(kept[1]) < kept[0][0]) is CAN_SWAP


@case
def test_the_best_model_is_loaded_at_the_end(rank: int) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best |= {"load_best_model_at_end": True, "save_total_limit": 1, "greater_is_better": True}  # the first is the best
    trainer = _trained(_ring(), eval_dataset=_Rows(10), **best)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0]) != pytest.approx(losses[-1])
    assert b"torchring" not in pickle.dumps(copy.deepcopy(trainer.model))


@case
def test_trials_train_models_of_their_own(rank: int) -> None:
    import optuna

    optuna.logging.disable_default_handler()
    trainer = _ring()(args=_arguments(), train_dataset=_Rows(160), eval_dataset=_Rows(10), model_init=lambda _: _gpt())
    found: list[list[float]] = []

    def objective(_: dict[str, float]) -> float:
        found.append(_weights(trainer))
        return 0.0

    space = {"hp_space": lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)}}
    _quietly(trainer.hyperparameter_search, compute_objective=objective, n_trials=2, backend="optuna", **space)
    _quietly(trainer.train)
    every = torchring.all_gather_object([*found, _weights(trainer)])
    first, second, last = every[0]
    assert first != second == last == every[1][-1]  # with the learning rate of the second trial


@case
def test_the_mixin_serves_other_trainers(rank: int) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from torchring.transformers import RingMixin

    class RingSeq2SeqTrainer(RingMixin, Seq2SeqTrainer):
        pass

    found = []
    for kind in (RingSeq2SeqTrainer, Seq2SeqTrainer):
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, dropout_rate=0.0, **sizes))
        options = {"arguments": Seq2SeqTrainingArguments, "predict_with_generate": True, "generation_max_length": 4}
        trainer = _trained(kind, model=model, eval_dataset=_Rows(6), **options)
        found.append([*_weights(trainer), *trainer.predict(_Rows(6)).predictions.flatten().tolist()])
    assert found[0] == close(found[1])


@case
def test_the_page_is_run_as_pasted(rank: int) -> None:
    exec(blocks(PAGE, "python")[1].code, {})
    ring, plain = run_page(PAGE, "from torchring.transformers import RingTrainer as", "from transformers import")
    assert Path("gpt2-tiny", "model.safetensors").exists() or rank > 0
    assert same(_weights(ring["trainer"])) == close(_weights(plain["trainer"]))


@case
def test_a_mistake_is_an_error(rank: int) -> None:
    """More of them in test_accelerate.py: a RingTrainer has a RingAccelerator."""
    from accelerate import PartialState

    PartialState()
    engine = _arguments()
    engine.fsdp = ["full_shard"]  # which TrainingArguments refuses itself on CPUs
    assert_refused(
        (lambda: _trained(_ring(), model=torch.nn.parallel.DistributedDataParallel(_gpt())),
         "ValueError: the model is a DistributedDataParallel"),
        (lambda: _ring()(args=engine, model=_gpt()), "ValueError: fsdp asks for an engine"),
    )  # fmt: skip
