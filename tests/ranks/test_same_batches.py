"""The ranks of a replica read the same batch: what tells batches apart, and what the first forward compares."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models import LLAMA, PlainTransformer, make_causal_lm
from helpers.ranks import run_ranks
from helpers.user_modules import make_mixed_batch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BatchEncoding

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.ranks.same_batches import check_first_batch, check_same_batch, get_batch_fingerprint

CHANGES: dict[str, dict[str, Any]] = {
    "value": {"input_ids": torch.tensor([[0, 1, 2], [3, 4, 6]])},
    "shape": {"input_ids": torch.arange(6).reshape(3, 2)},
    "dtype": {"input_ids": torch.arange(6, dtype=torch.int32).reshape(2, 3)},
    "order of values": {"input_ids": torch.tensor([[3, 4, 5], [0, 1, 2]])},
    "bfloat16 value": {"pixels": torch.linspace(-1, 0.5, 4, dtype=torch.bfloat16)},
    "bool": {"mask": torch.tensor([True, True])},
    "scalar": {"scalar": torch.tensor(-1.5)},
    "dtype of nothing": {"empty": torch.empty(0, dtype=torch.int64)},
    "text": {"texts": ["one", "three"]},
    "order of texts": {"texts": ["two", "one"]},
    "nested value": {"nested": [{"a": (1, 2.25, None)}]},
    "nested key": {"nested": [{"b": (1, 2.5, None)}]},
    "one more key": {"more": torch.tensor(1)},
}


def test_fingerprints_are_equal_for_equal_batches_only() -> None:
    fingerprints = {"unchanged": get_batch_fingerprint(make_mixed_batch())}
    assert get_batch_fingerprint(make_mixed_batch()) == fingerprints["unchanged"]
    not_contiguous = {**make_mixed_batch(), "input_ids": torch.arange(6).reshape(2, 3).T.contiguous().T}
    assert get_batch_fingerprint(not_contiguous) == fingerprints["unchanged"]
    for name, change in CHANGES.items():
        fingerprints[name] = get_batch_fingerprint({**make_mixed_batch(), **change})
    fingerprints["one list for two"] = get_batch_fingerprint([[1, 2], 3])
    fingerprints["two lists for one"] = get_batch_fingerprint([[1], [2, 3]])
    fingerprints["text for a number"] = get_batch_fingerprint({"1": 0})
    fingerprints["number for a text"] = get_batch_fingerprint({1: 0})
    renamed = {("inputs" if key == "input_ids" else key): value for key, value in make_mixed_batch().items()}
    fingerprints["key"] = get_batch_fingerprint(renamed)
    assert len(set(fingerprints.values())) == len(fingerprints)


@pytest.mark.parametrize(
    "make", [lambda t: t, lambda t: [t], lambda t: (t, t), lambda t: BatchEncoding({"input_ids": t})]
)
def test_fingerprints_of_batches_of_any_kind(make: Callable[[Tensor], Any]) -> None:
    assert get_batch_fingerprint(make(torch.arange(3))) == get_batch_fingerprint(make(torch.arange(3)))
    assert get_batch_fingerprint(make(torch.arange(3))) != get_batch_fingerprint(make(torch.arange(1, 4)))


def make_loader(ranks: int, rank: int) -> DataLoader[Any]:
    sequences = torch.arange(8 * 8).view(8, 8) % 16
    return DataLoader(sequences, sampler=DistributedSampler(sequences, ranks, rank, shuffle=False))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}], ids=str)
def test_a_sampler_for_all_ranks_is_refused_in_the_first_forward_of_a_replica(sizes: dict[str, Any]) -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu", **sizes)
        manager = FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh)
        model = manager.parallelize(make_causal_lm(LLAMA))
        batch = next(iter(make_loader(dist.get_world_size(), dist.get_rank())))
        with pytest.raises(ValueError, match=r'different first batches.*get_mesh\(mesh, "data_parallel"\)'):
            model(input_ids=batch, labels=batch)
        right = manager.parallelize(make_causal_lm(LLAMA))
        ranks = get_mesh(mesh, "data_parallel")
        for batch in make_loader(ranks.size(), ranks.get_local_rank()):
            right(input_ids=batch, labels=batch).loss.backward()

    run_ranks(run, 2)


def test_only_the_first_training_forward_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu", tp_size=2)
        manager = FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh)
        model: Any = manager.parallelize(make_causal_lm(LLAMA))
        unchecked = manager.parallelize(make_causal_lm(LLAMA), checks_batches=False)
        compared: list[Any] = []
        gather = dist.all_gather_object
        monkeypatch.setattr(dist, "all_gather_object", lambda *args, **rest: compared.append(gather(*args, **rest)))
        tokens = torch.arange(8).view(1, 8)
        model.eval()(tokens)
        model.generate(tokens, max_new_tokens=2, do_sample=False)
        with torch.no_grad():
            model.train()(tokens)
        assert compared == []
        model(tokens)
        assert len(compared) == 1
        model(tokens + dist.get_rank())
        unchecked(tokens)
        assert len(compared) == 1

    run_ranks(run, 2)


def test_ranks_that_read_different_data_are_not_compared() -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu", dp_size=2)
        model = FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh).parallelize(PlainTransformer())
        model(torch.full((1, 8), dist.get_rank()))

    run_ranks(run, 2)


def test_all_ranks_of_a_replica_raise_if_one_differs() -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu", tp_size=2, cp_size=2)
        groups = [get_mesh(mesh, axis).get_group() for axis in ("context_parallel", "tensor_parallel")]
        with pytest.raises(ValueError, match="different first batches"):
            check_same_batch({"input_ids": torch.tensor(dist.get_rank() == 1)}, groups)

    run_ranks(run, 4)


def test_arguments_of_any_kind_are_compared_except_for_the_values_of_floats() -> None:
    def run() -> None:
        rank, group = dist.get_rank(), [dist.group.WORLD]

        class Model(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> None: ...

        for same in (torch.rand(2), torch.empty(rank, device="meta"), object(), lambda: rank, {"a": (None, rank)}):
            model = Model()
            check_first_batch(model, group)  # type: ignore[arg-type]
            model(same, x=same)
        for other in ([torch.tensor(rank)], BatchEncoding({"a": torch.tensor(rank)}), torch.empty(rank)):
            model = Model()
            check_first_batch(model, group)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="different first batches"):
                model(x=other)

    run_ranks(run, 2)
