"""Messages of other packages that the command line does not show, because no user can act on them."""

import logging
import re
import warnings

_WARNINGS = (
    # Lightning calls a method of torch's pytrees that torch has renamed
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", r"lightning\.pytorch\.utilities\._pytree"),
    # Lightning's command line calls methods of jsonargparse that are to be removed in 5.0, which is not installed
    (r"[\s\S]*deprecated in v4", r"lightning\.pytorch\.cli"),
    # the seed is 0 unless the user gives another one, as --help says, and "Seed set to 0" follows
    (r"No seed found, seed set to 0", r"lightning\.fabric\.utilities\.seed"),
    # peft reads a property of models that transformers has renamed
    (r"`is_gradient_checkpointing` is deprecated", r"transformers\.modeling_utils"),
)
"""Patterns of the messages of warnings, each with a pattern of the module that warns."""

_RECORDS = {
    "lightning.pytorch.utilities.rank_zero": (
        r"💡 Tip: ",  # an advertisement
        r"TPU available: False",
    ),
    "lightning.fabric.utilities.seed": (r"\[rank: [1-9]\d*\] Seed set to ",),  # rank 0 says it for all
    # of torchao, which transformers imports if it is installed: kernels for other GPUs or other versions of torch
    "torchao": (r"Failed to load ", r"Skipping import of cpp extensions"),
    # of the same import: torchao registers classes that torch has learnt to treat itself
    "torch.utils._pytree": (r".* is an Enum subclass and is now natively supported",),
    # a rank's part of a tensor parallel weight, which FSDP2 shards again, is gathered in two steps
    "torch.distributed.tensor._redistribute": (r"While redistributing from .*_StridedShard",),
}
"""Names of loggers, each with patterns of the messages that are left out."""


def leave_out_noise() -> None:
    """Leave out the messages above, and no others. It is safe to call this more than once."""
    for message, module in _WARNINGS:
        warnings.filterwarnings("ignore", message, module=module)
    for name, patterns in _RECORDS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(filter_, _Filter) for filter_ in logger.filters):
            logger.addFilter(_Filter(patterns))


class _Filter(logging.Filter):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self.pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return self.pattern.match(record.getMessage()) is None
