"""Sharded tensors are taken out of containers and put back."""

from collections import OrderedDict

import torch
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from lightning_fsdp2.checkpoint.nested import is_marked, pop_sharded, put_sharded, unflatten


def test_other_values_stay_where_they_are() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1,))
        first, second = (distribute_tensor(torch.ones(size), mesh) for size in (2, 3))
        plain = torch.zeros(1)
        value = OrderedDict(a=[first, 1, None], b={"weight": second, "text": "0"}, c=plain)
        marked, sharded = pop_sharded(value)
        assert sharded == {"0": {"": first}, "1": {"weight": second}}
        assert (marked["a"][1:], marked["b"]["text"], marked["c"]) == ([1, None], "0", plain)
        assert [is_marked(marked[key]) for key in "abc"] == [True, True, False]
        whole = put_sharded(marked, sharded)
        assert type(whole) is OrderedDict
        assert whole["a"][0] is first
        assert whole["b"]["weight"] is second
        _, sharded = pop_sharded(value, numbered=False)
        assert list(sharded) == ["['a'][0]", "['b']['weight']"]
        assert pop_sharded({"a": plain}) == ({"a": plain}, {})

    run_ranks(run, 1)


def test_numbers_in_paths_are_places_in_lists() -> None:
    values = {("a", 1, "x"): 1, ("a", 0, "x"): 0, ("b",): [2], ("c", "0"): 3}
    assert unflatten(values) == {"a": [{"x": 0}, {"x": 1}], "b": [2], "c": {"0": 3}}
