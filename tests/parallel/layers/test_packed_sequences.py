"""transformers' search for packed sequences, left out: how often it is asked, and who gets refused."""

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.collectives import StepCounter
from helpers.families import FAMILIES, make_family_model
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import run_ranks
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils, modeling_flash_attention_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.compat.transformers import assume_unpacked_sequences, assumes_unpacked_sequences
from lightning_fsdp2.parallel.layers.packed_sequences import require_separate_documents

CHECKS = (
    (masking_utils, "find_packed_sequence_indices"),
    (modeling_flash_attention_utils, "_is_packed_sequence"),
)


def attend_watched(module: nn.Module, query: Tensor, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
    """Look for packed sequences as flash attention does, which does not run on a CPU."""
    modeling_flash_attention_utils._is_packed_sequence(position_ids, query.size(0))
    return sdpa_attention_forward(module, query, *args, **kwargs)


def parallelize(model: nn.Module, **flags: Any) -> Any:
    config = FSDP2Config(patch_is_packed_sequence=True, **flags)
    return FSDP2Manager(config, create_device_mesh(config)).parallelize(model)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often transformers' own functions are called."""
    counts: Counter[str] = Counter()
    for module, name in CHECKS:
        original = getattr(module, name)

        def count(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(module, name, count)
    return counts


def test_neither_place_is_asked_and_the_host_waits_for_nothing(calls: Counter[str]) -> None:
    AttentionInterface.register("watched", attend_watched)

    def run(model: Any) -> tuple[dict[str, int], int]:
        batch = {"input_ids": torch.ones(1, 12, dtype=torch.int64), "position_ids": torch.arange(12).view(1, 12)}
        model(**batch, use_cache=False)  # the first forward also compares its weights with those before
        calls.clear()
        with StepCounter() as counter:
            model(**batch, use_cache=False)
        return dict(calls), counter.host_syncs

    def run_both() -> list[tuple[dict[str, int], int]]:
        plain = make_causal_lm(LLAMA)
        patched = parallelize(make_causal_lm(LLAMA))
        for model in (plain, patched):
            model.set_attn_implementation("watched")
        return [run(plain), run(patched)]

    (calls_before, syncs_before), (calls_after, syncs_after) = run_ranks(run_both, 1)[0]
    assert calls_before == {"_is_packed_sequence": LLAMA["num_hidden_layers"]}
    assert calls_after == {}
    assert syncs_after <= syncs_before


def test_masks_are_made_without_a_look_at_the_positions(calls: Counter[str]) -> None:
    def run() -> list[tuple[int, int]]:
        results = []
        for model in (make_causal_lm(LLAMA), parallelize(make_causal_lm(LLAMA))):
            model(input_ids=torch.ones(2, 12, dtype=torch.int64), use_cache=False)
            calls.clear()
            with StepCounter() as counter:
                model(input_ids=torch.ones(2, 12, dtype=torch.int64), use_cache=False)
            results.append((calls["find_packed_sequence_indices"], counter.host_syncs))
        return results

    (calls_before, syncs_before), (calls_after, syncs_after) = run_ranks(run, 1)[0]
    assert (calls_before, calls_after) == (1, 0)
    assert syncs_after == syncs_before - 1


PACKED = {
    "restart": [0, 1, 2, 0, 1, 2],
    "a document of one token": [0, 0, 1, 2, 3, 4],
    "jump": [0, 1, 2, 10, 11, 12],
}


@pytest.mark.guarantees("refused-packed-batches")
@pytest.mark.parametrize("positions", PACKED.values(), ids=PACKED)
def test_a_packed_batch_is_refused(positions: list[int]) -> None:
    def run() -> None:
        model = parallelize(make_causal_lm(LLAMA))
        input_ids, packed = torch.ones(1, 6, dtype=torch.int64), torch.tensor([positions])
        for arguments in ((input_ids, None, packed), (input_ids, torch.ones_like(input_ids), packed)):
            with pytest.raises(RuntimeError, match="patch_is_packed_sequence=True, but position_ids restart or jump"):
                model(*arguments)
        with pytest.raises(RuntimeError, match="restart or jump"):
            model.model(input_ids, position_ids=packed)

    run_ranks(run, 1)


def test_positions_that_count_on_from_one_attended_token_to_the_next_are_not() -> None:
    def run() -> None:
        model = parallelize(make_causal_lm(LLAMA))
        input_ids = torch.ones(1, 6, dtype=torch.int64)
        model(input_ids, position_ids=torch.arange(3, 9).view(1, 6))
        padded = torch.tensor([[0, 0, 0, 1, 1, 1]])
        model(input_ids, attention_mask=padded, position_ids=torch.tensor([[1, 1, 1, 0, 1, 2]]))

    run_ranks(run, 1)


MIXED = {
    "qwen3_next": "Qwen3NextForCausalLM: it has layers of type linear_attention",
    "llama4_text": "chunked_attention",
    "gpt_oss": "GptOssForCausalLM: it does not use position_ids for its attention mask",
    "opt": "does not use position_ids",
    "bloom": "does not use position_ids",
}


def check_separation(family: str) -> None:
    """What the first document says changes nothing about the second one."""
    torch.manual_seed(0)
    model: Any = make_family_model(family).eval()
    input_ids = torch.randint(3, 90, (2, 16))
    other_ids = torch.cat([input_ids[:, :7] + 1, input_ids[:, 7:]], dim=1)
    position_ids = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
    with require_separate_documents(model, 2):
        first, other = (model(ids, position_ids=position_ids, use_cache=False).logits for ids in (input_ids, other_ids))
    torch.testing.assert_close(first[:, 7:], other[:, 7:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first[:, :7], other[:, :7], atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *MIXED])
def test_documents_are_separate_or_their_model_is_refused(family: str) -> None:
    find = masking_utils.find_packed_sequence_indices
    if family in MIXED:
        with pytest.raises(ValueError, match=f"separate_documents=True is not possible for .*{MIXED[family]}"):
            check_separation(family)
    else:
        check_separation(family)
    assert masking_utils.find_packed_sequence_indices is find


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_every_family_are_separate_or_it_is_refused(family: str) -> None:
    try:
        check_separation(family)
    except ValueError as error:
        assert "separate_documents=True is not possible" in str(error)  # noqa: PT017 - most are not refused


def test_flash_attention_separates_documents_of_a_single_sequence_only() -> None:
    model = make_causal_lm(LLAMA)
    model.config._attn_implementation_internal = "flash_attention_2"
    message = r"LlamaForCausalLM: its flash_attention_2 separates documents only with batch_size=1, but batch_size is 2"
    with pytest.raises(ValueError, match=message), require_separate_documents(model, 2):
        pass


def use_patch_twice_and_fail() -> None:
    with assume_unpacked_sequences():
        with assume_unpacked_sequences():
            assert masking_utils.find_packed_sequence_indices(torch.tensor([[0, 0]])) is None
        assert modeling_flash_attention_utils._is_packed_sequence(torch.tensor([[0, 0]]), 1) is False
        raise KeyError


def test_the_patch_is_undone_also_after_an_error_and_inside_itself() -> None:
    originals = [getattr(module, name) for module, name in CHECKS]
    with pytest.raises(KeyError):
        use_patch_twice_and_fail()
    assert [getattr(module, name) for module, name in CHECKS] == originals


def test_patches_of_two_trainers_may_be_undone_in_any_order() -> None:
    originals = [getattr(module, name) for module, name in CHECKS]
    first, second = assume_unpacked_sequences(), assume_unpacked_sequences()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert assumes_unpacked_sequences()
    second.__exit__(None, None, None)
    assert not assumes_unpacked_sequences()
    assert [getattr(module, name) for module, name in CHECKS] == originals
