"""Each style on two ranks, alone through torch's ``parallelize_module``, against the plain module in one process."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.oracle import assert_equal_gradients, make_config
from helpers.ranks import run_ranks
from helpers.tensor_parallel import make_mesh, to_whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead
from transformers.pytorch_utils import Conv1D

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel
from lightning_fsdp2.parallel.tensor.plans import STYLES
from lightning_fsdp2.parallel.tensor.styles import (
    ColumnWise,
    FeatureEmbedding,
    IdentityExpert,
    LatentKeyValue,
    LocalHeads,
    PerHeadModules,
    Replicated,
    RowWise,
    ShardedNorm,
    ShardParameter,
    SummedParameter,
    SummedResult,
    VocabularyEmbedding,
)

Plan = dict[str, ParallelStyle] | ParallelStyle


def make_random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def randomise(module: nn.Module) -> nn.Module:
    """Give every parameter, biases and norms included, values that matter."""
    for index, parameter in enumerate(module.parameters()):
        parameter.data.copy_(make_random(*parameter.shape, seed=100 + index))
    return module


def take_whole(whole: Tensor) -> Tensor:
    return whole


def take_chunk(whole: Tensor) -> Tensor:
    """This rank's part of the last dim."""
    return whole.chunk(2, -1)[dist.get_rank()]


def take_sections(*sections: int) -> Callable[[Tensor], Tensor]:
    """This rank's part of each section of the last dim."""
    return lambda whole: torch.cat([take_chunk(part) for part in whole.split(sections, -1)], -1)


def parallelize(module: nn.Module, plan: Plan) -> None:
    """Torch's function is for modules that are not inside of one another."""
    names = list(plan) if isinstance(plan, dict) else []
    is_nested = any(name != other and name.startswith(other) for name in names for other in names)
    if is_nested:
        apply_tensor_parallel(find_structure(module), make_mesh(), plan=plan)
    else:
        parallelize_module(module, make_mesh(), plan)


def assert_like_plain(
    plain: nn.Module,
    plan: Plan,
    *inputs: Tensor,
    take: Callable[[Tensor], Tensor] = take_whole,
    **keywords: Any,
) -> nn.Module:
    """Compare results, gradients of inputs, and gradients of parameters, with those of ``plain``; return the other one.

    Args:
        plain: Gets random parameters.
        plan: For a copy of ``plain``.
        *inputs: Whole, as on every rank.
        take: Cuts out of a whole result what this rank returns of it.
        **keywords: For forward.
    """
    sharded = copy.deepcopy(randomise(plain))
    parallelize(sharded, plan)
    wholes: list[Tensor] = []
    runs = []
    for module, cut in ((plain, take_whole), (sharded, take)):
        own = [value.clone().requires_grad_(value.is_floating_point()) for value in inputs]
        results = module(*own, **keywords)
        results = results if isinstance(results, tuple) else (results,)
        wholes = wholes or list(results)
        weights = [make_random(*whole.shape, seed=50 + index) for index, whole in enumerate(wholes)]
        torch.stack([(r * cut(w)).sum() for r, w in zip(results, weights, strict=True)]).sum().backward()
        gradients = {f"input {index}": value.grad for index, value in enumerate(own) if value.is_floating_point()}
        gradients |= {name: to_whole(parameter.grad) for name, parameter in module.named_parameters()}
        runs.append((results, gradients))
    (expected_results, expected), (results, actual) = runs
    for result, whole in zip(results, expected_results, strict=True):
        torch.testing.assert_close(result, take(whole), rtol=1e-5, atol=1e-6)
    assert_equal_gradients(actual, expected)
    return sharded


# ---------------------------------------------------------------------- column-wise


def test_column_wise_linear() -> None:
    def run() -> None:
        hidden = make_random(2, 3, 6)
        assert_like_plain(nn.Linear(6, 8), ColumnWise(), hidden, take=take_chunk)
        assert_like_plain(nn.Linear(6, 8, bias=False), ColumnWise(), hidden, take=take_chunk)
        assert_like_plain(nn.Linear(6, 8), ColumnWise(gather_output=True), hidden)
        for outputs in (7, 1):  # on one of the ranks there is less, or nothing
            assert_like_plain(nn.Linear(6, outputs), ColumnWise(gather_output=True), hidden)
        sharded = assert_like_plain(nn.Linear(6, 8), ColumnWise(sections=2), hidden, take=take_sections(4, 4))
        assert sharded.weight.to_local().numel() == 24
        for sections in ((4, 2, 2), (2, 6)):
            take = take_sections(*sections)
            sharded = assert_like_plain(nn.Linear(6, 8), ColumnWise(sections=sections), hidden, take=take)
            assert sharded.weight.to_local().numel() == 24

    run_ranks(run, 2)


