"""Stands in for SLURM's `srun` on one machine: starts a step's tasks with the variables that SLURM sets.

As srun it hands SIGUSR1 on to the tasks, kills them at a SIGTERM, ends the others when one fails if it was told to, and
ends with the highest exit code of all.
"""

import os
import signal
import sys

options = [word for word in sys.argv[1:] if word.startswith("--")]
start = next(index for index, word in enumerate(sys.argv) if index > 0 and not word.startswith("--"))
nodes, per_node = (int(os.environ[f"SLURM_{name}"]) for name in ("NNODES", "NTASKS_PER_NODE"))

running = set()
for rank in range(nodes * per_node):
    names = {"NTASKS": nodes * per_node, "PROCID": rank, "LOCALID": rank % per_node, "NODEID": rank // per_node}
    variables = {f"SLURM_{name}": str(value) for name, value in names.items()}
    running.add(os.spawnvpe(os.P_NOWAIT, sys.argv[start], sys.argv[start:], os.environ | variables))


def send(number: int) -> None:
    for pid in running:
        os.kill(pid, number)


signal.signal(signal.SIGUSR1, lambda number, frame: send(number))
signal.signal(signal.SIGTERM, lambda number, frame: send(signal.SIGKILL))

codes = []
while running:
    pid, status = os.wait()
    running.discard(pid)
    code = os.waitstatus_to_exitcode(status)
    codes.append(code if code >= 0 else 128 - code)
    if codes[-1] and "--kill-on-bad-exit=1" in options:
        send(signal.SIGKILL)
sys.exit(max(codes))
