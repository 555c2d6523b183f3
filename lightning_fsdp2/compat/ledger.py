"""The ledger of what a run replaces on Lightning's live objects, and why. Tested with lightning 2.6.6.

Lightning has no hook at these places. Instead, an attribute of one object hides a method of its class. The class stays
as it is, and :meth:`Ledger.put_back` removes the attribute again.
"""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

_ATTRIBUTE = "_lightning_fsdp2_ledger"

_ABSENT = object()


@dataclass(frozen=True, kw_only=True, eq=False)
class Replacement:
    """The replacement of an attribute of a live object, for a while."""

    owner: Any
    name: str
    reason: str
    """The reason why Lightning's own value will not do, worded to follow "because"."""

    before: Any
    """The object's own value before. If it had none, a marker: the value of its class must show again."""


class Ledger:
    """The record of replaced attributes of live objects, which can put them back."""

    def __init__(self) -> None:
        self.entries: list[Replacement] = []

    def replace(self, owner: Any, name: str, value: Any, *, reason: str) -> None:
        """Replace the attribute ``name`` of ``owner`` by ``value``.

        Raises:
            RuntimeError: When ``owner`` has no such attribute, maybe in another version of Lightning.
        """
        if not hasattr(owner, name):
            raise RuntimeError(
                f"lightning {version('lightning')} has no {type(owner).__name__}.{name}, which is replaced because"
                f" {reason}; install lightning 2.6.6."
            )
        before = vars(owner).get(name, _ABSENT)
        self.entries.append(Replacement(owner=owner, name=name, reason=reason, before=before))
        vars(owner)[name] = value

    def put_back(self, owner: Any, *names: str) -> None:
        """Put back what was replaced on ``owner``, if anything: the attributes ``names``, or all of them."""
        self._put_back(
            [entry for entry in self.entries if entry.owner is owner and entry.name in (names or [entry.name])]
        )

    def put_back_all(self) -> None:
        """Put back everything that was replaced, on all objects."""
        self._put_back(self.entries)

    def _put_back(self, entries: list[Replacement]) -> None:
        for entry in reversed(entries):
            if entry.before is _ABSENT:
                vars(entry.owner).pop(entry.name, None)
            else:
                vars(entry.owner)[entry.name] = entry.before
        self.entries = [entry for entry in self.entries if entry not in entries]


def get_ledger(trainer: Any) -> Ledger:
    """Return the ledger of a Trainer. There is one for all its stages."""
    ledger: Ledger = vars(trainer).setdefault(_ATTRIBUTE, Ledger())
    return ledger