def test_column_wise_conv1d() -> None:
    def run() -> None:
        hidden = make_random(2, 3, 6)
        assert_like_plain(Conv1D(8, 6), ColumnWise(), hidden, take=take_chunk)
        assert_like_plain(Conv1D(12, 6), ColumnWise(sections=3), hidden, take=take_sections(4, 4, 4))
        assert_like_plain(Conv1D(8, 6), ColumnWise(sections=(4, 2, 2)), hidden, take=take_sections(4, 2, 2))

    run_ranks(run, 2)


@pytest.mark.parametrize("outputs", [8, 7])
def test_column_wise_conv1d_with_gathered_output(outputs: int) -> None:
    def run() -> None:
        assert_like_plain(Conv1D(outputs, 6), ColumnWise(gather_output=True), make_random(2, 3, 6))

    run_ranks(run, 2)


def test_gathered_outputs_of_packed_projections_are_in_the_order_of_the_plain_module() -> None:
    def run() -> None:
        style = ColumnWise(gather_output=True, sections=2)
        assert_like_plain(nn.Linear(6, 8), style, make_random(2, 3, 6))

    run_ranks(run, 2)


def test_a_frozen_projection_passes_the_gradient_on() -> None:
    def run() -> None:
        plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        for parameter in plain.parameters():
            parameter.requires_grad = False
        sharded = assert_like_plain(plain, {"0": ColumnWise(), "2": RowWise()}, make_random(2, 6))
        assert not any(parameter.requires_grad for parameter in sharded.parameters())

    run_ranks(run, 2)


# ---------------------------------------------------------------------- row-wise


def test_row_wise_after_column_wise() -> None:
    def run() -> None:
        hidden = make_random(2, 3, 6)
        for plain in (
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5)),
            nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 5, bias=False)),
            nn.Sequential(Conv1D(8, 6), nn.GELU(), Conv1D(5, 8)),
        ):
            sharded = assert_like_plain(plain, {"0": ColumnWise(), "2": RowWise()}, hidden)
            assert sharded[2].weight.to_local().numel() == 20

    run_ranks(run, 2)


def test_row_wise_of_a_whole_input() -> None:
    def run() -> None:
        style = RowWise(split_input=True)
        for plain in (nn.Linear(8, 6), nn.Linear(8, 6, bias=False), nn.Linear(7, 6), nn.Linear(1, 6), Conv1D(6, 8)):
            assert_like_plain(plain, style, make_random(2, 3, plain.weight.numel() // 6))

    run_ranks(run, 2)


def test_row_wise_that_returns_a_part_of_its_outputs() -> None:
    def run() -> None:
        style = RowWise(split_input=True, scatter_output=True)
        assert not style.reduces
        for plain in (nn.Linear(8, 6), nn.Linear(8, 6, bias=False), Conv1D(6, 8)):
            sharded = assert_like_plain(plain, style, make_random(2, 3, 8), take=take_chunk)
            assert sharded.weight.to_local().numel() == 24

    run_ranks(run, 2)


def test_an_exception_inside_of_a_row_wise_projection_leaves_its_bias_in_place() -> None:
    def run() -> None:
        for plain in (nn.Linear(8, 6), Conv1D(6, 8)):
            sharded = parallelize_module(randomise(plain), make_mesh(), RowWise())
            bias = sharded.bias
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
                sharded(make_random(2, 5))
            assert sharded.bias is bias

    run_ranks(run, 2)


# ---------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("padding", [None, 0, 3, 10])
def test_embeddings_sharded_over_the_vocabulary_or_over_features(padding: int | None) -> None:
    def run() -> None:
        ids = torch.tensor([[0, 10, 3, 5], [6, 5, 10, 0]])  # rank 0 has 0 to 5, rank 1 has 6 to 10
        sharded = assert_like_plain(nn.Embedding(11, 5, padding_idx=padding), VocabularyEmbedding(), ids)
        assert sharded.weight.to_local().shape == ((6, 5) if dist.get_rank() == 0 else (5, 5))
        assert sharded.padding_idx == padding
        sharded = assert_like_plain(nn.Embedding(11, 5, padding_idx=padding), FeatureEmbedding(), ids)
        assert sharded.weight.to_local().shape == ((11, 3) if dist.get_rank() == 0 else (11, 2))

    run_ranks(run, 2)


def test_an_embedding_of_which_the_last_rank_has_nothing() -> None:
    def run() -> None:
        assert_like_plain(nn.Embedding(5, 4), VocabularyEmbedding(), torch.tensor([[0, 4, 2], [3, 1, 1]]))

    run_ranks(run, 4)


# ---------------------------------------------------------------------- norms


def test_a_norm_over_sharded_features_is_that_over_all_of_them() -> None:
    def run() -> None:
        for norm in (LlamaRMSNorm(8), GemmaRMSNorm(8)):  # w and 1 + w
            plain = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 6))
            plan = {"0": ColumnWise(), "1": ShardedNorm(), "2": RowWise()}
            sharded = assert_like_plain(plain, plan, make_random(2, 3, 6))
            assert sharded[1].weight.to_local().shape == (4,)

    run_ranks(run, 2)


