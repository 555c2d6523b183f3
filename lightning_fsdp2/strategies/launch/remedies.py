"""Advice for errors of torch and Lightning that do not name their cause."""

from collections.abc import Sequence
from traceback import walk_tb
from types import CodeType

from lightning.pytorch.utilities import grad_norm

from lightning_fsdp2.strategies.launch.rendezvous import say_who_answers

_PEER_IS_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "No route to host",
    "remote server shutdown",
    "remote process exited",
    "Timed out waiting",
    "collective operation timeout",
)
"""Texts in the errors of gloo, NCCL and the store when another rank is gone or does not answer in time."""


def add_remedy(exception: BaseException, hosts: Sequence[str]) -> None:
    """Append advice to the message of ``exception``, if its cause is known."""
    remedy = get_optional_remedy(exception, hosts)
    if remedy is not None:
        exception.args = (f"{exception}\n{remedy}",)


def get_optional_remedy(exception: BaseException, hosts: Sequence[str]) -> str | None:
    """Return advice on an error of torch or Lightning that does not name its cause, or None if no advice is known.

    Args:
        exception: Error that ended a stage.
        hosts: Host names of all ranks. Empty if the ranks have not connected yet.
    """
    if "mixed torch.Tensor and DTensor" in str(exception):
        return (
            "A part of a sharded module was used outside of its unit's forward. Call the model or a whole layer; or, to"
            " read weights, gather them first:"
            " `with torch.no_grad(), lightning_fsdp2.parallelizer.unshard_fsdp2_model(module):`; or, to train through a"
            " method other than `forward`, make this method gather the weights, in `on_fit_start`:"
            ' `torch.distributed.fsdp.register_fsdp_forward_method(self.vae, "encode")`.'
        )
    if "setStorage" in str(exception) and "storage of size 0" in str(exception):
        return (
            "The backward needs weights that were freed after their forward. One possible cause is a gradient of a"
            " gradient (`create_graph=True`): sharded weights have no second-order gradients, so train such a loss"
            " under a strategy that does not shard. Another possible cause is a module whose forward reads another"
            " module's weights without calling that module: under MegatronFSDPStrategy, name the class that contains"
            " both modules in `megatron_fsdp_unit_modules`, or use `zero_dp_strategy=2`."
        )
    is_lost = isinstance(exception, RuntimeError) and any(text in str(exception) for text in _PEER_IS_LOST)
    if is_lost and len(hosts) > 1:
        return f"Another rank has ended or no longer answers. {say_who_answers(hosts)}"
    if is_raised_in(grad_norm.__code__, exception):
        return (
            "Lightning's grad_norm cannot add up the norms of sharded gradients. Use the callback"
            " `lightning_fsdp2.callbacks.GradientNorm`, and for a single parameter `p.grad.norm().full_tensor()` on all"
            " ranks of its pipeline stage."
        )
    return None


def is_raised_in(code: CodeType, exception: BaseException) -> bool:
    """Return whether ``exception`` comes directly from the function with the code object ``code``."""
    return [frame.f_code for frame, _ in walk_tb(exception.__traceback__)][-1:] == [code]
