"""The ledger of what a run replaces on Lightning's live objects: where, and why. Tried with lightning 2.6.6.

Lightning has no hook at these places. A method of one object is then hidden by an attribute of the object itself, its
class stays as it is, and :meth:`Ledger.put_back` takes the attribute away again. What somebody else has put there in
the meantime stays.
"""

import itertools
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

_LEDGER_ATTRIBUTE = "_lightning_fsdp2_ledger"

_REPLACED_ATTRIBUTE = "_lightning_fsdp2_replaced"
"""Name of the list of :class:`_Replaced` on an object. It is copied with the object, unlike a Trainer's ledger."""

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Replacement:
    """An attribute of a live object that has another value for a while."""

    owner: Any
    name: str
    reason: str
    """Why Lightning's own value does not do; a fragment for "because ..."."""


@dataclass(frozen=True, eq=False)
class _Replaced:
    """The value that an attribute has for a while, and the object's own value from before, if it had one."""

    name: str
    value: Any
    before: Any
    had_own: bool
    ledger: int


class Ledger:
    """Replaces attributes of live objects, and puts them back."""

    def __init__(self) -> None:
        self.entries: list[Replacement] = []
        self._number = next(_numbers)

    def replace(self, owner: Any, name: str, value: Any, *, reason: str) -> None:
        """Let ``owner`` have ``value`` in place of its attribute ``name``.

        What another ledger has left there, after a run that could not end, is put back first.

        Raises:
            RuntimeError: When it has no such attribute, as in another version of Lightning.
        """
        if not hasattr(owner, name):
            raise RuntimeError(
                f"lightning {version('lightning')} has no {type(owner).__name__}.{name}, which is replaced because"
                f" {reason}; install lightning 2.6.6."
            )
        _put_back(owner, [old for old in _get_replaced(owner) if old.name == name and old.ledger != self._number])
        own = vars(owner)
        replaced = _Replaced(name, value, own.get(name), name in own, self._number)
        own.setdefault(_REPLACED_ATTRIBUTE, []).append(replaced)
        own[name] = value
        self.entries.append(Replacement(owner, name, reason))

    def put_back(self, owner: Any, *names: str) -> None:
        """Put back the attributes ``names`` of ``owner``, or all of them; those that were not replaced stay."""
        replaced = [old for old in _get_replaced(owner) if old.ledger == self._number]
        _put_back(owner, [old for old in replaced if not names or old.name in names])
        self.entries = [
            entry for entry in self.entries if entry.owner is not owner or (names and entry.name not in names)
        ]

    def put_back_all(self) -> None:
        """Put back what was replaced on all objects."""
        for owner in {id(entry.owner): entry.owner for entry in self.entries}.values():
            self.put_back(owner)


def get_ledger(trainer: Any) -> Ledger:
    """Return the ledger of a Trainer, which has one for all its stages."""
    ledger: Ledger = vars(trainer).setdefault(_LEDGER_ATTRIBUTE, Ledger())
    return ledger


def has_own(owner: Any, name: str) -> bool:
    """Return whether ``owner`` itself has an attribute ``name`` that no ledger has put there."""
    own = vars(owner)
    return name in own and not any(old.name == name and old.value is own[name] for old in _get_replaced(owner))


def _get_replaced(owner: Any) -> list[_Replaced]:
    return vars(owner).get(_REPLACED_ATTRIBUTE, [])


def _put_back(owner: Any, replaced: list[_Replaced]) -> None:
    own = vars(owner)
    for old in reversed(replaced):
        if own.get(old.name) is old.value:
            if old.had_own:
                own[old.name] = old.before
            else:
                del own[old.name]
    if left := [old for old in _get_replaced(owner) if old not in replaced]:
        own[_REPLACED_ATTRIBUTE] = left
    else:
        own.pop(_REPLACED_ATTRIBUTE, None)
