"""Benchmarks for one GPU: ``check`` tests that everything is correct there, and ``speed`` measures how fast it is."""

from unittest.mock import patch

import transformers.utils

# If torchao is installed, transformers imports it, which starts CUDA, after which processes cannot be forked. Processes
# that train in float8 import it themselves.
with patch.object(transformers.utils, "is_torchao_available", lambda: False):
    import transformers.quantizers
