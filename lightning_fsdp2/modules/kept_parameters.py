"""Parameters that are kept outside of modules, such as ``self.kept = dict(self.named_parameters())``.

Sharding replaces every parameter of a module. Whatever still refers to a parameter of before would compute with its
first values for ever. So these places are found before the parameters are replaced, and get the new ones afterwards.
"""

import functools
import gc
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import nn

from lightning_fsdp2.modules.stages import Stages
from lightning_fsdp2.modules.structure import get_parameter_owners

_CONTAINERS = (dict, list, set, deque, types.CellType, functools.partial, types.FunctionType)

_Slot: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its parameters."""

_TEMPORARY = (types.FrameType, types.GeneratorType, types.CoroutineType)
"""Types of objects whose references are local variables of functions that run now."""


@dataclass(kw_only=True, eq=False)
class KeptParameter:
    """One object outside of modules that refers to a parameter, or holds its id."""

    holder: Any
    """The dict, list, set, tuple, partial, function, closure cell or other object."""

    old: Any
    """The parameter, or its id."""

    module: nn.Module
    """Module that owns the parameter."""

    attribute: str
    """Name of the parameter in ``module``."""

    name: str
    """Name of the parameter in the root module."""

    @property
    def is_id(self) -> bool:
        """Whether :attr:`holder` holds the id of the parameter, and not the parameter."""
        return type(self.old) is int


def find_kept_parameters(root: nn.Module) -> list[KeptParameter]:
    """Find the objects outside of modules that hold parameters of ``root``, or their ids.

    Reference counts tell which parameters are held by modules only. For the others, the objects of the process are
    searched, once for each object that holds some. Sets, lists and dicts are also searched for ids (``id(p)``).

    Raises:
        ValueError: If an object cannot be changed afterwards. The message names it, and the parameter.
    """
    names = {module: name for name, module in root.named_modules()}
    slots = [(module, attribute) for held in get_parameter_owners(root).values() for module, attribute in held]
    owners = {id(module._parameters[attribute]): (module, attribute) for module, attribute in reversed(slots)}
    found = [(holder, key, False) for holder, key in _find_holders(root, slots, owners)]
    for holder in _find_holders_of_numbers(root):
        numbers = itertools.chain(holder, holder.values()) if isinstance(holder, dict) else holder
        ids = {number for number in numbers if type(number) is int and number in owners}
        found += [(holder, number, True) for number in ids if holder is not owners]
    kept = []
    for holder, key, is_number in found:
        module, attribute = owners[key]
        old = key if is_number else module._parameters[attribute]
        name = ".".join(filter(None, (names[module], attribute)))
        _check_changeable(holder, old, name)
        kept.append(KeptParameter(holder=holder, old=old, module=module, attribute=attribute, name=name))
    return kept


def check_on_all_stages(kept: Iterable[KeptParameter], stages: Stages) -> None:
    """Refuse objects that refer to parameters which only some ranks of a pipeline hold.

    Ids of such parameters are no error: they select no parameter on the other ranks.

    Raises:
        ValueError: If an object refers to such a parameter. All ranks raise the error.
    """
    for place in kept:
        if not place.is_id and len(stages.parameters[place.name].ranks) < stages.num_ranks:
            raise ValueError(
                f"{_describe(place.holder)} refers to the parameter {place.name}, which only some pipeline stages have."
                " Look parameters up where they are used (`self.named_parameters()`), or use pp_size=1."
            )


def replace_kept_parameters(
    kept: Iterable[KeptParameter], choose: Callable[[KeptParameter, nn.Parameter], Any] = lambda place, new: new
) -> None:
    """Put the parameters that modules have now in the place of those that :func:`find_kept_parameters` has found.

    Args:
        kept: What was found.
        choose: Function that gets a kept parameter and the one that its module has now, and returns what the object
            shall hold. Ids are always replaced with those of the parameters that modules have now.
    """
    for place in kept:
        new: Any = place.module._parameters.get(place.attribute)
        new_id = 0 if new is None else id(new)  # no object has the id 0; another pipeline stage has the parameter
        _replace(place.holder, place.old, new_id if place.is_id else choose(place, new))


def _find_holders(root: nn.Module, slots: list[_Slot], owners: dict[int, _Slot]) -> list[tuple[Any, int]]:
    """Return the objects that refer to parameters, each with the id of a parameter.

    No variable here refers to a parameter for long, since it would be found as well.
    """
    found = []
    seen = {id(module._parameters) for module in root.modules()}
    counts = _count_other_references(slots)
    while counts:
        key = next(iter(counts))
        module, attribute = owners[key]
        for holder in gc.get_referrers(module._parameters[attribute]):
            if id(holder) not in seen and not isinstance(holder, _TEMPORARY):
                seen.add(id(holder))
                held = {id(referent) for referent in gc.get_referents(holder)} & owners.keys()
                found += [(holder, other) for other in held]
                counts = {other: count - (other in held) for other, count in counts.items()}
        counts = {other: count for other, count in counts.items() if count > 0 and other != key}
    return found


def _count_other_references(slots: list[_Slot]) -> dict[int, int]:
    """Return by id of a parameter how many references there are beside those of modules, if there are any."""
    counts: dict[int, int] = {}
    for module, attribute in slots:
        parameter = module._parameters[attribute]
        # two references are not counted: this variable, and the argument of `getrefcount`
        known = counts.setdefault(id(parameter), sys.getrefcount(parameter) - 2)
        counts[id(parameter)] = known - 1
    return {key: count for key, count in counts.items() if count > 0}


def _find_holders_of_numbers(root: nn.Module) -> Iterator[Any]:
    """Yield the sets, lists and dicts of integers: those of the process, and attributes of modules.

    Python's garbage collector does not list a dict of numbers and strings, so such a dict is found only as an
    attribute.
    """
    attributes = [value for module in root.modules() for value in vars(module).values() if not gc.is_tracked(value)]
    for holder in itertools.chain(gc.get_objects(), attributes):
        if type(holder) in (set, frozenset, list, dict) and holder:
            firsts = next(iter(holder.items())) if type(holder) is dict else (next(iter(holder)),)
            if int in map(type, firsts):
                yield holder


def _check_changeable(holder: Any, old: Any, name: str) -> None:
    if isinstance(holder, tuple):
        for outer in _get_holders(holder):
            _check_changeable(outer, holder, name)
    elif not isinstance(holder, _CONTAINERS) and not list(_get_attributes(holder, old)):
        raise ValueError(
            f"{_describe(holder)} refers to the parameter {name}, which sharding replaces, and cannot be changed. Keep"
            " the parameter's name, or a list, set or dict, and look parameters up where they are used"
            " (`self.named_parameters()`)."
        )


def _replace(holder: Any, old: Any, new: Any) -> None:
    """Put ``new`` in the place of ``old`` wherever ``holder`` refers to it."""

    def choose(value: Any) -> Any:
        return new if value is old or (type(old) is type(value) is int and value == old) else value

    if isinstance(holder, dict):
        items = [(choose(key), choose(value)) for key, value in holder.items()]
        if all(key is now for key, (now, _) in zip(holder, items, strict=True)):
            holder.update(items)
        else:  # in the same order
            holder.clear()
            holder.update(items)
    elif isinstance(holder, list | deque):
        for index, value in enumerate(holder):
            holder[index] = choose(value)
    elif isinstance(holder, set):
        holder.discard(old)
        holder.add(new)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = new
    elif isinstance(holder, functools.partial):
        state: Any = (choose(holder.func), choose(holder.args), choose(holder.keywords), vars(holder))
        cast(Any, holder).__setstate__(state)
    elif isinstance(holder, types.FunctionType):
        holder.__defaults__ = choose(holder.__defaults__)
    elif isinstance(holder, tuple):
        changed = tuple.__new__(type(holder), [choose(value) for value in holder])
        for outer in _get_holders(holder):
            _replace(outer, holder, changed)
    else:
        for name in list(_get_attributes(holder, old)):
            object.__setattr__(holder, name, new)


def _get_holders(value: tuple[Any, ...]) -> list[Any]:
    """Return the objects that refer to a tuple."""
    return [holder for holder in gc.get_referrers(value) if not isinstance(holder, (*_TEMPORARY, KeptParameter))]


def _get_attributes(holder: Any, value: Any) -> Iterator[str]:
    """Yield the names of the attributes of ``holder``, with or without slots, that are ``value``."""
    slots = [slot for cls in type(holder).__mro__ for slot in vars(cls).get("__slots__", ())]
    for name in [*getattr(holder, "__dict__", ()), *slots]:
        if getattr(holder, name, None) is value:
            yield name


def _describe(holder: Any) -> str:
    return f"An object of type {type(holder).__name__}"
