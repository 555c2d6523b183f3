"""After: the Trainer of Lightning with FSDP2Strategy; compare with hf_trainer_before.py beside it.

torchrun --nproc-per-node 2 examples/migrating/hf_trainer_after.py outputs/own_module/model  # after own_module.py
torchrun --nproc-per-node 8 examples/migrating/hf_trainer_after.py /models/llama-3-8b --bf16            # needs GPUs
"""

import argparse
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from transformers import get_cosine_schedule_with_warmup

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy, TextDataModule
from lightning_fsdp2.callbacks import HuggingFaceExport

TEXT = Path(__file__).with_name("model_parallel_before.py")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pretrained")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()

    trainer = pl.Trainer(
        devices="auto" if torch.accelerator.is_available() else 2,
        strategy=FSDP2Strategy(config=FSDP2Config(activation_checkpointing=True)),
        precision="bf16-mixed" if arguments.bf16 else "32-true",
        max_steps=arguments.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger("outputs", name="hf_trainer_after"),
        callbacks=[
            ModelCheckpoint(every_n_train_steps=500),
            HuggingFaceExport(dirpath="outputs/hf_trainer_after/model", overwrite=True),
        ],
    )
    module = CausalLM(
        pretrained=arguments.pretrained,
        optimizer=partial(torch.optim.AdamW, lr=arguments.learning_rate, weight_decay=0.1),
        lr_scheduler=partial(get_cosine_schedule_with_warmup, num_warmup_steps=2, num_training_steps=arguments.steps),
    )
    data = TextDataModule(
        path=str(TEXT),
        tokenizer=arguments.pretrained,
        sequence_length=64,
        batch_size=1,
        shuffle=False,
        validation_fraction=0,
    )
    trainer.fit(module, data)
