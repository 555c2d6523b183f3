#!/usr/bin/env bash
# Train on the GPUs of one machine.
#
#   bash examples/torchrun/one_node.sh configs/pretrain_llama3_8b_fsdp2.yaml   # needs GPUs
#
# The same command goes on from the last checkpoint, if there is one. What stands behind the config are options of
# `fit`.
set -euo pipefail

config=${1:?"give a config, for example configs/pretrain_llama3_8b_fsdp2.yaml"}
shift
processes=${PROCESSES_PER_NODE:-8} # one per GPU

# torchrun hands a SIGTERM on to its processes, which save, and kills those that are left after this many seconds: more
# than a step and a checkpoint take. torch 2.11 knows no such setting and waits 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# `exec`: the signal that a scheduler sends to this script is sent to torchrun. It ends with 0 or 1, whatever its
# processes end with, so a caller cannot tell a pre-emption from an error by it.
# A process that dies is started again, with the others, from the last checkpoint: --max-restarts times.
exec torchrun --standalone --nproc-per-node "$processes" --max-restarts 3 \
  -m lightning_fsdp2 fit --config "$config" --trainer.devices "$processes" --ckpt_path last "$@"
