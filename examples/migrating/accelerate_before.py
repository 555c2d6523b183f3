"""Before: a loop around the Accelerator of accelerate 1.15, whose config shards with FSDP2.

accelerate launch --config_file examples/migrating/accelerate_before.yaml \
  examples/migrating/accelerate_before.py /models/llama-3-8b                                            # needs GPUs
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pretrained")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = AutoModelForCausalLM.from_pretrained(arguments.pretrained, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    steps = arguments.steps * accelerator.num_processes
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 5, num_training_steps=steps)
    tokens = torch.tensor(list(Path(__file__).with_name("model_parallel_before.py").read_bytes()))
    data = DataLoader(tokens[: len(tokens) // 64 * 64].view(-1, 64), batch_size=1)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    for number, sequences in enumerate(data):
        if number == 2 * arguments.steps:
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=sequences, labels=sequences).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(f"micro-batch {number + 1:3}  loss {mean.item():.6f}")
    accelerator.save_state("outputs/accelerate_before/state")
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained("outputs/accelerate_before/model", state_dict=weights)
