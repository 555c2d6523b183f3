"""Model and optimizer states under the names that a checkpoint uses: those of the parameters, on any mesh."""

from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer


def get_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with parameter names in place of numbers; sharded state stays sharded.

    The layout is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, but an optimizer that
    has no state yet, or none for a parameter, is not stepped to make some.

    Raises:
        ValueError: When the optimizer holds parameters that ``model`` does not have.
    """
    names = _names_by_number(model, optimizer)
    state = optimizer.state_dict()
    groups = [
        # a schedule may leave numpy numbers, which cannot be loaded with weights_only=True
        {
            **{key: value.item() if isinstance(value, np.generic) else value for key, value in group.items()},
            "params": [names[number] for number in group["params"]],
        }
        for group in state["param_groups"]
    ]
    return {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def set_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`get_optimizer_state` returned, also into an optimizer that orders its parameters differently.

    Raises:
        ValueError: When the state was saved for other parameters or parameter groups.
    """
    names = _names_by_number(model, optimizer)
    current = optimizer.state_dict()["param_groups"]
    saved = state["param_groups"]
    if [len(group["params"]) for group in current] != [len(group["params"]) for group in saved] or any(
        {names[number] for number in group["params"]} != set(other["params"])
        for group, other in zip(current, saved, strict=True)
    ):
        raise ValueError(
            f"The checkpoint's {type(optimizer).__name__} has parameter groups of {_sizes(saved)} parameters, the"
            f" current one {_sizes(current)}, or the groups hold other parameters. Resume with the optimizer of the"
            " checkpoint, or start from its weights alone."
        )
    groups = [{**other, "params": group["params"]} for group, other in zip(current, saved, strict=True)]
    saved_state = state.get("state", {})
    values = {number: saved_state[name] for number, name in names.items() if name in saved_state}
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def check_optimizer_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that was built from parameters the model no longer has.

    Raises:
        ValueError: Its steps would change nothing.
    """
    current = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stale = sum(id(parameter) not in current for parameter in parameters)
    if stale:
        raise ValueError(
            f"{stale} of the {len(parameters)} parameters of {type(optimizer).__name__} are not parameters of the"
            " sharded module: the optimizer was built before the module was sharded, or for another one. Build it"
            " inside `configure_optimizers` from `self.parameters()`."
        )


def _names_by_number(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """The numbering of ``Optimizer.state_dict``: in the order of the parameter groups."""
    check_optimizer_parameters(model, optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: names[id(parameter)] for number, parameter in enumerate(parameters)}


def _sizes(groups: list[dict[str, Any]]) -> str:
    return " + ".join(str(len(group["params"])) for group in groups)
