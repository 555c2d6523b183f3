"""Draft of a tensor parallel plan for a model that has none, from the shapes of its linear layers."""

from torch import nn


def draft_plan(model: nn.Module) -> dict[str, str]:
    """Return a plan for the blocks of a model's layers, as a start for its author; it may be wrong.

    A block is a module with several linear layers. The draft splits the outputs of those that read the block's input
    ("colwise"), and the inputs of the last one that writes as many features as the block reads ("rowwise"). Blocks
    without such layers get no entry. Nor do blocks where a layer writes more features than the last one reads, because
    it computes several things at once, such as queries, keys and values, and each of them would have to be split. Nor
    do blocks of three square layers: these are queries, keys and values, and the layer after them is elsewhere.
    """
    plan: dict[str, str] = {}
    for name, block in model.named_modules():
        linears = {child: module for child, module in block.named_children() if isinstance(module, nn.Linear)}
        pattern = _make_pattern(model, name)
        are_square = all(linear.in_features == linear.out_features for linear in linears.values())
        if pattern is None or len(linears) < 2 or (are_square and len(linears) == 3):
            continue
        width = next(iter(linears.values())).in_features
        last = [child for child, linear in linears.items() if linear.out_features == width][-1:]
        first = [child for child, linear in linears.items() if linear.in_features == width and child not in last]
        inner = linears[last[0]].in_features if last else 0
        if first and max(linears[child].out_features for child in first) == inner:
            plan |= {f"{pattern}.{child}": "colwise" for child in first}
            plan |= {f"{pattern}.{child}": "rowwise" for child in last}
    return plan


def _make_pattern(model: nn.Module, name: str) -> str | None:
    """Return a module's name with * for numbers in lists of layers, or None if the module is in no such list."""
    parts = name.split(".") if name else []
    pattern = list(parts)
    for i, part in enumerate(parts):
        if part.isdigit() and _is_list(model.get_submodule(".".join(parts[:i]))):
            pattern[i] = "*"
    return ".".join(pattern) if "*" in pattern else None


def _is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of layers, which a Sequential is if its children are all of one class."""
    return isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential) and len({type(child) for child in module}) == 1
    )
