"""Data loaders that yield the same number of batches on all ranks, as the forwards of sharded modules require."""

import copy
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fsdp2.ranks.own_random import shared_random_numbers


class EvaluationSampler(DistributedSampler[int]):
    """Sampler that reads each sample on one rank, once, so that the ranks may have unequally many samples.

    A rank without a sample reads the first one, as a filler.

    Args:
        dataset: Dataset with a length.
        num_replicas: Number of data parallel ranks.
        rank: Index of this rank among them.
        shuffle: Whether to shuffle the samples.
        order: Sampler of the whole dataset, whose samples the ranks share in its order. None for the whole dataset.
    """

    def __init__(self, dataset: Any, num_replicas: int, rank: int, *, shuffle: bool, order: Any = None) -> None:
        samples = dataset if order is None else order
        super().__init__(samples, num_replicas, rank, shuffle=shuffle, seed=int(os.getenv("PL_GLOBAL_SEED", "0")))
        self._order = order
        self.total_size = len(samples)
        self.own_samples = len(range(rank, self.total_size, num_replicas))
        self.num_samples = max(self.own_samples, min(self.total_size, 1))

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__() if self.own_samples else iter(range(self.num_samples))
        if self._order is None:
            return indices
        samples = list(self._order)
        return (samples[index] for index in indices)


def build_evaluation_sampler(
    loader: DataLoader[Any], *, num_replicas: int, rank: int, shuffle: bool
) -> EvaluationSampler:
    """Build the sampler that replaces the one of ``loader`` in an evaluation on several ranks."""
    if isinstance(loader.sampler, RandomSampler | SequentialSampler):
        return EvaluationSampler(loader.dataset, num_replicas, rank, shuffle=shuffle)
    return EvaluationSampler(loader.dataset, num_replicas, rank, shuffle=False, order=loader.sampler)


def get_optional_evaluation_sampler(loader: Any) -> EvaluationSampler | None:
    """Return the sampler of ``loader`` if it is one from :func:`build_evaluation_sampler`."""
    of_batches = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    samplers = (getattr(loader, "sampler", None), of_batches)  # a batch sampler of the user's own has the second only
    return next((sampler for sampler in samplers if isinstance(sampler, EvaluationSampler)), None)


_END = object()

_SAMPLERS_THAT_DRAW_AT_START = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSamplerWrapper)

_DRAWS_SHARED = "_lightning_fsdp2_draws_shared"
"""Name of a class attribute of samplers that draw from the random numbers that all ranks share."""


def _make_shared(kind: Any) -> type:
    """Return a subclass of a sampler's class that draws its order from the random numbers that all ranks share.

    A rank's own numbers would give each rank another order, so that samples would be repeated and left out.
    """

    def iterate(self: Any) -> Iterator[Any]:
        # those of torch draw nothing after their first sample, and each swap of random states takes time
        drawing = type(self.sampler) if kind is BatchSampler else kind
        draws_later = drawing not in _SAMPLERS_THAT_DRAW_AT_START
        with shared_random_numbers():
            samples = kind.__iter__(self)
            sample = next(samples, _END)
        while sample is not _END:
            yield sample
            with shared_random_numbers() if draws_later else nullcontext():
                sample = next(samples, _END)

    # without slots of its own, the subclass has the layout of `kind`, so that objects can change their class
    members = {"__iter__": iterate, "__slots__": (), "__module__": kind.__module__, _DRAWS_SHARED: True}
    return type(kind.__name__, (kind,), members)


def draw_order_from_shared_numbers(loader: Any) -> None:
    """Make the sampler of ``loader`` draw its order from the random numbers that all ranks share.

    The sampler gets a subclass of its class, so that its attributes and type stay what users expect. Samplers that
    draw no numbers, and loaders that save their position in the sampler, stay as they are.
    """
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or hasattr(loader, "state_dict")
    ):
        return
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    kind = type(sampler)
    drawing = type(sampler.sampler) if kind is BatchSampler else kind
    if drawing in (SequentialSampler, DistributedSampler) or hasattr(kind, _DRAWS_SHARED):
        return
    try:
        sampler.__class__ = _make_shared(kind)
    except TypeError as error:
        if not isinstance(sampler, Iterator):
            return  # lists and arrays draw nothing
        raise TypeError(
            "The order of the samples must come from the random numbers that all ranks share, but a sampler of type"
            f" {kind.__name__} cannot be made to draw them. Use a class with `__iter__`, such as a subclass of"
            " torch.utils.data.Sampler, or random_numbers='shared' of the strategy."
        ) from error


