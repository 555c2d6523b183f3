#!/usr/bin/env bash
# Train on several machines without a scheduler, on as many of them as are there. On each node:
#
#   STORE=HOST:29400 NODES=1:4 bash examples/torchrun/nodes.sh configs/hsdp_multi_node.yaml   # needs GPUs
#
# The same command on a node that comes back takes part again. What stands behind the config are options of `fit`.
#
#   STORE   host and port of the rendezvous, by which the nodes find each other
#   NODES   how many: 4, or 1:4 for one to four. When a node dies the others go on without it, from the last checkpoint
#           and with the same samples in the same order, if the config has `global_batch_size`; a node that comes back
#           makes all start again from the last checkpoint. No fewer than the model fits on: with the
#           `dp_replicate_size: auto` of that config each node holds a whole copy, sharded over its GPUs, so one is
#           enough. A model that takes two nodes wants `dp_replicate_size: 1`, sharded over all GPUs there are, and 2:4.
#   ADDRESS this node's name or IP for the others, where they do not find it by the name that it has for itself
#   IS_HOST true on the one node that holds the store, where HOST is a node. torchrun would guess it by the name, and
#           wrongly where a machine's own name is 127.0.0.1 in /etc/hosts; then all wait for each other in vain.
#
# If the machine with the store dies, the job dies with it, on all nodes. So keep it where nothing trains and nothing is
# pre-empted, such as the login node; there `python examples/torchrun/serve_store.py` is all that runs, and IS_HOST is
# not set anywhere.
set -euo pipefail

config=${1:?"give a config, for example configs/hsdp_multi_node.yaml"}
shift
processes=${PROCESSES_PER_NODE:-8} # one per GPU

# The processes of a run meet in a store of their own on the first node, and not in the one above: else a node that
# comes back finds there what the run before has left, and the job dies after a minute.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun hands a SIGTERM on to its processes, which save on all nodes, and kills those that are left after this many
# seconds: more than a step and a checkpoint take. torch 2.11 knows no such setting and waits 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# Which network, where a node has several; NCCL's own choice is right on most.
# export NCCL_SOCKET_IFNAME==eth0 # the interface to meet by and, without InfiniBand or RoCE, to send by; "=": exactly
# export GLOO_SOCKET_IFNAME=eth0  # the same for what is exchanged between CPUs, such as checkpoints
# export NCCL_IB_HCA=mlx5         # the InfiniBand or RoCE adapters whose names begin so
# export NCCL_DEBUG=INFO          # logs what it has chosen; NCCL advises against it in production
#
# No timeout is set here: how long ranks wait for each other is `timeout`, `rendezvous_timeout` and `steady_timeout` of
# the strategy. With NCCL torch ends the process then (TORCH_NCCL_ASYNC_ERROR_HANDLING=3, its default, is not to be
# changed), torchrun notices, and the nodes that are left start again.
#
# join_timeout: seconds to wait for the fewest nodes of NODES; last_call_timeout: and then for more of them.
# A process that dies uses up one of --max-restarts, a node that comes back does not. A node has to die as a whole:
# where only torchrun is killed, its processes train on beside the new ones.
exec torchrun --nnodes "${NODES:?"how many nodes: 4, or 1:4"}" --nproc-per-node "$processes" --max-restarts 10 \
  --rdzv-backend c10d --rdzv-endpoint "${STORE:?"HOST:PORT of the rendezvous"}" --rdzv-id "${RUN:-lightning-fsdp2}" \
  --rdzv-conf "is_host=${IS_HOST:-false},join_timeout=600,last_call_timeout=30" \
  ${ADDRESS:+--local-addr "$ADDRESS"} \
  -m lightning_fsdp2 fit --config "$config" --trainer.devices "$processes" --ckpt_path last "$@"
