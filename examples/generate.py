"""Generation from a sharded model: every rank gathers the weights once and answers its own prompts.

torchrun --nproc-per-node 2 examples/generate.py "def main" "import torch"                  # 2 processes on a laptop
torchrun --nproc-per-node 2 examples/generate.py "def main" --pretrained outputs/lora/model   # after examples/lora.py
torchrun --nproc-per-node 8 examples/generate.py "Once upon" --pretrained /models/llama-3-8b            # needs GPUs
"""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.data import build_byte_tokenizer
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.parallelizer import unshard_fsdp2_model

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--pretrained", help="directory or hub id of a model; default: a small, untrained one")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    arguments = parser.parse_args()

    config = FSDP2Config()
    mesh = create_device_mesh(config)  # over torchrun's processes
    if arguments.pretrained:
        model, tokenizer = from_pretrained(arguments.pretrained), AutoTokenizer.from_pretrained(arguments.pretrained)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=257, **SMALL))
        tokenizer = build_byte_tokenizer()
    model = FSDP2Manager(config, mesh).parallelize(model).eval()

    # Outside the block, each layer would gather its weights for each new token, and all ranks would have to take part.
    with unshard_fsdp2_model(model), torch.no_grad():
        for prompt in arguments.prompts[dist.get_rank() :: dist.get_world_size()]:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            # synced_gpus: transformers makes FSDP ranks wait for each other's last token, which is not necessary here
            options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "synced_gpus": False}
            tokens = model.generate(**inputs, **options)
            print(f"rank {dist.get_rank()}: {tokenizer.decode(tokens[0])!r}")