def fill_up(loader: DataLoader[Any], group: dist.ProcessGroup | None) -> Any:
    """Return a data loader with as many batches as on the rank with the most batches; see :class:`_FilledLoader`.

    Args:
        loader: This rank's data loader, with an :class:`EvaluationSampler`.
        group: CPU group of all ranks; None for a single process.

    Raises:
        ValueError: When a rank has no batches.
    """
    length, sampler = _get_optional_length(loader), get_optional_evaluation_sampler(loader)
    if group is None or length is None or sampler is None:
        return keep_in_step(loader, group, may_drop=True)
    own = length if sampler.own_samples else 0
    lengths: list[Any] = [None] * group.size()
    dist.all_gather_object(lengths, (length, own), group=group)
    _check_not_empty([length for length, _ in lengths])
    if len(set(lengths)) == 1:
        return loader
    return _FilledLoader(loader, own, max(length for length, _ in lengths))


def count_own_batches(loader: Any) -> float:
    """Return after how many batches the fillers of ``loader`` begin."""
    return loader.own_batches if isinstance(loader, _FilledLoader) else math.inf


def keep_in_step(loader: Any, group: dist.ProcessGroup | None, *, may_drop: bool) -> Any:
    """Return a data loader that ends together with the loaders of all other data parallel ranks.

    Loaders with the same known length are returned unchanged. If the known lengths differ, every loader ends after the
    shortest length. If a length is unknown, the ranks check together, before every batch, that no rank has run out.

    Args:
        loader: This rank's data loader.
        group: CPU group of all ranks; None for a single process.
        may_drop: Whether a rank with more batches than others may drop the surplus, with a warning. If False, a
            surplus is an error when a length is unknown, and loaders with known lengths are returned unchanged.

    Raises:
        ValueError: When a rank has no batches.
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
    _check_not_empty(lengths)
    if len(set(lengths)) == 1 or not may_drop:
        return loader
    _warn_of_ragged(lengths)
    shortened = _StatefulShortenedLoader if hasattr(loader, "state_dict") else _ShortenedLoader
    return shortened(loader, min(lengths))


class _LoaderWrapper:
    """Wrapper around a data loader, with all attributes of that loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # pickle and copy create a wrapper without calling `__init__`, which sets `_loader`
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


class _FilledLoader(_LoaderWrapper):
    """Loader that repeats its last batch as a filler, so that this rank takes part in the collectives of the others.

    Attributes:
        own_batches: Number of batches that count. All later ones are fillers.
    """

    def __init__(self, loader: Any, own_batches: int, length: int) -> None:
        super().__init__(loader)
        self.own_batches = own_batches
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        fillers = self._length - len(self._loader)
        spare = None
        for count, batch in enumerate(self._loader, 1):
            if fillers and count == len(self._loader):
                spare = _copy(batch)
            yield batch
        for _ in range(fillers):
            yield _copy(spare)


def _copy(batch: Any) -> Any:
    """Return a copy of ``batch``, which a step may change, or the batch itself if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # open files, locks and tensors of a graph raise different errors
        return batch


class _StatefulShortenedLoader(_ShortenedLoader):
    """Shortened loader whose position can be saved and restored.

    After the last batch, the saved state is the start of a new epoch, even if the wrapped loader has batches left.
    """

    has_global_position = False  # the saved position counts only this rank's batches

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
        self._is_cut = False  # whether the last epoch ended while this rank still had batches

    def __len__(self) -> int:
        if self._guessed_length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")  # raise the same error as `len(loader)`
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
        remedy = "Give all data parallel ranks the same number of batches, or give the loader a length."
        if not self._may_drop:
            raise ValueError(f"{message}, whose predictions would be lost. {remedy}")
        rank_zero_warn(f"{message}; all ranks stop here. {remedy}")


class _StatefulLockstepLoader(_LockstepLoader):
    """Loader that ends on all ranks together, and saves the position just after the last batch that was trained on.

    The wrapped loader itself is one batch ahead of that position, because Lightning prefetches a batch if the length is
    unknown.

    After the last batch, the saved state is the start of a new epoch, even if the wrapped loader has batches left.
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


def _check_not_empty(lengths: list[int]) -> None:
    if max(lengths) > 0 and min(lengths) == 0:
        raise ValueError(
            f"The data loader has {lengths} batches on ranks 0 to {len(lengths) - 1}, but every rank needs at least one"
            " batch. Use a dataset with at least one batch per data parallel rank, or fewer ranks."
        )


def _get_optional_length(loader: Any) -> int | None:
    """Return the length of ``loader``; None if it is unknown, or if it is only a guess, as for iterable datasets."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    return _get_optional_guess(loader)


def _get_shortest_guess(loader: Any, group: dist.ProcessGroup) -> int | None:
    """Return the shortest length that the ranks' loaders report, or None if any loader reports none.

    Progress bars and ``val_check_interval`` use this length.
    """
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
