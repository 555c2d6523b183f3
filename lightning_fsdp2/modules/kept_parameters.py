"""Parameters that are kept outside of modules, such as ``self.kept = dict(self.named_parameters())``.

Sharding replaces every parameter of a module. Whatever still refers to a parameter of before would compute with its
first values for ever. So these places are found before the parameters are replaced, and get the new ones afterwards.
"""

import functools
import gc
import itertools
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import nn

from lightning_fsdp2.modules.stages import Stages
from lightning_fsdp2.modules.structure import get_parameter_owners

_CHANGEABLE = (dict, list, set, deque, type, types.CellType, functools.partial, types.FunctionType)

_TEMPORARY = (types.FrameType, types.GeneratorType, types.CoroutineType, Iterator)
"""Types of objects whose references are local variables of functions that run now, or of loops."""

_SMALLEST_ID = 2**32
"""An integer that is smaller than the id of any object in the heap of a 64-bit process."""

_Slot: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its parameters."""

_Change: TypeAlias = Callable[[Any], Any]
"""Function that returns what is to be in the place of a value."""


@dataclass(kw_only=True, eq=False)
class KeptParameter:
    """One object outside of modules that refers to a parameter, or holds its id."""

    holder: Any
    """The dict, list, set, partial, function, class, closure cell or other object. It may refer to the parameter by way
    of tuples, which cannot be changed themselves."""

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

    @property
    def new(self) -> nn.Parameter | None:
        """The parameter that the module has now. None if another pipeline stage has it."""
        return self.module._parameters.get(self.attribute)


def find_kept_parameters(root: nn.Module) -> list[KeptParameter]:
    """Find the objects outside of modules that hold parameters of ``root``, or their ids.

    Reference counts tell whether parameters are held by modules only. If not, the objects of the process are searched
    once. Sets, lists and dicts are also searched for ids (``id(p)``).

    Raises:
        ValueError: If an object cannot be changed afterwards. The message names it, and the parameter.
    """
    names = {module: name for name, module in root.named_modules()}
    slots = [(module, attribute) for held in get_parameter_owners(root).values() for module, attribute in held]
    owners = {id(module._parameters[attribute]): (module, attribute) for module, attribute in reversed(slots)}
    held = _find_held_elsewhere(slots)
    found = [(holder, key, False) for holder, key in _find_holders(root, held)]
    found += [(h, key, True) for h, key in _find_holders_of_ids(root, owners) if h is not owners and h is not held]
    kept = []
    for holder, key, is_id in found:
        module, attribute = owners[key]
        old = key if is_id else module._parameters[attribute]
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
    kept: Iterable[KeptParameter], choose: Callable[[KeptParameter, Any], Any] = lambda place, new: new
) -> None:
    """Put the parameters that modules have now in the place of those that :func:`find_kept_parameters` has found.

    Args:
        kept: What was found.
        choose: Function that gets a kept parameter and the one that its module has now, and returns what the object
            shall hold. Ids are always replaced with those of the parameters that modules have now.
    """
    by_holder: dict[int, list[KeptParameter]] = defaultdict(list)
    for place in kept:
        by_holder[id(place.holder)].append(place)
    for places in by_holder.values():
        _replace(places[0].holder, _make_change(places, choose))


# ---------------------------------------------------------------------- search


def _find_held_elsewhere(slots: list[_Slot]) -> set[int]:
    """Return the ids of the parameters to which there are more references than those of modules."""
    counts: dict[int, int] = {}
    probe = object()
    of_this_function = sys.getrefcount(probe)  # that of a variable and, before Python 3.14, of the argument
    for module, attribute in slots:
        parameter = module._parameters[attribute]
        known = counts.setdefault(id(parameter), sys.getrefcount(parameter) - of_this_function)
        counts[id(parameter)] = known - 1
    return {key for key, count in counts.items() if count > 0}


def _find_holders(root: nn.Module, keys: set[int]) -> Iterator[tuple[Any, int]]:
    """Yield the objects that refer to parameters with these ids, directly or by way of tuples, each with the id.

    No variable here refers to a parameter, since it would be found as well.
    """
    own = {id(module._parameters) for module in root.modules()}
    objects = gc.get_objects() if keys else []
    for holder in objects:
        if id(holder) not in own and not isinstance(holder, _TEMPORARY):
            held = keys.intersection(map(id, gc.get_referents(holder)))
            for changeable in _get_changeable(holder, objects) if held else ():
                yield from ((changeable, key) for key in held)


def _get_changeable(holder: Any, objects: list[Any]) -> list[Any]:
    """Return ``holder``, or what refers to it if it is a tuple or the dict of a class, which cannot be changed.

    ``objects`` is the list of all objects, which refers to ``holder`` too.
    """
    if isinstance(holder, tuple):
        outer = [o for o in gc.get_referrers(holder) if o is not objects and not isinstance(o, _TEMPORARY)]
        return list(itertools.chain.from_iterable(_get_changeable(other, objects) for other in outer))
    if isinstance(holder, dict):
        return list(filter(functools.partial(_is_dict_of, holder), gc.get_referrers(holder))) or [holder]
    return [holder]


def _is_dict_of(values: dict[Any, Any], cls: Any) -> bool:
    return isinstance(cls, type) and any(referent is values for referent in gc.get_referents(vars(cls)))


def _find_holders_of_ids(root: nn.Module, owners: dict[int, _Slot]) -> Iterator[tuple[Any, int]]:
    """Yield the sets, lists and dicts that hold ids of parameters: those of the process, and attributes of modules.

    Python's garbage collector does not list a dict of numbers and strings, so such a dict is found only as an
    attribute.
    """
    attributes = [value for module in root.modules() for value in vars(module).values() if not gc.is_tracked(value)]
    for holder in itertools.chain(gc.get_objects(), attributes):
        if type(holder) in (set, frozenset, list, dict) and _may_hold_ids(holder):
            numbers = {value for value in _copy_values(holder) if type(value) is int}
            yield from ((holder, number) for number in numbers & owners.keys())


def _copy_values(holder: Any) -> list[Any]:
    """Return the values of a set or list, or the keys and values of a dict, which another thread may be changing."""
    return [*list(holder), *list(holder.values())] if isinstance(holder, dict) else list(holder)


def _may_hold_ids(holder: Iterable[Any]) -> bool:
    """Return whether one of the first values is as large as ids are. The lists of tokens of a dataset are not read."""
    values = holder.items() if isinstance(holder, dict) else zip(holder, strict=True)
    try:
        firsts = itertools.chain.from_iterable(itertools.islice(values, 8))
        return any(type(value) is int and value >= _SMALLEST_ID for value in firsts)
    except RuntimeError:  # another thread changes it
        return False


def _check_changeable(holder: Any, old: Any, name: str) -> None:
    if not isinstance(holder, _CHANGEABLE) and not list(_get_attributes(holder, lambda value: value is old)):
        raise ValueError(
            f"{_describe(holder)} refers to the parameter {name}, which sharding replaces, and cannot be changed. Keep"
            " the parameter's name, or a list, set or dict, and look parameters up where they are used"
            " (`self.named_parameters()`)."
        )


def _get_attributes(holder: Any, is_wanted: Callable[[Any], bool]) -> Iterator[str]:
    """Yield the names of the attributes of ``holder``, with or without slots, whose value is wanted."""
    slots = [slot for cls in type(holder).__mro__ for slot in vars(cls).get("__slots__", ())]
    for name in [*getattr(holder, "__dict__", ()), *slots]:
        if is_wanted(getattr(holder, name, None)):
            yield name


def _describe(holder: Any) -> str:
    name = getattr(holder, "__qualname__", None)
    return f"{name} (a {type(holder).__name__})" if name else f"An object of type {type(holder).__name__}"


# ---------------------------------------------------------------------- replacement


def _make_change(places: Sequence[KeptParameter], choose: Callable[[KeptParameter, Any], Any]) -> _Change:
    """Return the function that replaces the parameters of ``places``, and ids of parameters, also inside of tuples."""
    objects = {id(place.old): choose(place, place.new) for place in places if not place.is_id}
    # no object has the id 0; another pipeline stage has the parameter
    ids = {place.old: 0 if place.new is None else id(place.new) for place in places if place.is_id}

    def change(value: Any) -> Any:
        if id(value) in objects:
            return objects[id(value)]
        if type(value) is int:
            return ids.get(value, value)
        if isinstance(value, tuple):
            inside = [change(inner) for inner in value]
            if any(new is not old for new, old in zip(inside, value, strict=True)):
                return tuple.__new__(type(value), inside)
        return value

    return change


def _replace(holder: Any, change: _Change) -> None:
    """Put the result of ``change`` in the place of each value of ``holder``."""
    if isinstance(holder, dict):
        items = [(change(key), change(value)) for key, value in holder.items()]
        if any(new is not key for key, (new, _) in zip(holder, items, strict=True)):
            holder.clear()  # so that the order stays
        holder.update(items)
    elif isinstance(holder, list | deque):
        for index, value in enumerate(holder):
            holder[index] = change(value)
    elif isinstance(holder, set):
        values = [change(value) for value in holder]
        holder.clear()
        holder.update(values)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = change(holder.cell_contents)
    elif isinstance(holder, functools.partial):
        state: Any = (change(holder.func), change(holder.args), holder.keywords, vars(holder))
        cast(Any, holder).__setstate__(state)
    elif isinstance(holder, types.FunctionType):
        holder.__defaults__ = change(holder.__defaults__)
    else:
        set_value = type.__setattr__ if isinstance(holder, type) else object.__setattr__
        for name in list(_get_attributes(holder, lambda value: change(value) is not value)):
            set_value(holder, name, change(getattr(holder, name)))