def test_torch_s_own_norm_over_sharded_features() -> None:
    def run() -> None:
        plan = {"0": ColumnWise(), "1": ShardedNorm(), "2": RowWise()}
        for epsilon in (0.1, None):
            norm = nn.RMSNorm(8, eps=epsilon)
            assert_like_plain(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 6)), plan, make_random(2, 3, 6))

    run_ranks(run, 2)


class HeadNorms(nn.Module):
    """Normalises each of four heads, with the same weights or with its own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.norm = norm
        self.down = nn.Linear(16, 6)
        self.last = nn.LayerNorm(6)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.up(hidden).unflatten(-1, (-1, 4)).transpose(1, 2)
        return self.last(self.down(self.norm(heads).transpose(1, 2).flatten(-2)))


@pytest.mark.guarantees("head-norms")
def test_replicated_norms_of_local_heads_and_of_whole_states() -> None:
    def run() -> None:
        plan = {"up": ColumnWise(), "norm": Replicated(on_shards=True), "down": RowWise(), "last": Replicated()}
        for norm in (LlamaRMSNorm(4), nn.LayerNorm(4)):
            sharded = assert_like_plain(HeadNorms(norm), plan, make_random(2, 3, 6))
            assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())

    run_ranks(run, 2)


def test_modules_for_each_head() -> None:
    def run() -> None:
        plan = {"up": ColumnWise(), "norm": PerHeadModules("norms"), "down": RowWise()}
        sharded = assert_like_plain(HeadNorms(StableLmLayerNormPerHead(4, 4, bias=True)), plan, make_random(2, 3, 6))
        assert len(sharded.norm.norms) == 4, "all heads are there again after forward"
        with pytest.raises(RuntimeError, match="normalized_shape"):
            sharded.norm(make_random(2, 2, 3, 7))
        assert len(sharded.norm.norms) == 4

    run_ranks(run, 2)


# ---------------------------------------------------------------------- experts

MOE = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_packed_experts_behind_a_router_that_all_ranks_compute(implementation: str) -> None:
    def run() -> None:
        config = make_config({"model_type": "mixtral", **MOE})
        config._experts_implementation = implementation
        plan = {
            "experts": SummedResult(),
            "experts.gate_up_proj": STYLES["packed_colwise"],
            "experts.down_proj": STYLES["rowwise"],
        }
        sharded = assert_like_plain(MixtralSparseMoeBlock(config), plan, make_random(2, 5, 8))
        assert sharded.experts.gate_up_proj.to_local().shape == (4, 16, 8)
        assert sharded.experts.down_proj.to_local().shape == (4, 8, 8)
        assert sharded.gate.weight.to_local().shape == (4, 8)

    run_ranks(run, 2)


def test_experts_with_biases_and_alternating_gate_and_up() -> None:
    def run() -> None:
        config = make_config({"model_type": "gpt_oss", **MOE})
        config._experts_implementation = "eager"
        plan = {
            "experts": SummedResult(),
            "experts.gate_up_proj": ShardParameter(dim=2),
            "experts.gate_up_proj_bias": ShardParameter(dim=-1),
            "experts.down_proj": ShardParameter(dim=1),
            "experts.down_proj_bias": SummedParameter(),
        }
        sharded = assert_like_plain(GptOssMLP(config), plan, make_random(2, 5, 8))
        shapes = [tuple(parameter.to_local().shape) for parameter in sharded.experts.parameters()]
        assert shapes == [(4, 8, 16), (4, 16), (4, 8, 8), (4, 8)]

    run_ranks(run, 2)


def test_transposed_packed_experts() -> None:
    def run() -> None:
        experts = Llama4TextExperts(make_config({"model_type": "llama4_text", **MOE}))
        plan = {
            "": SummedResult(),
            "gate_up_proj": STYLES["packed_rowwise"],
            "down_proj": STYLES["colwise"],
        }
        assert_like_plain(experts, plan, make_random(8, 8))

    run_ranks(run, 2)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = SumOfExperts()

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        return self.experts(hidden, weights=weights)


class SumOfExperts(nn.Module):
    """Two terms of one sum: a projection with a bias inside, and the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(8, 6))
        self.down = nn.Parameter(torch.empty(6, 8))
        self.bias = nn.Parameter(torch.empty(6))
        self.identity = nn.Identity()

    def forward(self, hidden: Tensor, *, weights: Tensor) -> Tensor:
        computed = nn.functional.gelu(hidden @ self.up.mT) @ self.down.mT + self.bias
        return weights * computed + (1 - weights) * self.identity(hidden)


