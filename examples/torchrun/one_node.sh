#!/usr/bin/env bash
# Train on the GPUs of one machine.
#
#   bash examples/torchrun/one_node.sh configs/pretrain_llama3_8b_fsdp2.yaml   # needs GPUs
#
# The same command continues from the last checkpoint, if there is one. Options of `fit` follow the config.
set -euo pipefail

config=${1:?"give a config, for example configs/pretrain_llama3_8b_fsdp2.yaml"}
shift
processes=${PROCESSES_PER_NODE:-8} # one per GPU

# torchrun forwards a SIGTERM to its processes, which then save. It kills processes that are left after this many
# seconds, so a step and a checkpoint must take less. torch 2.11 has no such setting and waits 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# `exec` makes torchrun receive the signal that a scheduler sends to this script. torchrun's exit code is 0 or 1,
# whatever the exit codes of its processes, so a caller cannot distinguish a preemption from an error. If a process
# dies, all processes start again from the last checkpoint, at most --max-restarts times.
exec torchrun --standalone --nproc-per-node "$processes" --max-restarts 3 \
  -m lightning_fsdp2 fit --config "$config" --trainer.devices "$processes" --ckpt_path last "$@"
