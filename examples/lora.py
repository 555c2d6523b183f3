"""LoRA: train small adapters around a frozen, sharded model, and export them alone and merged.

python examples/lora.py                                                     # 2 processes, or all GPUs of the machine
python examples/lora.py --pretrained outputs/own_module/model               # the same, after examples/own_module.py
torchrun --nproc-per-node 8 examples/lora.py --pretrained /models/llama-3-8b \
  --text "/data/*.txt" --precision bf16-mixed --learning-rate 1e-4 --tp-size 2                          # needs GPUs
"""

import argparse
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_fsdp2 import CausalLM, CheckpointConfig, FSDP2Strategy, TextDataModule, export_hf

SMALL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="directory or hub id of a model; default: a small new one")
    parser.add_argument("--text", default=str(Path(__file__).parent / "*.py"), help="files to train on")
    parser.add_argument("--devices", type=int, default=torch.accelerator.device_count() or 2)
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    pl.seed_everything(1)
    module = CausalLM(
        pretrained=arguments.pretrained,
        config=None if arguments.pretrained else SMALL,
        lora={"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        optimizer=partial(torch.optim.AdamW, lr=arguments.learning_rate),
    )
    strategy = FSDP2Strategy(
        tp_size=arguments.tp_size,
        checkpoint=CheckpointConfig(frozen_parameters=False),  # only the adapter, if the base can be read again
    )
    logger = CSVLogger("outputs", name="lora")
    trainer = pl.Trainer(
        devices=arguments.devices,
        strategy=strategy,
        precision=arguments.precision,
        max_steps=arguments.steps,
        logger=logger,
        log_every_n_steps=10,
    )
    data = TextDataModule(
        path=arguments.text, tokenizer=arguments.pretrained, sequence_length=128, batch_size=1, global_batch_size=8
    )
    trainer.fit(module, data)
    options = {"tokenizer": data.tokenizer, "overwrite": True}
    export_hf(module, "outputs/lora/adapter", **options)  # for peft's `PeftModel.from_pretrained`
    export_hf(module, "outputs/lora/model", merge=True, **options)  # for `AutoModelForCausalLM.from_pretrained`
