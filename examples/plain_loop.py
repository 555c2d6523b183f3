"""A plain torch loop without Lightning: shard, accumulate, clip, save, and continue from the last run's checkpoint.

torchrun --nproc-per-node 2 examples/plain_loop.py                                          # 2 processes on a laptop
torchrun --nproc-per-node 8 examples/plain_loop.py --pretrained /models/llama-3-8b \
  --learning-rate 1e-5 --tp-size 2                                                                      # needs GPUs
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import lightning_fsdp2 as lf
from lightning_fsdp2.data import build_byte_tokenizer
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.models import from_pretrained

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CHECKPOINT = "outputs/plain_loop.ckpt"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="directory or hub id of a model; default: a small new one")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()

    config = lf.FSDP2Config(activation_checkpointing=True)  # computes in bfloat16, the rest is float32
    mesh = lf.create_device_mesh(config, tp_size=arguments.tp_size)  # over torchrun's processes
    data_ranks = get_mesh(mesh, "data_parallel")

    torch.manual_seed(1)
    if arguments.pretrained:
        model, tokenizer = from_pretrained(arguments.pretrained), AutoTokenizer.from_pretrained(arguments.pretrained)
    else:
        with torch.device("meta"):  # each rank initialises its shards
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=257, **SMALL))
        tokenizer = build_byte_tokenizer()
    model = lf.FSDP2Manager(config, mesh).parallelize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)

    tokens = torch.tensor(tokenizer(Path(__file__).read_text())["input_ids"], device=model.device)
    sequences = tokens[: len(tokens) // 64 * 64].view(-1, 64)

    done = lf.load_checkpoint(CHECKPOINT, model, optimizer) if Path(CHECKPOINT).exists() else 0
    for step in range(done, arguments.steps):
        # all ranks choose the same sequences; each data parallel rank computes its part of every micro-batch
        chosen = torch.randint(len(sequences), (2, 8), generator=torch.Generator().manual_seed(step))
        for number, rows in enumerate(chosen[:, data_ranks.get_local_rank() :: data_ranks.size()]):
            is_last = number == len(chosen) - 1
            with nullcontext() if is_last else lf.defer_grad_sync(model):
                lf.token_mean_loss(model, model(sequences[rows]).logits, labels=sequences[rows]).backward()
        mean = lf.apply_token_mean_(model, get_mesh(mesh, "dp_cp").get_group())  # makes gradients those of this mean
        norm = lf.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1:3}  loss {mean.loss:.4f}  gradient norm {norm:.4f}")
    lf.save_checkpoint(CHECKPOINT, model, optimizer, extra=arguments.steps)