def test_a_summed_parameter_and_an_identity_expert_enter_a_sum_over_ranks_once() -> None:
    def run() -> None:
        plan = {
            "experts": SummedResult(),
            "experts.up": ShardParameter(dim=0),
            "experts.down": ShardParameter(dim=-1),
            "experts.bias": SummedParameter(),
            "experts.identity": IdentityExpert(),
        }
        assert_like_plain(Mixture(), plan, make_random(3, 6), make_random(3, 1, seed=2))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- attention


class LatentAttention(nn.Module):
    """Four heads, each of which reads a part of the latent's projection and the one rotary part."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a = nn.Linear(6, 5 + 2)
        self.norm = nn.LayerNorm(5)
        self.kv_b = nn.Linear(5, 4 * 2)
        self.out = nn.Linear(8, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        latent, rotary = self.kv_a(hidden).split([5, 2], -1)
        heads = self.kv_b(self.norm(latent)).unflatten(-1, (-1, 2)) * rotary.unsqueeze(-2)
        return self.out(heads.flatten(-2))


def test_the_rotary_part_of_a_latent_projection_has_its_gradient_summed_and_the_latent_part_has_not() -> None:
    def run() -> None:
        plan = {"kv_a": LatentKeyValue(rotary_features=2), "kv_b": ColumnWise(), "out": RowWise()}
        assert_like_plain(LatentAttention(), plan, make_random(2, 3, 6))
        sharded = parallelize_module(nn.Linear(6, 7), make_mesh(), LatentKeyValue())
        with pytest.raises(ValueError, match=r"rotary_features=None.*qk_rope_head_dim"):
            sharded(make_random(2, 6))

    run_ranks(run, 2)


class SharedConfig(SimpleNamespace):
    """Like that of a model, which all of its modules read."""

    def __deepcopy__(self, memo: Any) -> "SharedConfig":
        return self


class CountingAttention(nn.Module):
    """An attention that reads its number of heads in two places, with values for each head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.num_heads = 4
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, hidden: Tensor, *, alibi: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.up(hidden).view(batch, length, self.num_heads, 2).transpose(1, 2)
        if mask is not None:
            heads = heads + mask
        if alibi is not None:
            heads = heads * alibi.view(batch, self.config.num_attention_heads, 1, 1) + self.config.bias
        return self.down(heads.transpose(1, 2).reshape(batch, length, -1))


