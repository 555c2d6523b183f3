"""Two optimizers and manual optimisation: a generator learns to draw points that a discriminator accepts as real.

python examples/two_optimizers.py                                           # 2 processes, or all GPUs of the machine
torchrun --nproc-per-node 8 examples/two_optimizers.py                                                  # needs GPUs
"""

import argparse
from itertools import pairwise

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fsdp2 import FSDP2Strategy


def make_network(*widths: int) -> nn.Sequential:
    layers = [layer for pair in pairwise(widths) for layer in (nn.LeakyReLU(0.2), nn.Linear(*pair))]
    return nn.Sequential(*layers[1:])


class AdversarialPair(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = make_network(2, 64, 64, 2)
        self.discriminator = make_network(2, 64, 64, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        noise, real = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()

        # in this block, the other network's gradients are neither computed nor communicated
        with discriminator_optimizer.toggle_model():
            fake = self.generator(noise).detach()
            loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
            self.manual_backward(loss)
            discriminator_optimizer.step()
            discriminator_optimizer.zero_grad()
        self.log("train/discriminator_loss", loss, prog_bar=True, sync_dist=True)

        with generator_optimizer.toggle_model():
            points = self.generator(noise)
            loss = F.softplus(-self.discriminator(points)).mean()
            self.manual_backward(loss)
            generator_optimizer.step()
            generator_optimizer.zero_grad()
        distance = (points.detach().norm(dim=-1) - 1).abs().mean()  # from the circle that the generator should draw
        self.log_dict({"train/generator_loss": loss, "train/distance": distance}, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = ((self.generator, 1e-3), (self.discriminator, 3e-3))
        return [torch.optim.AdamW(network.parameters(), lr=lr, betas=(0.5, 0.99)) for network, lr in networks]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.accelerator.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()

    pl.seed_everything(1)
    angles = 2 * torch.pi * torch.rand(4096)
    data = TensorDataset(torch.randn(4096, 2), torch.stack([angles.cos(), angles.sin()], dim=1))
    logger = CSVLogger("outputs", name="two_optimizers")
    trainer = pl.Trainer(
        devices=arguments.devices,
        strategy=FSDP2Strategy(),
        max_epochs=arguments.epochs,
        logger=logger,
        log_every_n_steps=10,
    )
    trainer.fit(AdversarialPair(), DataLoader(data, batch_size=128 // arguments.devices))
