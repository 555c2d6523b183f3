"""After: the same loop with lightning_fsdp2; compare with accelerate_before.py beside it.

torchrun --nproc-per-node 2 examples/migrating/accelerate_after.py outputs/own_module/model  # after own_module.py
torchrun --nproc-per-node 8 examples/migrating/accelerate_after.py /models/llama-3-8b \
  --dp-replicate-size 2                                                                      # needs GPUs
"""

import argparse
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_cosine_schedule_with_warmup

import lightning_fsdp2 as lf
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.models import from_pretrained

STATE = "outputs/accelerate_after/state"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pretrained")
    parser.add_argument("--dp-replicate-size", type=int, default=1)
    parser.add_argument("--param-dtype", default="bfloat16", help="dtype to compute in")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="continue from the state of the last run")
    arguments = parser.parse_args()

    config = lf.FSDP2Config(activation_checkpointing=True, mp_policy={"param_dtype": arguments.param_dtype})
    mesh = lf.create_device_mesh(config, dp_replicate_size=arguments.dp_replicate_size)
    model = lf.FSDP2Manager(config, mesh).parallelize(from_pretrained(arguments.pretrained))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    steps = arguments.steps
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 5, num_training_steps=steps)
    tokens = torch.tensor(list(Path(__file__).with_name("model_parallel_before.py").read_bytes()))
    sequences = tokens[: len(tokens) // 64 * 64].view(-1, 64)
    ranks = get_mesh(mesh, "data_parallel")
    sampler = DistributedSampler(sequences, ranks.size(), ranks.get_local_rank(), shuffle=False)
    data = DataLoader(sequences, batch_size=1, sampler=sampler)

    if arguments.resume:
        scheduler.load_state_dict(lf.load_checkpoint(STATE, model, optimizer))
    first, last = 2 * scheduler.last_epoch, 2 * arguments.steps
    for number, sequences in enumerate(islice(data, first, last), first):
        sequences = sequences.to(model.device)
        is_last = number % 2 == 1
        with nullcontext() if is_last else lf.defer_grad_sync(model):
            loss = model(input_ids=sequences, labels=sequences).loss
            (loss / 2).backward()
        if is_last:
            norm = lf.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"micro-batch {number + 1:3}  loss {mean.item() / dist.get_world_size():.6f}")
    lf.save_checkpoint(STATE, model, optimizer, extra=scheduler.state_dict())
    lf.export_hf(model, "outputs/accelerate_after/model", overwrite=True)
