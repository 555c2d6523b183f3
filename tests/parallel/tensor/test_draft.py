"""Drafts of tensor parallel plans: what an author gets for an own model."""

import copy

import pytest
import torch
from helpers.models import LLAMA, make_causal_lm
from helpers.oracle import assert_equal_gradients
from helpers.ranks import run_ranks
from helpers.tensor_parallel import get_gradients, make_mesh
from torch import Tensor, nn

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel
from lightning_fsdp2.parallel.tensor.draft import draft_plan
from lightning_fsdp2.parallel.tensor.plans import NoPlanError


class Block(nn.Module):
    """A gated MLP and one in a Sequential, and a layer that computes three things at once."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = nn.ModuleDict({"gate": nn.Linear(8, 32), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)})
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.attention = nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})

    def forward(self, hidden: Tensor) -> Tensor:
        gated = self.gated
        hidden = hidden + gated["down"](gated["gate"](hidden).sigmoid() * gated["up"](hidden))
        hidden = hidden + self.mlp(hidden)
        return hidden + self.attention["out"](self.attention["qkv"](hidden)[..., :8])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


PLAN = {
    "blocks.*.gated.gate": "colwise",
    "blocks.*.gated.up": "colwise",
    "blocks.*.gated.down": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
}


def test_the_draft_splits_blocks_that_only_widen_and_narrow() -> None:
    assert draft_plan(Own()) == PLAN


def test_attention_whose_output_is_in_another_block_has_no_entry() -> None:
    """As in BERT: there the last of three square layers computes the values, and reads the block's input."""
    block = nn.ModuleDict({"query": nn.Linear(8, 8), "key": nn.Linear(8, 8), "value": nn.Linear(8, 8)})
    assert draft_plan(nn.ModuleDict({"layers": nn.ModuleList([block])})) == {}
    block["out"] = nn.Linear(8, 8)
    assert draft_plan(nn.ModuleDict({"layers": nn.ModuleList([block])})) == {
        "layers.*.query": "colwise",
        "layers.*.key": "colwise",
        "layers.*.value": "colwise",
        "layers.*.out": "rowwise",
    }


def test_layers_in_a_sequential_are_drafted_too() -> None:
    model = Own()
    model.blocks = nn.Sequential(*model.blocks)
    assert draft_plan(model) == PLAN


def test_the_draft_for_a_llama_is_that_of_its_family() -> None:
    drafted = draft_plan(make_causal_lm(LLAMA))
    assert {name.rpartition(".")[2]: style for name, style in drafted.items()} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
        **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
    }


def test_models_without_lists_of_layers_get_none() -> None:
    assert draft_plan(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == {}


@pytest.mark.guarantees("drafts-of-plans")
def test_the_draft_has_the_gradients_of_one_process() -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = Own()
        sharded = copy.deepcopy(plain)
        with pytest.raises(NoPlanError) as raised:
            apply_tensor_parallel(find_structure(sharded), make_mesh())
        assert f"such as {PLAN}, a draft from the shapes" in str(raised.value)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), plan=PLAN)
        hidden = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
        for model in (plain, sharded):
            model(hidden).square().sum().backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))

    run_ranks(run, 2)


class FusedAttention(nn.Module):
    """Attention as in nanoGPT: one layer computes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.c_attn(hidden).chunk(3, dim=-1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return hidden + self.c_proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("style", ["qkv_colwise", "colwise"])
def test_queries_keys_and_values_in_one_layer(style: str, caplog: pytest.LogCaptureFixture) -> None:
    """The style for them has the gradients of one process; another one is warned of, since nothing else would show."""

    def run() -> tuple[list[str], bool]:
        torch.manual_seed(0)
        plain = nn.ModuleDict({"blocks": nn.ModuleList([FusedAttention(), FusedAttention()])})
        sharded = copy.deepcopy(plain)
        plan = {"blocks.*.c_attn": style, "blocks.*.c_proj": "rowwise"}
        with caplog.at_level("WARNING"):
            apply_tensor_parallel(find_structure(sharded), make_mesh(), plan=plan)
        for model in (plain, sharded):
            hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
            for block in model["blocks"]:
                hidden = block(hidden)
            hidden.square().sum().backward()
        gradients, expected = get_gradients(sharded), get_gradients(plain)
        is_equal = all(torch.allclose(gradients[name], expected[name], atol=1e-5) for name in expected)
        return caplog.messages, is_equal

    (messages, is_equal), (others, _) = run_ranks(run, 2)
    assert others == []
    assert is_equal == (style == "qkv_colwise")
    assert [message.partition(":")[0] for message in messages] == (
        ["tp_plan['blocks.*.c_attn']"] if not is_equal else []
    )
    assert all("use 'qkv_colwise' instead of 'colwise'" in message for message in messages)
