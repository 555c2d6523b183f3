"""DDP for a module whose parameters may be frozen and unfrozen during training, for example by callbacks.

torch's reducer knows only the parameters that required a gradient when it was built. It never reduces parameters that
are unfrozen later, and it waits for those that are frozen later. Neither case raises an error when it happens, and each
rank continues with its own weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp2.compat.torch import finish_static_graph
from lightning_fsdp2.ranks.failures import list_names


class Replica:
    """Module that is wrapped in DDP as long as it has trainable parameters.

    Args:
        module: Module that is trained on every rank.
        wrap: Function that makes the DDP wrapper. All ranks already have the same weights when it is called.
        group: Process group of the ranks that train the module.
        before_wrapping_again: Function to call before the wrapper is replaced, for example to wait for other ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup,
        before_wrapping_again: Callable[[], None],
    ) -> None:
        self.module = module
        self._make_wrapper = wrap
        self._group = group
        self._before_wrapping_again = before_wrapping_again
        self._trained = self._known = self._get_trained()
        self.wrapper: DistributedDataParallel | None = None
        self._is_learning = False
        self._wrap()

    @property
    def root(self) -> nn.Module:
        """Module to call in a step: the DDP wrapper, or the module itself if it has no trainable parameters."""
        return self.wrapper or self.module

    def refresh(self) -> None:
        """Wrap the module again if parameters were frozen or unfrozen since the last step.

        The existing wrapper is kept if it already knows all trainable parameters, and allows some of them to get no
        gradient (``find_unused_parameters`` without ``static_graph``).
        """
        trained = self._get_trained()
        if trained.keys() == self._trained.keys():
            return
        self._reduce_gradients_of_frozen(trained)
        is_known = trained.keys() <= self._known.keys()
        self._trained = trained
        if is_known and self.wrapper is not None and _may_be_unused(self.wrapper):
            return
        self._before_wrapping_again()
        self._wrap()

    def check_known(self) -> None:
        """Refuse to train parameters whose gradients DDP would not reduce, since each rank would train its own copy.

        Raises:
            ValueError: If parameters were unfrozen inside the step.
        """
        unknown = self._get_trained().keys() - self._known.keys()
        if unknown:
            names = [name for name, parameter in self.module.named_parameters() if id(parameter) in unknown]
            raise ValueError(
                "These parameters were unfrozen inside `training_step`, where DDP does not notice the change:"
                f" {list_names(names)}. Unfreeze them before the step, for example in `on_train_batch_start`."
            )

    def finish_backward(self, *, is_manual: bool) -> None:
        """Make torch check now, rather than in the next step, whether all gradients were reduced.

        Raises:
            RuntimeError: If the loss did not use some of the parameters.
        """
        if self.wrapper is None or not self.wrapper.require_backward_grad_sync:
            return
        # With a static graph, torch reduces the gradients of the first backward only if this backward starts from the
        # wrapper's output. A manual backward runs inside `training_step`, before the wrapper returns its output, so
        # reduce the gradients here.
        finish_static_graph(self.wrapper, reduces_all=self._is_learning and is_manual)
        self._is_learning = False

    @contextmanager
    def defer_sync(self) -> Iterator[None]:
        """Skip gradient reduction inside the ``with`` block. Use it for every micro-batch of a step except the last."""
        # With a static graph, torch records the graph only in a backward that reduces gradients, so the first
        # micro-batch must reduce its gradients. They are averaged again later, which does not change them.
        with self.wrapper.no_sync() if self.wrapper is not None and not self._is_learning else nullcontext():
            yield

    def _wrap(self) -> None:
        self._known = self._trained
        self.wrapper = self._make_wrapper(self.module) if self._trained else None
        self._is_learning = self.wrapper is not None and self.wrapper.static_graph

    def _get_trained(self) -> dict[int, Tensor]:
        return {id(parameter): parameter for parameter in self.module.parameters() if parameter.requires_grad}

    def _reduce_gradients_of_frozen(self, trained: dict[int, Tensor]) -> None:
        """Average, over the ranks, the gradients that newly frozen parameters got in earlier micro-batches."""
        for number, parameter in self._trained.items():
            if number not in trained and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._group)
                parameter.grad /= self._group.size()


def reduce_in_float32(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average a bucket of bfloat16 gradients in float32, as a communication hook of DDP.

    In bfloat16 the sum over many ranks would be rounded at each addition.

    Args:
        group: Process group of the ranks over which the gradients are averaged.
        bucket: Bucket of gradients. torch allows no other type annotation for this argument.
    """
    wide = bucket.buffer().float().div_(group.size())
    work = dist.all_reduce(wide, group=group, async_op=True)
    return cast(Any, work).get_future().then(lambda future: bucket.buffer().copy_(wide))


def _may_be_unused(wrapper: DistributedDataParallel) -> bool:
    return wrapper.find_unused_parameters and not wrapper.static_graph
