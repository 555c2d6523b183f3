"""What tensor parallelism refuses, by name and before anything is touched."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from helpers.models import GPT2, LLAMA, VOCABULARY, PlainTransformer
from helpers.oracle import make_config
from helpers.ranks import run_ranks
from helpers.tensor_parallel import make_mesh, make_rough_model, refuse
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.tensor import plans as tp_plans
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel
from lightning_fsdp2.parallel.tensor.plans import NoPlanError
from lightning_fsdp2.parallel.tensor.styles import ColumnWise

LAYER = "model.layers.*."


def make_headless() -> nn.Module:
    return LlamaModel(make_config(LLAMA))


def make_classifier() -> nn.Module:
    return LlamaForSequenceClassification(make_config({**LLAMA, "pad_token_id": 0}))


def make_with_loss(function: Any) -> nn.Module:
    model = make_rough_model(LLAMA)
    model.loss_function = function
    return model


def make_with_shared_mlp() -> nn.Module:
    model = make_rough_model(LLAMA)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


def ForCausalLMLoss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """A user's, with the name of the one in transformers."""
    return logits.mean()


def other_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return logits.sum()


OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "ffn_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
COLUMN_WISE = {f"{LAYER}self_attn.{name}_proj": "colwise" for name in "qkv"}
FOREIGN = {f"{LAYER}mlp.up_proj": ColwiseParallel(use_local_output=False)}

REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "nothing-of-that-name": (
        lambda: make_rough_model(LLAMA),
        {"plan": {f"{LAYER}self_attn.q_proj": "colwise", f"{LAYER}self_attn.q_prj": "colwise"}},
        ValueError,
        r"tp_plan\['model\.layers\.\*\.self_attn\.q_prj'\] matches no module and no parameter of LlamaForCausalLM\. .*"
        r"Examples of existing names are model\.layers\.0",
    ),
    "a-name-that-is-not-whole": (
        lambda: make_rough_model(LLAMA),
        {"plan": {"layers.*.mlp.up_proj": "colwise"}},
        ValueError,
        r"tp_plan\['layers\.\*\.mlp\.up_proj'\] matches no module",
    ),
    "an-asterisk-is-one-component": (
        lambda: make_rough_model(LLAMA),
        {"plan": {"*.up_proj": "colwise"}},
        ValueError,
        r"tp_plan\['\*\.up_proj'\] matches no module",
    ),
    "an-unknown-style": (
        lambda: make_rough_model(LLAMA),
        {"plan": {"lm_head": "columnwise"}},
        ValueError,
        r"tp_plan\['lm_head'\]='columnwise' is not a known style",
    ),
    "no-plan": (lambda: PlainTransformer(), {}, NoPlanError, "PlainTransformer has no tensor parallel plan"),
    "no-plan-of-its-own": (
        lambda: make_rough_model(GPT2),
        {"plan": "hf"},
        NoPlanError,
        "GPT2LMHeadModel has no tensor par",
    ),
    "fewer-key-value-heads": (
        lambda: make_rough_model({**LLAMA, "num_key_value_heads": 1}),
        {},
        ValueError,
        r"tp_size=2 does not divide num_key_value_heads=1 of LlamaConfig; use 1 \(at model\.layers\.0\.self_attn\)",
    ),
    "odd-heads": (
        lambda: make_rough_model({**GPT2, "n_embd": 33, "n_head": 3}),
        {},
        ValueError,
        "tp_size=2 does not divide num_attention_heads=3 of GPT2Config; use 1 or 3 ",
    ),
    "odd-intermediate-size": (
        lambda: make_rough_model({**LLAMA, "intermediate_size": 63}),
        {},
        ValueError,
        r"tp_size=2 does not divide the sharded size 63 of model\.layers\.0\.mlp\.\w+\.weight; use 1, 3, 7, 9, 21 or 6",
    ),
    "odd-section": (
        lambda: make_rough_model(LLAMA),
        {"plan": {f"{LAYER}mlp.up_proj": ColumnWise(sections=(33, 31))}},
        ValueError,
        r"tp_size=2 does not divide the sharded size 33 \+ 31 of model\.layers\.0\.mlp\.up_proj\.weight; use 1",
    ),
    "a-norm-column-wise": (
        lambda: make_rough_model(LLAMA),
        {"plan": {"model.norm": "colwise"}},
        TypeError,
        r"tp_plan: ColumnWise does not fit model\.norm: LlamaRMSNorm is not a linear layer",
    ),
    "nothing-row-wise-after-what-is-column-wise": (
        lambda: make_rough_model(LLAMA),
        {"plan": {f"{LAYER}mlp.up_proj": "colwise", f"{LAYER}mlp.down_proj": "rowwise", **COLUMN_WISE}},
        ValueError,
        r"the outputs of model\.layers\.0\.self_attn\.[qkv]_proj are sharded .* Add a 'rowwise' entry for"
        " the projection",
    ),
    "an-embedding-row-wise": (
        lambda: make_rough_model(LLAMA),
        {"plan": {"model.embed_tokens": "rowwise"}},
        TypeError,
        r"tp_plan: RowWise does not fit model\.embed_tokens: Embedding is not a linear layer",
    ),
    "a-head-as-embedding": (
        lambda: make_rough_model(LLAMA),
        {"plan": {"lm_head": "embedding_rowwise"}},
        TypeError,
        r"tp_plan: VocabularyEmbedding does not fit lm_head: Linear is not an nn\.Embedding",
    ),
    "a-parameter-with-a-style-for-modules": (
        lambda: make_rough_model(LLAMA),
        {"plan": {f"{LAYER}mlp.up_proj.weight": "moe_tp_experts"}},
        TypeError,
        r"tp_plan: SummedResult does not fit model\.layers\.0\.mlp\.up_proj\.weight: .* not for a parameter",
    ),
    "loss-parallel-of-a-model-without-head": (
        make_headless,
        {"loss_parallel": True},
        ValueError,
        "loss_parallel=True: the plan shards no output head of LlamaModel",
    ),
    "loss-parallel-of-a-classifier": (
        make_classifier,
        {"loss_parallel": True},
        ValueError,
        "loss_parallel=True: the plan shards no output head of LlamaForSequenceClassification",
    ),
    "loss-parallel-with-a-whole-head": (
        lambda: make_rough_model(LLAMA),
        {"loss_parallel": True, "plan": {f"{LAYER}mlp.up_proj": "colwise", f"{LAYER}mlp.down_proj": "rowwise"}},
        ValueError,
        r"no output head of LlamaForCausalLM. Add the head to tp_plan as 'colwise_gather_output'",
    ),
    "loss-parallel-with-another-loss": (
        lambda: make_with_loss(other_loss),
        {"loss_parallel": True},
        ValueError,
        "loss_parallel=True supports only the loss of causal language models, but LlamaForCausalLM uses other_loss",
    ),
    "loss-parallel-with-a-partial-loss": (
        lambda: make_with_loss(functools.partial(other_loss)),
        {"loss_parallel": True},
        ValueError,
        r"but LlamaForCausalLM uses functools\.partial\(",
    ),
    "loss-parallel-with-another-loss-of-that-name": (
        lambda: make_with_loss(ForCausalLMLoss),
        {"loss_parallel": True},
        ValueError,
        "but LlamaForCausalLM uses ForCausalLMLoss",
    ),
    "a-module-in-two-layers": (
        make_with_shared_mlp,
        {},
        ValueError,
        r"tp_size: model\.layers\.0\.mlp\.gate_proj is part of both model\.layers\.1 and model\.layers\.0,",
    ),
    "layers-left-out-at-random": (
        lambda: AutoModelForCausalLM.from_config(make_config({**OPT, "layerdrop": 0.1})),
        {"sequence_parallel": True},
        ValueError,
        r"OPTForCausalLM drops layers at random \(layerdrop=0\.1\); set layerdrop=0",
    ),
    "tied-weights-with-a-style-of-torch": (
        lambda: make_rough_model({**LLAMA, "tie_word_embeddings": True}),
        {"plan": {"lm_head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}},
        ValueError,
        r"tp_plan: model\.embed_tokens\.weight and lm_head\.weight are one tied parameter.* Use the names of styles",
    ),
    "a-parameter-with-a-style-of-torch": (
        lambda: make_rough_model(LLAMA),
        {"plan": {f"{LAYER}mlp.up_proj.weight": ColwiseParallel(use_local_output=False)}},
        TypeError,
        r"tp_plan: model\.layers\.0\.mlp\.up_proj\.weight is a parameter, but the style ColwiseParallel is for modules"
        r".* Assign the style to the module model\.layers\.0\.mlp\.up_proj,",
    ),
    "sequence-parallel-with-other-layouts": (
        lambda: make_rough_model(LLAMA),
        {"plan": FOREIGN, "sequence_parallel": True},
        ValueError,
        r"sequence_parallel=True cannot be derived .*: model\.layers\.0\.mlp\.up_proj has",
    ),
}


def test_bad_input_is_refused_with_its_reason_before_anything_is_touched() -> None:
    def run() -> None:
        mesh = make_mesh()
        for name, (make, options, error, message) in REFUSED.items():
            print(name)  # shown if it is not refused
            model = make()
            with refuse(model, error, message):
                apply_tensor_parallel(find_structure(model), mesh, **options)

    run_ranks(run, 2)


@pytest.mark.guarantees("heads-that-do-not-divide")
@pytest.mark.parametrize(
    ("ranks", "config", "message"),
    [
        (4, LLAMA, "tp_size=4 does not divide num_key_value_heads=2 of LlamaConfig; use 1 or 2 "),
        (3, LLAMA, "tp_size=3 does not divide num_attention_heads=4 of LlamaConfig; use 1 or 2 "),
        (3, GPT2, "tp_size=3 does not divide num_attention_heads=4 of GPT2Config; use 1, 2 or 4 "),
    ],
    ids=["key-value-heads", "llama-heads", "gpt2-heads"],
)
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(
    ranks: int, config: dict[str, Any], message: str
) -> None:
    def run() -> None:
        mesh = make_mesh()
        for options in ({}, {"sequence_parallel": True}):
            model = make_rough_model(config)
            with refuse(model, ValueError, message):
                apply_tensor_parallel(find_structure(model), mesh, **options)

    run_ranks(run, ranks)


def test_a_refused_model_keeps_its_loss_function() -> None:
    def run() -> None:
        model = make_rough_model({**LLAMA, "intermediate_size": 63})
        with refuse(model, ValueError, "does not divide the sharded size 63"):
            apply_tensor_parallel(find_structure(model), make_mesh(), loss_parallel=True)

    run_ranks(run, 2)


def collect_warnings(**options: Any) -> list[str]:
    """What is logged while a model is sharded."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("lightning_fsdp2.parallel.tensor.checks")
    logger.addHandler(handler)
    apply_tensor_parallel(find_structure(make_rough_model(LLAMA)), make_mesh(), **options)
    logger.removeHandler(handler)
    return messages


def test_a_plan_that_shards_under_half_of_the_parameters_is_warned_of_once_with_what_stays_whole() -> None:
    most = {  # all but the attention
        "model.embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        f"{LAYER}mlp.gate_proj": "colwise",
        f"{LAYER}mlp.up_proj": "colwise",
        f"{LAYER}mlp.down_proj": "rowwise",
    }

    def run() -> list[list[str]]:
        plans = ({"lm_head": "colwise_gather_output"}, most, None)
        return [collect_warnings(plan=plan) for plan in plans]

    (first, *others), second = run_ranks(run, 2)
    assert [*others, *second] == [[]] * 5
    (message,) = first
    share = 100 * VOCABULARY * 32 / sum(p.numel() for p in make_rough_model(LLAMA).parameters())
    assert f"shards only {share:.0f} % of the parameters" in message
    assert "model.layers.*.mlp.gate_proj.weight" in message
    assert "lm_head" not in message


def test_every_entry_of_a_registered_plan_stands_for_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_plans, "_registered", {})

    class Mistyped(LlamaForCausalLM):
        pass

    tp_plans.register_tp_plan(Mistyped, {f"{LAYER}mlp.up_prj": "colwise"})

    def run() -> None:
        model = Mistyped(make_config(LLAMA))
        with refuse(model, ValueError, r"tp_plan\['model\.layers\.\*\.mlp\.up_prj'\] matches no module"):
            apply_tensor_parallel(find_structure(model), make_mesh())

    run_ranks(run, 2)


def test_a_model_s_own_plan_that_fits_none_of_its_layers_is_refused() -> None:
    def run() -> None:
        model = make_rough_model(LLAMA)
        model._tp_plan = {"model.blocks.*.mlp.up_proj": "colwise", "lm_head": "colwise_gather_output"}
        message = (
            r"tp_size: the tensor parallel plan of LlamaForCausalLM shards nothing in the model's layers\. For example,"
            r" the plan names 'model\.b"
        )
        with refuse(model, ValueError, message):
            apply_tensor_parallel(find_structure(model), make_mesh())

    run_ranks(run, 2)


class ActorAndCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = make_rough_model(LLAMA)
        self.critic = LlamaForSequenceClassification(make_config({**LLAMA, "pad_token_id": 0}))
        self.critic.model = self.actor.model


def test_models_that_share_modules_need_the_same_plan_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_plans, "_registered", {})
    mlp = {f"{LAYER}mlp.up_proj": "colwise", f"{LAYER}mlp.down_proj": "rowwise"}
    tp_plans.register_tp_plan(LlamaForSequenceClassification, mlp)

    def run() -> None:
        model = ActorAndCritic()
        message = r"LlamaForCausalLM and LlamaForSequenceClassification share model\..*, but their plans for it differ"
        with refuse(model, ValueError, message):
            apply_tensor_parallel(find_structure(model), make_mesh())

    run_ranks(run, 2)