def test_an_attention_that_counts_its_heads_counts_those_of_the_rank() -> None:
    def run() -> None:
        config = SharedConfig(num_attention_heads=4, bias=0.5)
        local = LocalHeads(
            attributes=("num_heads",), config=("num_attention_heads",), per_head=("alibi", "mask", "other"), heads=4
        )
        plan = {"": local, "up": ColumnWise(), "down": RowWise()}
        alibi = make_random(2 * 4, 1, 1, seed=2)  # [batch * heads, 1, 1]
        for mask in (make_random(2, 4, 3, 1, seed=3), make_random(2, 1, 3, 1, seed=4), None):
            sharded = assert_like_plain(CountingAttention(config), plan, make_random(2, 3, 6), alibi=alibi, mask=mask)
            assert (sharded.num_heads, sharded.config.num_attention_heads, sharded.config.bias) == (2, 2, 0.5)
        assert config.num_attention_heads == 4, "the config belongs to the model"
        odd = CountingAttention(SharedConfig(num_attention_heads=3))
        with pytest.raises(ValueError, match="tp_size=2 does not divide num_attention_heads=3 of SharedConfig"):
            parallelize_module(odd, make_mesh(), LocalHeads(config=("num_attention_heads",)))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what does not fit


class MarkedEmbedding(nn.Embedding):
    """Has a vector of its own for one token."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.mark = nn.Parameter(torch.zeros(4))


def test_a_style_on_the_wrong_module_is_a_type_error_that_names_both() -> None:
    cases: list[tuple[ParallelStyle, nn.Module, str]] = [
        (ColumnWise(), nn.LayerNorm(4), "LayerNorm is not a linear layer; the style ColumnWise"),
        (ColumnWise(), nn.Embedding(4, 4), "Embedding is not a linear layer; the style ColumnWise"),
        (ColumnWise(), nn.GELU(), "GELU is not a linear layer; the style ColumnWise"),
        (RowWise(), nn.Embedding(4, 4), "Embedding is not a linear layer; the style RowWise"),
        (RowWise(), nn.Conv1d(4, 4, 1), "Conv1d is not a linear layer; the style RowWise"),
        (VocabularyEmbedding(), nn.Linear(4, 4), r"Linear is not an nn\.Embedding; the style VocabularyEmbedding"),
        (
            FeatureEmbedding(),
            nn.EmbeddingBag(4, 4),
            r"EmbeddingBag is not an nn\.Embedding; the style FeatureEmbedding",
        ),
        (VocabularyEmbedding(), nn.Embedding(4, 4, max_norm=1.0), "max_norm, sparse or scale_grad_by_freq"),
        (VocabularyEmbedding(), nn.Embedding(4, 4, scale_grad_by_freq=True), "max_norm, sparse or scale_grad_by_freq"),
        (FeatureEmbedding(), nn.Embedding(4, 4, sparse=True), "max_norm, sparse or scale_grad_by_freq"),
        (
            VocabularyEmbedding(),
            MarkedEmbedding(),
            "MarkedEmbedding has .* use the style 'replicate' for this module",
        ),
        (ShardedNorm(), nn.LayerNorm(4), "LayerNorm is not an RMS norm"),
        (ShardedNorm(), nn.Linear(4, 4), "Linear is not an RMS norm"),
    ]

    def run() -> None:
        mesh = make_mesh()
        for style, module, message in cases:
            with pytest.raises(TypeError, match=message):
                parallelize_module(module, mesh, style)
            assert not any(isinstance(parameter, DTensor) for parameter in module.parameters()), message

    run_ranks(run, 1)
    for style in (VocabularyEmbedding(), ShardedNorm(), LocalHeads(), SummedResult()):
        with pytest.raises(TypeError, match=f"The style {type(style).__name__} is for modules, not for a parameter"):
            style.get_parameter_layout(torch.empty(4, 4))


# ---------------------------------------------------------------------- styles as values


def test_one_style_serves_many_modules_and_is_not_changed() -> None:
    column, row = ColumnWise(gather_output=True), RowWise(split_input=True)

    def run() -> None:
        plain = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 6), nn.Linear(6, 4))
        plan = {"0": column, "1": row, "2": column, "3": row, "4": column}
        assert_like_plain(plain, plan, make_random(2, 6))
        assert_like_plain(copy.deepcopy(plain), plan, make_random(2, 6))
        assert (column, row) == (ColumnWise(gather_output=True), RowWise(split_input=True))

    run_ranks(run, 2)


def test_styles_are_values() -> None:
    assert ColumnWise(sections=2) == ColumnWise(sections=2) != ColumnWise()
    assert ColumnWise() != RowWise()
    assert len({RowWise(), RowWise(split_input=True), RowWise()}) == 2
