"""A tensor parallel plan for your own model: which layers are split, and how.

python examples/own_tp_plan.py                                 # 2 processes, each of which holds half of every layer
torchrun --nproc-per-node 8 examples/own_tp_plan.py --tp-size 4                                         # needs GPUs
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy, TextDataModule

# Patterns of names in the LightningModule. In a column-wise layer, each rank computes its part of the outputs. The
# next layer is row-wise: it takes this part as its input, and the ranks' results are added up.
# docs/tensor_parallel.md lists the other styles.
PLAN = {
    "embedding": "embedding_rowwise",
    **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"layers.*.{name}": "rowwise" for name in ("out", "down")},
    "head": "colwise_gather_output",
}


class Layer(nn.Module):
    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        # -1 and not the number of heads, because a rank has only its own heads
        heads = [layer(normed).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*(head.transpose(1, 2) for head in heads), is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class OwnModel(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, width)
        self.layers = nn.ModuleList(Layer(width, head_width=16) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 257, bias=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.accelerator.device_count() or 2)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    pl.seed_everything(1)
    strategy = FSDP2Strategy(tp_size=arguments.tp_size, config=FSDP2Config(tp_plan=PLAN))
    logger = CSVLogger("outputs", name="own_tp_plan")
    trainer = pl.Trainer(
        devices=arguments.devices, strategy=strategy, max_steps=arguments.steps, logger=logger, log_every_n_steps=10
    )
    text = str(Path(__file__).parent / "*.py")
    trainer.fit(OwnModel(), TextDataModule(path=text, sequence_length=128, batch_size=1, global_batch_size=8))
