"""Guard against hangs in forwards of sharded modules outside of Trainer steps.

The forward of a sharded module is a collective. In a step of the Trainer, every rank runs the forward. In a hook or a
callback, however, users may call the module under ``if trainer.is_global_zero``. The run would then hang.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp2.modules.experts import exchanges_tokens
from lightning_fsdp2.modules.structure import get_layer_lists
from lightning_fsdp2.parallel.data.fully_shard import is_unsharded_by_user, reshard
from lightning_fsdp2.ranks.coordination import wait_for_all_ranks

OUTSIDE_CALL_TIMEOUT = timedelta(minutes=1)
"""Longest time that a rank waits for the other ranks before a sharded module's forward outside of a step.

It is short, because a call on only some ranks is more likely than a rank that comes so late. A strategy whose
``timeout`` is longer than the default waits for that long.
"""

_HANDLES_ATTRIBUTE = "_lightning_fsdp2_step_region"

_REMEDY = "Its forward is a collective. Call it on all ranks"

_LATE = (
    " If a rank has minutes of work before its call, first call `trainer.strategy.barrier()` on all ranks, which waits"
    " longer."
)

_ALTERNATIVE = (
    ", or gather the weights on all ranks first (`with unshard_fsdp2_model(module):`) and call it inside the block on"
    " any"
)


class StepRegion:
    """Guard that makes a forward of a sharded module fail, instead of hang, if only some ranks call it.

    Forwards in steps of the Trainer are not checked: calling the guard returns a context manager that turns the check
    off, and the strategy runs the steps in it.

    Args:
        timeout: How long to wait for the other ranks.
        holds_units: Function that returns whether a module's forward is a collective.
        after_forward: Function to call with the root module after a forward outside of a step.
        alternative: Text for the error message that says what users can do instead of calling the module on all ranks.
            Empty if there is no alternative.
    """

    def __init__(
        self,
        timeout: timedelta,
        *,
        holds_units: Callable[[nn.Module], bool] | None = None,
        after_forward: Callable[[nn.Module], None] = reshard,
        alternative: str = _ALTERNATIVE,
    ) -> None:
        self._timeout = timeout
        self._holds_units = holds_units or _holds_units
        self._after_forward = after_forward
        self._remedy = f"{_REMEDY}{alternative}.{_LATE}"
        self._depth = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a block that every rank enters, such as a training step, without checking the forwards in the block."""
        depth = self._depth
        self._depth += 1
        try:
            yield
        finally:
            # not `-= 1`, because torch runs no exit hook of a forward that a pipeline stage ends with a BaseException
            self._depth = depth

    def watch(self, root: nn.Module) -> None:
        """Add hooks that check the forwards of the sharded modules in ``root`` outside of steps.

        The hooks stay on the module after the Trainer is gone. They replace the hooks of an earlier Trainer.
        """
        for handle in root.__dict__.pop(_HANDLES_ATTRIBUTE, ()):
            handle.remove()
        blocks = {module for layers in get_layer_lists(root) for block in layers for module in block.modules()}
        handles = []
        for name, module in root.named_modules():
            if module not in blocks and self._holds_units(module):
                enter_hook = self._make_enter_hook(name or "the LightningModule", exchanges=exchanges_tokens(module))
                handles.append(module.register_forward_pre_hook(enter_hook, prepend=True))
                handles.append(module.register_forward_hook(self._make_exit_hook(root), always_call=True))
        root.__dict__[_HANDLES_ATTRIBUTE] = handles

    def _make_enter_hook(self, name: str, *, exchanges: bool) -> Callable[..., None]:
        """Make a hook that checks a module's forward before it starts.

        With ``exchanges``, the module's experts exchange tokens, so its forward is a collective even if its weights are
        already gathered.
        """
        remedy = f"{_REMEDY}.{_LATE}" if exchanges else self._remedy

        def enter_hook(module: nn.Module, args: Any) -> None:
            is_outside = self._depth == 0 and (exchanges or not is_unsharded_by_user(module))
            self._depth += 1  # increment before the check, because the exit hook decrements even if the check fails
            if is_outside:
                wait_for_all_ranks(f"call {name}, which is sharded, outside of a step", self._timeout, remedy)

        return enter_hook

    def _make_exit_hook(self, root: nn.Module) -> Callable[..., None]:
        def exit_hook(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth == 0 and not is_unsharded_by_user(module):
                # if the parameters stayed gathered, later hooks would not see the sharded parameters and gradients
                self._after_forward(root)

        return exit_hook


def _holds_units(module: nn.Module) -> bool:
    return any(isinstance(submodule, FSDPModule) for submodule in module.modules())
