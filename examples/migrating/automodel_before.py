"""Before: a hand-written loop around a model of NeMo Automodel 0.7.0.

pip install nemo-automodel==0.7.0
torchrun --nproc-per-node 8 examples/migrating/automodel_before.py /models/llama-3-8b       # needs GPUs
"""

import argparse

import torch
from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel.components.distributed import (
    DistributedSetup,
    FSDP2Config,
    ParallelismSizes,
    initialize_distributed,
)
from nemo_automodel.components.distributed.utils import get_sync_ctx

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pretrained")
    parser.add_argument("--dp-replicate-size", type=int, default=1)
    arguments = parser.parse_args()

    world_size = initialize_distributed("nccl").world_size
    setup = DistributedSetup.build(
        strategy=FSDP2Config(enable_fsdp2_prefetch=True),
        parallelism_sizes=ParallelismSizes(dp_replicate_size=arguments.dp_replicate_size),
        activation_checkpointing=True,
        world_size=world_size,
    )
    model = NeMoAutoModelForCausalLM.from_pretrained(arguments.pretrained, dtype=torch.float32, distributed_setup=setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    for step in range(10):
        for micro_batch in range(2):
            tokens = torch.randint(100, (1, 64), device="cuda")
            with get_sync_ctx(model, is_optim_step=micro_batch == 1, defer_fsdp_grad_sync=True):
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}  loss {loss.item():.4f}")
