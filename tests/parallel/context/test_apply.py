"""Context parallelism of Hugging Face models: what they are given, what they return, and what is refused."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.families import make_family_config, make_family_model
from helpers.models import ENCODER, LLAMA, VOCABULARY, make_causal_lm
from helpers.oracle import assert_equal_gradients, make_config
from helpers.ranks import run_ranks
from helpers.tensor_parallel import to_whole
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    DynamicCache,
    Qwen2VLConfig,
)

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.labels import shift_left
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.context.apply import (
    activate_context_parallel,
    apply_context_parallel,
    deactivate_context_parallel,
    gather_sequence,
    shard_sequence,
    sum_over_positions,
)
from lightning_fsdp2.parallel.loss.cross_entropy import token_cross_entropy

LENGTH = 16
METHODS = ("allgather", "ulysses")


def make_model(family: str = "llama", **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    if family == "llama":
        return make_causal_lm({**LLAMA, **fields})
    return make_family_model(family).train()


def shard(model: nn.Module, method: str = "allgather", *, tp_size: int = 1, **flags: Any) -> nn.Module:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), context_parallel_method=method, **flags)
    mesh = create_device_mesh(config, cp_size=dist.get_world_size() // tp_size, tp_size=tp_size)
    return FSDP2Manager(config, mesh).parallelize(model)


def make_batch(size: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    torch.manual_seed(3)
    input_ids = torch.randint(3, VOCABULARY - 4, (size, length))
    labels = input_ids.clone()
    labels[:, length // 3 : length // 2] = -100
    return {"input_ids": input_ids, "labels": labels}


def get_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: to_whole(p.grad).clone() for name, p in model.named_parameters() if p.requires_grad}


def compare_with_one_process(
    make: Callable[[], nn.Module], method: str, batch: dict[str, Any], alone: dict[str, Any] | None = None
) -> None:
    """The loss that the model returns, and all gradients, on this rank's mesh and alone (with other arguments)."""
    expected = make()
    loss = expected(**(batch if alone is None else alone)).loss
    loss.backward()
    model = shard(make(), method)
    actual = model(**batch).loss
    actual.backward()
    assert actual.item() == pytest.approx(loss.item(), abs=1e-5)
    assert_equal_gradients(get_gradients(model), get_gradients(expected))


@pytest.mark.guarantees("same-loss-on-every-rank")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_loss_that_a_model_returns_is_that_of_all_labels(method: str, ranks: int) -> None:
    make = partial(make_model, num_key_value_heads=4)
    run_ranks(lambda: compare_with_one_process(make, method, make_batch()), ranks)


@pytest.mark.guarantees("same-loss-on-every-rank")
def test_ranks_without_a_label_and_counts_of_the_user() -> None:
    def run() -> None:
        batch = make_batch()
        batch["labels"][:, 4:] = -100  # all of the second rank's
        for arguments in ({}, {"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(5)}):
            compare_with_one_process(make_model, "allgather", {**batch, **arguments})

    run_ranks(run, 2)


@pytest.mark.guarantees("own-positions")
def test_a_model_that_returns_a_tuple() -> None:
    def run() -> None:
        batch = {**make_batch(), "return_dict": False}
        loss, logits, *_ = shard(make_model())(**batch)
        assert loss.item() == pytest.approx(make_model()(**batch)[0].item(), abs=1e-5)
        assert logits.size(1) == LENGTH // 2

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("mixtral", "allgather"),
        ("qwen3_moe", "ulysses"),
        pytest.param("mixtral", "ulysses", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "allgather", marks=pytest.mark.slow),
    ],
)
def test_the_auxiliary_loss_of_a_router_is_that_of_all_tokens(family: str, method: str) -> None:
    def make() -> nn.Module:
        model = make_model(family)
        model.router_aux_loss_coef = 0.5
        return model

    batch = {**make_batch(), "output_router_logits": True}
    run_ranks(lambda: compare_with_one_process(make, method, batch), 2)


