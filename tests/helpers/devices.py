"""Marks of tests that need what not every machine has."""

import pytest
import torch

# not `is_available`, which ranks that are forked later could not use CUDA after
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device"))
