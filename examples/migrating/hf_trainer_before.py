"""Before: the Trainer of transformers 5, which shards with accelerate's FSDP2.

torchrun --nproc-per-node 8 examples/migrating/hf_trainer_before.py /models/llama-3-8b --bf16           # needs GPUs
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

TEXT = Path(__file__).with_name("model_parallel_before.py")


class Sequences(Dataset):
    def __init__(self, tokens: list[int]) -> None:
        self.sequences = torch.tensor(tokens[: len(tokens) // 64 * 64]).view(-1, 64)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.sequences[index]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pretrained")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()

    options = TrainingArguments(
        output_dir="outputs/hf_trainer_before",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=1.0,
        bf16=arguments.bf16,
        fsdp=True,
        fsdp_config={"activation_checkpointing": True},
        save_steps=500,
        logging_steps=1,
    )
    model = AutoModelForCausalLM.from_pretrained(arguments.pretrained, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.pretrained)
    data = Sequences(tokenizer(TEXT.read_text())["input_ids"])
    trainer = Trainer(model, options, train_dataset=data)
    trainer.train()
    trainer.save_model("outputs/hf_trainer_before/model")
    trainer.save_state()
