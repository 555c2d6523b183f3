"""Your own LightningModule around a Hugging Face model: with its own loss, and without sharding code.

python examples/own_module.py                                               # 2 processes, or all GPUs of the machine
torchrun --nproc-per-node 8 examples/own_module.py --pretrained /models/llama-3-8b \
  --text "/data/*.txt" --precision bf16-mixed --learning-rate 1e-5 --tp-size 2                          # needs GPUs
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fsdp2 import FSDP2Strategy, TextDataModule, export_hf
from lightning_fsdp2.models import from_pretrained

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class LanguageModel(pl.LightningModule):
    def __init__(self, pretrained: str | None = None, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        """Build the model without weights. Each rank later reads or initialises its own shards of them."""
        if self.model is not None:
            return
        if self.hparams.pretrained:
            self.model = from_pretrained(self.hparams.pretrained)
        else:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=257, **SMALL))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, use_cache=False)
        z_loss = output.logits.logsumexp(-1).square().mean()  # keeps logits near 0 (PaLM, arXiv:2204.02311)
        self.log("train/loss", output.loss, prog_bar=True, sync_dist=True)
        return output.loss + 1e-4 * z_loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="directory or hub id of a model; default: a small new one")
    parser.add_argument("--text", default=str(Path(__file__).parent / "*.py"), help="files to train on")
    parser.add_argument("--devices", type=int, default=torch.accelerator.device_count() or 2)
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    pl.seed_everything(1)
    strategy = FSDP2Strategy(tp_size=arguments.tp_size)
    logger = CSVLogger("outputs", name="own_module")
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
    module = LanguageModel(arguments.pretrained, arguments.learning_rate)
    trainer.fit(module, data)
    export_hf(module, "outputs/own_module/model", tokenizer=data.tokenizer, overwrite=True)  # for `from_pretrained`
