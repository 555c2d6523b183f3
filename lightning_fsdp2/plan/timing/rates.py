"""Rates that kernels and collectives reach in practice, each from a publication.

The numbers in a data sheet give lower bounds for the time of a step, and the rates here give estimates. The rate of
matrix products is the fastest that was measured for any shape. The rate of attention depends on the head size and the
number of keys. Attention rates are those of FlashAttention-2, the kernel that context parallel attention calls.

Sources:
    Matrix products: Bekman, "Maximum Achievable Matmul FLOPS", bfloat16
        (https://github.com/stas00/ml-engineering/tree/master/compute/accelerator).
        torchao's own model of float8 also assumes the same share of the peak for float8 as for bfloat16
        (``torchao/testing/training/roofline_utils.py``, torchao 0.18).
    Attention: Shah et al., figures 5 and 6, FlashAttention-2 on an H100 (https://arxiv.org/abs/2407.08608); Dao, A100
        (https://arxiv.org/abs/2307.08691); https://github.com/Dao-AILab/flash-attention/issues/1589, B200.
    Memory: Copies and STREAM triads reach nine tenths of the memory bandwidth.
    Links: NVIDIA, 350 of the 450 GB/s of an H100's NVLink (https://github.com/NVIDIA/nccl/issues/986).
"""

from bisect import bisect_right
from dataclasses import dataclass

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

_FORWARD = {
    64: (282, 306, 318, 321, 322, 324),
    128: (309, 350, 362, 368, 370, 370),
    256: (275, 313, 321, 323, 324, 326),
}
_BACKWARD = {
    64: (198, 238, 264, 279, 287, 291),
    128: (214, 260, 291, 310, 318, 322),
}
"""TFLOP/s of FlashAttention-2 on an H100 by head size, for the lengths above, without a mask."""

_CAUSAL_FORWARD = (191, 260, 298, 319, 333, 335)
"""TFLOP/s of the forward for a head size of 128 with a causal mask. The masked half is not counted."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that kernels and collectives reach on a device. Some are fractions of numbers in its data sheet."""

    products: float
    """Share of the peak that matrix products reach."""

    attention_forward: float
    """Operations per second of fused attention in bfloat16: 16,384 keys, a head size of 128, no mask."""

    attention_backward: float
    """Operations per second of the backward of fused attention, under the same conditions."""

    memory: float = 0.9
    """Share of the memory bandwidth that is reached."""

    links: float = 350 / 450
    """Share of the bandwidth of links and network adapters that is reached."""

    def get_attention(self, *, head_size: int, length: int, is_causal: bool, is_backward: bool) -> float:
        """Return the rate of fused attention, in operations per second.

        The rate is that of an H100, scaled by the ratio of the device's best rate to the H100's best rate.
        """
        table = _BACKWARD if is_backward else _FORWARD
        row = table[next((size for size in table if size >= head_size), max(table))]
        place = max(bisect_right(_LENGTHS, length) - 1, 0)
        share = row[place] / table[128][-1]
        if is_causal and not is_backward:
            share *= _CAUSAL_FORWARD[place] / _FORWARD[128][place]
        return share * (self.attention_backward if is_backward else self.attention_forward)
