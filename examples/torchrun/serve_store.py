"""Run the store of torchrun's rendezvous on a machine that does not train, so that any training node may die.

python examples/torchrun/serve_store.py 29400
"""

import signal
import sys

from torch.distributed import TCPStore

ENDS = {signal.SIGINT, signal.SIGTERM}

signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
port = int(sys.argv[1]) if len(sys.argv) > 1 else 29400
store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
signal.sigwait(ENDS)