def test_the_auxiliary_loss_of_a_padded_batch_is_refused() -> None:
    def run() -> None:
        mask = torch.ones(2, LENGTH).index_fill_(1, torch.tensor([LENGTH - 1]), 0)
        model = shard(make_model("mixtral"))
        with pytest.raises(ValueError, match=r"cp_size=2: MixtralForCausalLM .*output_router_logits=True"):
            model(**make_batch(), attention_mask=mask, output_router_logits=True)
        assert model(**make_batch(), attention_mask=torch.ones(2, LENGTH), output_router_logits=True).aux_loss > 0

    run_ranks(run, 2)


ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 13}
DYNAMIC = {**ROPE, "rope_type": "dynamic"}
LONGROPE = {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}


@pytest.mark.parametrize(
    ("rope", "method"),
    [
        (DYNAMIC, "allgather"),
        (LONGROPE, "ulysses"),
        pytest.param(DYNAMIC, "ulysses", marks=pytest.mark.slow),
        pytest.param(LONGROPE, "allgather", marks=pytest.mark.slow),
    ],
    ids=["dynamic-allgather", "longrope-ulysses", "dynamic-ulysses", "longrope-allgather"],
)
def test_rotary_frequencies_are_those_of_the_whole_length(rope: dict[str, Any], method: str) -> None:
    """They change at 13 positions: with 16, one rank's chunks end before that."""
    make = partial(make_model, rope_parameters=rope, max_position_embeddings=13)
    run_ranks(lambda: compare_with_one_process(make, method, make_batch()), 2)


def test_unpacked_batches_need_not_be_looked_at() -> None:
    def run() -> None:
        batch = make_batch()
        expected = make_model()(**batch).loss
        model = shard(make_model(), patch_is_packed_sequence=True)
        assert model(**batch).loss.item() == pytest.approx(expected.item(), abs=1e-5)
        with pytest.raises(RuntimeError, match="position_ids restart"):
            model(**batch, position_ids=torch.arange(LENGTH)[None] % 5)
        packed = {**batch, "position_ids": torch.arange(LENGTH)[None] % 5, "use_cache": False}
        model = make_model()  # which nobody called unpacked
        apply_context_parallel(find_structure(model), dist.group.WORLD)
        assert model(**packed).loss.item() == pytest.approx(make_model()(**packed).loss.item(), abs=1e-5)

    run_ranks(run, 2)


@pytest.mark.guarantees("context-parallel-attention", "packed-documents-apart")
@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_give_the_losses_of_the_documents_alone(method: str) -> None:
    """Documents that begin and end inside of chunks, another split in each sequence."""
    lengths = ([5, 8, 3], [1, 2, 13])

    def run() -> None:
        batch = make_batch()
        batch["labels"] = batch["input_ids"].clone()
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        starts = positions == 0
        batch["labels"][starts] = -100  # what predicts them is another document
        plain, model = make_model(), shard(make_model(), method)
        inputs = {"input_ids": batch["input_ids"], "position_ids": positions}
        logits = gather_sequence(model, model(**inputs).logits)
        losses = token_cross_entropy(logits, shift_left(batch["labels"]))
        for row, pieces in enumerate(lengths):
            start = 0
            for length in pieces:
                document = batch["input_ids"][row : row + 1, start : start + length]
                alone = token_cross_entropy(plain(input_ids=document).logits, shift_left(document))
                torch.testing.assert_close(losses[row : row + 1, start : start + length], alone, atol=1e-5, rtol=0)
                start += length
        # with a cache, transformers does not look for documents
        packed = {**batch, "position_ids": positions, "use_cache": False}
        compare_with_one_process(make_model, method, packed)

    run_ranks(run, 2)


