"""After: the same loop with lightning_fsdp2; compare with automodel_before.py beside it.

torchrun --nproc-per-node 2 examples/migrating/automodel_after.py outputs/own_module/model   # after own_module.py
torchrun --nproc-per-node 8 examples/migrating/automodel_after.py /models/llama-3-8b         # needs GPUs
"""

import argparse
from contextlib import nullcontext

import torch

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.models import from_pretrained

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pretrained")
    parser.add_argument("--dp-replicate-size", type=int, default=1)
    arguments = parser.parse_args()

    config = FSDP2Config(activation_checkpointing=True)
    mesh = create_device_mesh(config, dp_replicate_size=arguments.dp_replicate_size)
    model = FSDP2Manager(config, mesh).parallelize(from_pretrained(arguments.pretrained))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    for step in range(10):
        for micro_batch in range(2):
            tokens = torch.randint(100, (1, 64), device=model.device)
            with nullcontext() if micro_batch == 1 else defer_grad_sync(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}  loss {loss.item():.4f}")
