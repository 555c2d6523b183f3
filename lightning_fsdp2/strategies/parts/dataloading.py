"""Data loaders that stay in step on all ranks: a sharded forward is a collective, so no rank can stop alone."""

import hashlib
import itertools
import pickle
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


def keep_in_step(loader: Any, group: dist.ProcessGroup | None, *, may_drop: bool) -> Any:
    """Make the loaders of all data parallel ranks end together, without a hang.

    Loaders with the same known length are returned as they are. Loaders with different known lengths end with the
    shortest. Loaders of unknown length check with each other before every batch, on the host, and end together.

    Args:
        loader: This rank's data loader.
        group: CPU group of all ranks; None for a single process.
        may_drop: Whether batches that only some ranks have may be dropped, with a warning. If not, such batches
            are an error if a length is unknown, and loaders with known lengths are returned as they are.

    Raises:
        ValueError: When a rank has no batch at all.
    """
    if group is None:
        return loader
    length = _get_optional_length(loader)
    lengths: list[Any] = [None] * group.size()
    dist.all_gather_object(lengths, length, group=group)
    if any(other is None for other in lengths):
        is_ahead = hasattr(loader, "state_dict") and not getattr(loader, "allows_for_read_ahead", False)
        wrapper = _StatefulLockstepLoader if is_ahead else _LockstepLoader
        return wrapper(loader, group, may_drop, _get_shortest_guess(loader, group))
    if max(lengths) > 0 and min(lengths) == 0:
        raise ValueError(
            f"The data loader has {lengths} batches on ranks 0 to {len(lengths) - 1}: a rank without any cannot take"
            " part. Use a dataset with at least one batch per data parallel rank, or fewer ranks."
        )
    if len(set(lengths)) == 1 or not may_drop:
        return loader
    _warn_of_ragged(lengths)
    shortened = _StatefulShortenedLoader if hasattr(loader, "state_dict") else _ShortenedLoader
    return shortened(loader, min(lengths))


def get_batch_fingerprint(batch: Any) -> str:
    """Return a hash of everything in a batch, including the values of tensors."""
    digest = hashlib.sha256()
    _update_digest(digest, batch)
    return digest.hexdigest()


class _LoaderWrapper:
    """Wrapper that looks like the wrapped loader to Lightning and to the user."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # pickle and copy ask for it before `__init__`
            raise AttributeError(name)
        return getattr(self._loader, name)


class _ShortenedLoader(_LoaderWrapper):
    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._loader, self._length)


class _StatefulShortenedLoader(_ShortenedLoader):
    """Shortened loader with a state.

    After the last batch, the state is that of a new epoch, even if the wrapped loader has batches left.
    """

    has_global_position = False  # whatever the loader says: this wrapper counts the rank's own batches

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader, length)
        self._batches = 0

    def __iter__(self) -> Iterator[Any]:
        start = self._batches if self._batches < self._length else 0
        for count, batch in enumerate(itertools.islice(self._loader, self._length - start), start + 1):
            self._batches = count
            yield batch

    def state_dict(self) -> dict[str, Any]:
        if self._batches >= self._length:
            return {"loader": None, "batches": 0}
        return {"loader": self._loader.state_dict(), "batches": self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches = state["batches"]
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])


class _LockstepLoader(_LoaderWrapper):
    def __init__(self, loader: Any, group: dist.ProcessGroup, may_drop: bool, guessed_length: int | None) -> None:
        super().__init__(loader)
        self._group = group
        self._may_drop = may_drop
        self._guessed_length = guessed_length
        self._is_cut = False  # whether the last epoch ended although this rank had more batches

    def __len__(self) -> int:
        if self._guessed_length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")  # like `len` of the loader itself
        return self._guessed_length

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        while True:
            try:
                batch, has_batch = next(iterator), True
            except StopIteration:
                batch, has_batch = None, False
            ranks_with_batch = self._count(has_batch)
            if ranks_with_batch < self._group.size():
                self._is_cut = has_batch
                self._end(ranks_with_batch)
                return
            yield batch

    def _count(self, has_batch: bool) -> int:
        count = torch.tensor(int(has_batch))
        dist.all_reduce(count, group=self._group)
        return int(count)

    def _end(self, ranks_with_batch: int) -> None:
        if ranks_with_batch == 0:
            return
        ranks = self._group.size()
        message = f"{ranks - ranks_with_batch} of {ranks} ranks ran out of batches before the others"
        remedy = "Give all data parallel ranks the same number of batches, or the loader a length."
        if not self._may_drop:
            raise ValueError(f"{message}, whose predictions would be lost. {remedy}")
        rank_zero_warn(f"{message}; all ranks stop here. {remedy}")


class _StatefulLockstepLoader(_LockstepLoader):
    """Lockstep loader whose state is the one after the last batch that was trained on.

    Lightning reads one batch ahead from a loader of unknown length, so the wrapped loader is one batch ahead. After
    the last batch, the state is that of a new epoch, even if the wrapped loader has batches left.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, may_drop: bool, guessed_length: int | None) -> None:
        super().__init__(loader, group, may_drop, guessed_length)
        self._state_before_last: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        while True:
            state = self._loader.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                self._state_before_last = None
                return
            self._state_before_last = state
            yield batch

    def state_dict(self) -> dict[str, Any]:
        if self._state_before_last is not None:
            return {"loader": self._state_before_last}
        return {"loader": None if self._is_cut else self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])


def _get_optional_length(loader: Any) -> int | None:
    """Return the length of ``loader``; None if it is unknown, or only a guess (with an iterable dataset)."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    return _get_optional_guess(loader)


def _get_shortest_guess(loader: Any, group: dist.ProcessGroup) -> int | None:
    """Return the length for progress bars and ``val_check_interval``: the shortest; None if a rank's is unknown."""
    guesses: list[int | None] = [None] * group.size()
    dist.all_gather_object(guesses, _get_optional_guess(loader), group=group)
    known = [guess for guess in guesses if guess is not None]
    if len(known) < len(guesses):
        return None
    if len(set(known)) > 1:
        _warn_of_ragged(known)
    return min(known)


def _warn_of_ragged(lengths: list[int]) -> None:
    rank_zero_warn(
        f"The data loaders of the ranks have {min(lengths)} to {max(lengths)} batches; every rank stops after"
        f" {min(lengths)}. Give all data parallel ranks the same number of batches to use all data."
    )


def _get_optional_guess(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _update_digest(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        digest.update(f"tensor {data.dtype} {tuple(data.shape)}".encode())
        digest.update(data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    elif isinstance(value, Mapping):  # a tokenizer's BatchEncoding is not a dict
        digest.update(f"mapping of {len(value)}".encode())
        for key in value:
            digest.update(pickle.dumps(key))
            _update_digest(digest, value[key])
    elif isinstance(value, Collection) and not isinstance(value, str | bytes):
        digest.update(f"collection of {len(value)}".encode())
        for item in value:
            _update_digest(digest, item)
    else:
        digest.update(pickle.dumps(value))