def make_vision_language_model() -> nn.Module:
    torch.manual_seed(0)
    text = {
        **LLAMA,
        "model_type": "qwen2_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    model = AutoModelForImageTextToText.from_config(Qwen2VLConfig(text_config=text, vision_config=vision))
    model.model.visual.requires_grad_(False)
    return model.train()


@pytest.mark.parametrize("method", ["allgather", pytest.param("ulysses", marks=pytest.mark.slow)])
def test_documents_of_models_whose_positions_are_places_in_images(method: str) -> None:
    """The text's position ids, before the three of a place, say where documents begin."""
    text = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([5, 11], [9, 7])])
    positions = torch.stack([text, text, text // 2, text // 3])
    packed = {**make_batch(), "position_ids": positions, "use_cache": False}
    run_ranks(lambda: compare_with_one_process(make_vision_language_model, method, packed), 2)

    def refuse() -> None:
        model = shard(make_vision_language_model(), method)
        with pytest.raises(ValueError, match=r"if position_ids have the shape \[4, batch, sequence\]"):
            model(**{**packed, "position_ids": text})

    run_ranks(refuse, 2)


PADDINGS = list(itertools.product(["llama", "gemma3_text", "gpt_oss"], ["left", "right", "both"]))
FAST_PADDINGS = [("llama", "both"), ("gemma3_text", "left"), ("gpt_oss", "right")]


@pytest.mark.guarantees("context-parallel-attention")
@pytest.mark.parametrize(
    ("family", "side"),
    [pytest.param(*cell, marks=() if cell in FAST_PADDINGS else pytest.mark.slow) for cell in PADDINGS],
)
def test_padding_is_not_seen(family: str, side: str) -> None:
    """Labels are left out at padding alone, so that the last position of padding on the left predicts a token."""

    def run() -> None:
        batch = make_batch()
        mask = torch.ones_like(batch["input_ids"])
        if side != "right":
            mask[0, :5] = 0
        if side != "left":
            mask[1, 9:] = 0
        batch["labels"] = batch["labels"].where(mask.bool(), -100)
        compare_with_one_process(partial(make_model, family), "allgather", {**batch, "attention_mask": mask})

    run_ranks(run, 2)


class Scorer(nn.Module):
    """A user's module that calls the base model, not the head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = make_model()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm.model(input_ids=input_ids).last_hidden_state


def test_the_base_model_can_be_called_by_itself() -> None:
    def run() -> None:
        input_ids, model = make_batch()["input_ids"], shard(Scorer())
        hidden = model(input_ids)
        assert hidden.size(1) == LENGTH // 2
        torch.testing.assert_close(gather_sequence(model, hidden), Scorer()(input_ids), atol=1e-5, rtol=1e-5)

    run_ranks(run, 2)


@pytest.mark.parametrize("method", METHODS)
def test_sequences_are_put_together_as_they_were_taken_apart(method: str) -> None:
    def run() -> None:
        model = shard(make_model(num_key_value_heads=4), method)
        whole = torch.arange(2 * LENGTH * 3).view(2, LENGTH, 3).float()
        part = shard_sequence(model, whole)
        assert part.shape == (2, LENGTH // 4, 3)
        assert torch.equal(gather_sequence(model, part), whole)
        assert torch.equal(shard_sequence(model, whole.transpose(1, 2), 2), part.transpose(1, 2))
        assert torch.equal(sum_over_positions(model, part.sum()), whole.sum())

    run_ranks(run, 4)


def test_the_gradient_of_gathered_results_is_that_of_one_process() -> None:
    """A loss of the user's own, computed from whole logits by every rank."""

    def run() -> None:
        batch, plain, model = make_batch(), make_model(), shard(make_model())

        def compute(model: nn.Module) -> Tensor:
            logits = gather_sequence(model, model(input_ids=batch["input_ids"]).logits)
            return logits.softmax(-1).amax(-1).std()  # of all positions together

        loss = compute(plain)
        loss.backward()
        compute(model).backward()
        assert_equal_gradients(get_gradients(model), get_gradients(plain))

    run_ranks(run, 2)


@pytest.mark.guarantees("named-inputs")
def test_inputs_that_the_user_names_are_sharded() -> None:
    def run() -> None:
        embeds = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(5))
        seen: dict[str, Any] = {}
        plain = make_model()
        expected = plain(inputs_embeds=embeds).logits
        model = make_model()
        forward = model.model.forward
        model.model.forward = lambda **kwargs: (
            seen.update(kwargs) or forward(**{k: v for k, v in kwargs.items() if k not in ("scores", "table")})
        )
        model = shard(model, context_parallel_inputs={"scores": -1, "table": None})
        scores, table = torch.arange(2 * LENGTH).view(2, LENGTH), torch.ones(3, 4)
        logits = model(inputs_embeds=embeds, scores=scores, table=table).logits
        torch.testing.assert_close(gather_sequence(model, logits), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(seen["scores"], shard_sequence(model, scores))
        assert seen["table"].shape == (3, 4)

    run_ranks(run, 2)


def test_generation_computes_whole_sequences_on_every_rank() -> None:
    def run() -> None:
        prompt = make_batch()["input_ids"][:, :7]  # a length that could not be sharded
        expected = make_model().eval().generate(prompt, max_new_tokens=4, do_sample=False)
        model = shard(make_model()).eval()
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), expected)

    run_ranks(run, 2)


