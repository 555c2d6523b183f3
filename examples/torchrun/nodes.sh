#!/usr/bin/env bash
# Train on several machines without a scheduler, on all machines that are available. On each node:
#
#   STORE=HOST:29400 NODES=1:4 bash examples/torchrun/nodes.sh configs/hsdp_multi_node.yaml   # needs GPUs
#
# Run the same command on a node that comes back, and it takes part again. Options of `fit` follow the config.
#
#   STORE   host and port of the rendezvous, where the nodes find each other
#   NODES   the number of nodes: 4, or 1:4 for one to four. When a node dies, the others continue without it from the
#           last checkpoint. If the config has `global_batch_size`, the samples and their order stay the same. When a
#           node comes back, all nodes restart from the last checkpoint. The smallest number must be enough for the
#           model. With `dp_replicate_size: auto`, as in that config, each node holds a whole copy, sharded over its
#           GPUs, so one node is enough. If the model needs two nodes, use `dp_replicate_size: 1`, which shards over
#           all GPUs, and 2:4.
#   ADDRESS the name or IP under which the other nodes reach this one, if that is not the node's own name
#   IS_HOST true on the node that holds the store, if HOST is a training node. Otherwise torchrun guesses by the name.
#           The guess is wrong if a machine's own name is 127.0.0.1 in /etc/hosts, and then all nodes wait forever.
#
# If the machine with the store dies, the job dies on all nodes. So run the store on a machine that neither trains nor
# is preempted, such as the login node: run only `python examples/torchrun/serve_store.py` there, and set IS_HOST
# nowhere.
set -euo pipefail

config=${1:?"give a config, for example configs/hsdp_multi_node.yaml"}
shift
processes=${PROCESSES_PER_NODE:-8} # one per GPU

# The processes of a run meet in a separate store on the first node, and not in the store above. Otherwise a node that
# comes back would find the entries of the previous run there, and the job would die after a minute.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun forwards a SIGTERM to its processes, which then save on all nodes. It kills processes that are left after
# this many seconds, so a step and a checkpoint must take less. torch 2.11 has no such setting and waits 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# The network to use if a node has several. NCCL's own choice is usually right.
# export NCCL_SOCKET_IFNAME==eth0 # interface to connect and, without InfiniBand or RoCE, to send; "=" means exactly
# export GLOO_SOCKET_IFNAME=eth0  # the same for data exchanged between CPUs, such as checkpoints
# export NCCL_IB_HCA=mlx5         # InfiniBand or RoCE adapters whose names begin like this
# export NCCL_DEBUG=INFO          # logs NCCL's choice; NCCL advises against it in production
#
# No timeout is set here, because ranks wait for each other as long as the strategy's options `timeout`,
# `rendezvous_timeout` and `steady_timeout` say. With NCCL, torch then ends the process, torchrun notices this, and the
# remaining nodes start again. (Keep TORCH_NCCL_ASYNC_ERROR_HANDLING at its default of 3.)
#
# join_timeout is the number of seconds to wait for the smallest number of NODES, and last_call_timeout the number of
# seconds to wait for more nodes after that. A process that dies uses up one of --max-restarts; a node that comes back
# does not.
exec torchrun --nnodes "${NODES:?"how many nodes: 4, or 1:4"}" --nproc-per-node "$processes" --max-restarts 10 \
  --rdzv-backend c10d --rdzv-endpoint "${STORE:?"HOST:PORT of the rendezvous"}" --rdzv-id "${RUN:-lightning-fsdp2}" \
  --rdzv-conf "is_host=${IS_HOST:-false},join_timeout=600,last_call_timeout=30" \
  ${ADDRESS:+--local-addr "$ADDRESS"} \
  -m lightning_fsdp2 fit --config "$config" --trainer.devices "$processes" --ckpt_path last "$@"
