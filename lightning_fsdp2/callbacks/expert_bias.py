"""Callback that balances the load of experts without an auxiliary loss."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_fsdp2.callbacks.expert_counts import ExpertCounts, all_reduce_
from lightning_fsdp2.modules.structure import find_peft_models
from lightning_fsdp2.weights.pretrained import forget_loaded

_NAMES = ("e_score_correction_bias", "expert_bias")
"""Names of the bias in the families of transformers."""


class ExpertBias(Callback):
    """Callback that balances the load of experts by adjusting the routers' bias, as in the training of DeepSeek-V3.

    Use it with models whose routers choose experts by scores plus a bias (``e_score_correction_bias`` of DeepSeek-V3,
    GLM and others). In each optimizer step, the callback adds ``rate`` to the bias of each expert that received fewer
    tokens than the average over experts, and subtracts ``rate`` from the bias of each expert that received more. It
    counts the tokens of all micro-batches of the step on all ranks. The method is that of
    https://arxiv.org/abs/2408.15664. Each step needs one all-reduce, and the host does not wait for the device.

    Args:
        rate: Amount by which a bias changes in one step. DeepSeek-V3 was trained with 0.001.

    Raises:
        ValueError: If ``rate`` is not positive. Also at the start of training, if the module has no packed experts or
            trains adapters, if the router of a layer of experts has no bias, or if a bias is not float32.
    """

    def __init__(self, rate: float = 0.001) -> None:
        if rate <= 0:
            raise ValueError(f"ExpertBias(rate={rate}): use a positive rate, or remove the callback.")
        self.rate = rate
        self._counts: ExpertCounts | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.teardown(trainer, pl_module, "fit")  # an earlier fit may have failed before it removed its hooks
        if find_peft_models(pl_module):
            raise ValueError(
                "ExpertBias changes the routers' bias, which the export of an adapter does not contain, but the module"
                " trains adapters; remove the callback."
            )
        self._counts = ExpertCounts(pl_module, trainer)
        names = [*self._counts.layers]
        self._routers = {row: _find_router(pl_module, names[row]) for row in self._counts.own}
        # a checkpoint leaves out frozen parameters that pretrained files hold, but the files no longer hold these
        forget_loaded(pl_module, set(self._routers.values()))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._counts is None:
            return
        loads = all_reduce_(self._counts.take()).double()
        changes = self.rate * torch.sign(loads.mean(1, keepdim=True) - loads)
        for row, (router, name) in self._routers.items():
            _add(getattr(router, name), changes[row])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._counts is not None:
            self._counts.remove()
            self._counts = None


def _find_router(module: nn.Module, experts: str) -> tuple[nn.Module, str]:
    """Return the module that holds the bias for a layer of experts, and the name of the bias."""
    layer: Any = module.get_submodule(experts.rpartition(".")[0])
    found = [(inner, name) for inner in layer.modules() for name in _NAMES if getattr(inner, name, None) is not None]
    if len(found) != 1:
        raise ValueError(
            f"ExpertBias: the router of {experts} has no bias ({' or '.join(_NAMES)}) that the callback could change;"
            " remove the callback, or use the auxiliary loss if the model family has one"
            " (CausalLM(router_aux_loss_coef=...))."
        )
    router, name = found[0]
    if getattr(router, name).dtype != torch.float32:
        raise ValueError(
            f"ExpertBias: the bias {name} of {experts} is {getattr(router, name).dtype}, in which a change of"
            " this size may be rounded away; use Trainer(precision='bf16-mixed')."
        )
    return router, name


@torch.no_grad()
def _add(bias: Tensor, change: Tensor) -> None:
    """Add ``change`` to ``bias``, which may be a frozen and sharded parameter."""
    change = change.to(bias.dtype).view(bias.shape)
    if isinstance(bias, DTensor):
        # every rank has the whole of `change` and keeps only its own shard, without communication
        change = distribute_tensor(change, bias.device_mesh, bias.placements, src_data_rank=None)
    bias.add_(change)