def test_deactivated_models_compute_whole_sequences_with_their_own_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    def run() -> None:
        before = set(AttentionInterface()), set(AttentionMaskInterface())
        batch, plain, model = make_batch(), make_model(), shard(make_model())
        assert model.config._attn_implementation != "sdpa"
        deactivate_context_parallel(model)
        assert model.config._attn_implementation == "sdpa"
        assert (set(AttentionInterface()), set(AttentionMaskInterface())) == before
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
        activate_context_parallel(model)
        assert model(**batch).logits.size(1) == LENGTH // 2

    run_ranks(run, 2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = make_model(), make_model(num_key_value_heads=4)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.teacher(**batch).logits, self.student(**batch).logits


def test_two_models_do_not_disturb_each_other() -> None:
    def run() -> None:
        pair = shard(Pair())
        deactivate_context_parallel(pair.teacher)
        teacher, student = pair(make_batch())
        assert (teacher.size(1), student.size(1)) == (LENGTH, LENGTH // 2)
        torch.testing.assert_close(gather_sequence(pair.student, student), Pair()(make_batch())[1])

    run_ranks(run, 2)


def test_two_models_of_one_config_object() -> None:
    def run() -> None:
        first = make_model()
        pair = Pair()
        pair.teacher, pair.student = first, type(first)(first.config).train()
        pair = shard(pair)
        deactivate_context_parallel(pair.teacher)
        teacher, student = pair(make_batch())
        assert (teacher.size(1), student.size(1)) == (LENGTH, LENGTH // 2)
        deactivate_context_parallel(pair.student)
        assert pair(make_batch())[1].size(1) == LENGTH
        assert first.config._attn_implementation == "sdpa"

    run_ranks(run, 2)


class Register(nn.Module):
    """In place of attention: it attends to one more position, which is no one's."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        hidden_states = torch.cat([hidden_states[:, :1], hidden_states], 1)
        position_embeddings = tuple(torch.cat([part[:, :1], part], 1) for part in position_embeddings)
        output, weights = self.attention(hidden_states, position_embeddings=position_embeddings, **kwargs)
        return output[:, 1:], weights


def make_registering() -> nn.Module:
    model = make_model()
    model.model.layers[0].self_attn = Register(model.model.layers[0].self_attn)
    return model


def make_roberta() -> nn.Module:
    config = make_config({"model_type": "roberta", **ENCODER, "vocab_size": VOCABULARY, "is_decoder": True})
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.guarantees("refused-lengths")
def test_arguments_that_cannot_be_sharded_are_refused() -> None:
    def run() -> None:
        batch, model = make_batch(), shard(make_model())
        for arguments, message in (
            (make_batch(length=14), r"divisible by 4 .* this batch has 14 positions; use 12 or 16"),
            ({**batch, "attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}, "attention_mask of shape"),
            ({**batch, "pixel_values": torch.ones(2, 3, 4, 4)}, "outside the model, and pass inputs_embeds"),
            ({**batch, "spans": torch.ones(2, 3)}, "context_parallel_inputs={'spans'"),
            ({**batch, "past_key_values": DynamicCache()}, "was given past_key_values"),
            ({**batch, "cache": DynamicCache()}, "was given cache, which holds keys of tokens"),
            ({**batch, "output_attentions": True}, "was given output_attentions"),
            ({**batch, "cu_seq_lens_q": torch.tensor([0, 16])}, "without position_ids, but"),
            ({**batch, "logits_to_keep": 1}, "logits_to_keep"),
            ({"input_ids": batch["input_ids"], "labels": torch.ones(2, 5)}, "labels of shape"),
            ({"labels": batch["labels"]}, "without input_ids"),
        ):
            with pytest.raises(ValueError, match=message):
                model(**arguments)

    run_ranks(run, 2)


def make_classifier() -> nn.Module:
    config = make_family_config("llama")
    config.num_labels = 3
    return AutoModelForSequenceClassification.from_config(config)


def make_masked_lm() -> nn.Module:
    model = make_model()
    model.loss_type = "ForMaskedLM"
    return model


class Recurrence(nn.Module):
    """In place of attention: each position takes something of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden_states + self.weight * hidden_states.roll(1, 1), None


def make_recurrent(layers: tuple[int, ...] = (1,)) -> nn.Module:
    model = make_model()
    for layer in layers:
        model.model.layers[layer].self_attn = Recurrence()
    return model


@pytest.mark.guarantees("context-parallel-refusals")
@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (make_masked_lm, lambda model: model(**make_batch()), "does not pass shift_labels"),
        (
            make_recurrent,
            lambda model: model(**make_batch()),
            "has a layer, LlamaDecoderLayer, that calls no attention",
        ),
        (
            partial(make_recurrent, (0, 1, 2)),
            lambda model: model(**make_batch()),
            "has a layer, LlamaDecoderLayer, that calls no attention",
        ),
        (make_registering, lambda model: model(**make_batch()), "has 9 queries and 9 keys, but"),
        (make_roberta, lambda model: model(**make_batch()), "pass position_ids"),
        (partial(make_model, "doge"), lambda model: model(**make_batch()), "uses its attention mask as a tensor"),
    ],
    ids=["no-shift-labels", "recurrence", "recurrences-only", "register", "positions", "mask-of-its-own"],
)
def test_models_that_turn_out_unfit_are_refused_in_the_first_forward(
    make: Callable[[], nn.Module], call: Callable[[nn.Module], Any], message: str
) -> None:
    def run() -> None:
        model = shard(make())
        with pytest.raises(ValueError, match=f"cp_size=2: .*{message}"):
            call(model)

    run_ranks(run, 2)


@pytest.mark.guarantees("context-parallel-refusals")
@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("jamba", "JambaForCausalLM: its layers do not call transformers' attention"),
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM: it has layers of type linear_attention"),
        ("bloom", "BloomForCausalLM: its layers do not call transformers' attention"),
        ("llama4_text", "chunked_attention"),
        ("gemma2", "attn_logit_softcapping=50.0"),
    ],
)
def test_models_that_cannot_are_refused_before_they_are_sharded(family: str, message: str) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=f"cp_size=2.*{message}"):
            shard(make_model(family))

    run_ranks(run, 2)


def test_other_refusals() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"num_attention_heads=4 and num_key_value_heads=1; use 'allgather'"):
            shard(make_model(num_key_value_heads=1), "ulysses")
        with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
            shard(make_model(attention_dropout=0.1))
        with pytest.raises(ValueError, match="LlamaForSequenceClassification: it has no head"):
            shard(make_classifier())
        with pytest.raises(ValueError, match="Linear contains no such model"):
            shard(nn.Linear(4, 4))

    run_ranks(run, 2)
