"""Record of the methods that a run replaces on Lightning's objects, with the reasons. Tested with lightning 2.6.6.

The package replaces methods where Lightning has no hook. To replace a method, it sets an attribute of the same name on
the instance, and leaves the class unchanged. :meth:`Ledger.put_back` removes the attribute, unless other code has
replaced it since.
"""

import itertools
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

_LEDGER_ATTRIBUTE = "_lightning_fsdp2_ledger"

_REPLACED_ATTRIBUTE = "_lightning_fsdp2_replaced"
"""Name of the attribute that stores an object's list of :class:`_Replaced`. A copy of the object has this list too."""

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Replacement:
    """Temporary replacement of one attribute of one instance."""

    owner: Any
    name: str
    reason: str
    """Reason for the replacement, in words that fit after "because"."""


@dataclass(frozen=True, eq=False)
class _Replaced:
    """Temporary value of an object's attribute, and the previous value if the object itself had the attribute."""

    name: str
    value: Any
    before: Any
    had_own: bool
    ledger: int


class Ledger:
    """Record of the attributes that were replaced on instances. It can restore the original attributes."""

    def __init__(self) -> None:
        self.entries: list[Replacement] = []
        self._number = next(_numbers)

    def replace(self, owner: Any, name: str, value: Any, *, reason: str) -> None:
        """Replace the attribute ``name`` of ``owner`` with ``value``.

        If an aborted run has left a replacement from a different ledger, restore the original attribute first.

        Raises:
            RuntimeError: If ``owner`` has no attribute ``name``, because a different version of Lightning is installed.
        """
        if not hasattr(owner, name):
            raise RuntimeError(
                f"lightning {version('lightning')} has no {type(owner).__name__}.{name}, which this package has to"
                f" replace because {reason}; install lightning 2.6.6."
            )
        _put_back(owner, [old for old in _get_replaced(owner) if old.name == name and old.ledger != self._number])
        own = vars(owner)
        replaced = _Replaced(name, value, own.get(name), name in own, self._number)
        own.setdefault(_REPLACED_ATTRIBUTE, []).append(replaced)
        own[name] = value
        self.entries.append(Replacement(owner, name, reason))

    def put_back(self, owner: Any, *names: str) -> None:
        """Restore the attributes ``names`` of ``owner``, or all its replaced attributes if no names are given."""
        replaced = [old for old in _get_replaced(owner) if old.ledger == self._number]
        _put_back(owner, [old for old in replaced if not names or old.name in names])
        self.entries = [
            entry for entry in self.entries if entry.owner is not owner or (names and entry.name not in names)
        ]

    def put_back_all(self) -> None:
        """Restore all replaced attributes of all objects."""
        for owner in {id(entry.owner): entry.owner for entry in self.entries}.values():
            self.put_back(owner)


def get_ledger(trainer: Any) -> Ledger:
    """Return the ledger of ``trainer``. A Trainer has one ledger for fit, validate, test and predict."""
    ledger: Ledger = vars(trainer).setdefault(_LEDGER_ATTRIBUTE, Ledger())
    return ledger


def has_own(owner: Any, name: str) -> bool:
    """Return whether the instance ``owner`` itself has an attribute ``name`` that no ledger has set."""
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
