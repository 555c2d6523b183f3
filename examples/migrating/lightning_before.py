"""Before: Lightning's DDPStrategy on CPUs, or its FSDPStrategy (Lightning 2.6) on GPUs.

torchrun --nproc-per-node 2 examples/migrating/lightning_before.py                                        # on a laptop
torchrun --nproc-per-node 8 examples/migrating/lightning_before.py --strategy fsdp                        # needs GPUs
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class LanguageModel(pl.LightningModule):
    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=257, **SMALL))

    def training_step(self, sequences: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=sequences, labels=sequences, use_cache=False).loss
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    pl.seed_everything(1)
    if arguments.strategy == "ddp":
        strategy = DDPStrategy(static_graph=True)
    else:
        strategy = FSDPStrategy(
            auto_wrap_policy={LlamaDecoderLayer},
            activation_checkpointing_policy={LlamaDecoderLayer},
            sharding_strategy="FULL_SHARD",
            state_dict_type="sharded",
        )
    logger = CSVLogger("outputs", name="lightning_before")
    trainer = pl.Trainer(
        devices="auto" if torch.accelerator.is_available() else 2,
        strategy=strategy,
        max_steps=arguments.steps,
        logger=logger,
        log_every_n_steps=1,
    )
    tokens = torch.tensor(list(Path(__file__).with_name("model_parallel_before.py").read_bytes()))
    data = DataLoader(tokens[: len(tokens) // 64 * 64].view(-1, 64), batch_size=2)
    trainer.fit(LanguageModel(), data)
