"""Fine-tune a language model with the Trainer of Hugging Face and LoRA, and save the adapter.

    python examples/finetune_lora.py                       one process
    torchring run -np 2 examples/finetune_lora.py          two processes

Nothing is downloaded. The base model is a tiny Llama, which is first trained on source code of Python's standard
library. LoRA then adapts the model to English, the texts of Python's help(). In a script of your own, from_pretrained()
takes the place of the first training. This loads what the script has saved:

    base = AutoModelForCausalLM.from_pretrained("lora/base")
    model = PeftModel.from_pretrained(base, "lora/adapter")

Needs: transformers, accelerate, peft.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainingArguments

import torchring
from torchring.transformers import RingTrainer  # in place of transformers.Trainer

CONTEXT = 64  # tokens


def make_rows(text: str) -> list[dict[str, torch.Tensor]]:
    """A byte is a token. In a script of your own, a tokenizer makes the tokens."""
    tokens = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in tokens.split(CONTEXT)[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of each of the two trainings")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--out", default="lora", help="folder for the base model and the adapter")
    args = parser.parse_args()
    torch.manual_seed(0)

    folder = Path(os.__file__).parent
    code = "".join((folder / f"{name}.py").read_text("utf-8") for name in ("argparse", "ast", "tarfile", "typing"))
    english = make_rows("".join(topics.values()))
    training_rows, test_rows = english[512:], english[:512]

    def make_trainer(model: PreTrainedModel, rows: list[dict[str, torch.Tensor]]) -> RingTrainer:
        arguments = TrainingArguments(
            args.out,
            max_steps=args.steps,
            per_device_train_batch_size=max(1, args.batch_size // torchring.size()),
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            warmup_steps=args.steps // 10,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=25,
            save_strategy="no",
            report_to=[],
        )
        return RingTrainer(model, arguments, train_dataset=rows, eval_dataset=test_rows)

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,  # that of large models is too small for this one
    )
    base = LlamaForCausalLM(config)
    trainer = make_trainer(base, make_rows(code))
    trainer.train()
    trainer.save_model(f"{args.out}/base")  # rank 0 writes

    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=args.lora_rank, target_modules="all-linear"))
    trainer = make_trainer(model, training_rows)
    before = trainer.evaluate()["eval_loss"]  # the mean over the rows of all ranks
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{args.out}/adapter")
    if torchring.rank() == 0:
        trained, total = model.get_nb_trainable_parameters()
        print(f"LoRA trains {trained:,} of {total:,} parameters")
        print(f"test loss: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
