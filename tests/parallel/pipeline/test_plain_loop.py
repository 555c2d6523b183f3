"""Training over stages without a Trainer: the gradients, the norm and the weights of one process."""

import copy
from typing import Any

import pytest
import torch
from helpers.models import make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, assert_equal_gradients, whole
from helpers.pipelines import CONFIGS, merge_stages
from helpers.ranks import run_ranks
from torch import Tensor, nn
from transformers import DynamicCache

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, clip_grad_norm_, create_device_mesh, defer_grad_sync
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.plain_loop import train_on_stages


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


@pytest.mark.guarantees("plain-loops", "loops-of-stages")
@pytest.mark.parametrize(
    ("family", "schedule", "stages", "ranks"),
    [("gpt2", "1f1b", 1, 2), pytest.param("llama", "interleaved_1f1b", 2, 4, marks=pytest.mark.slow)],
)
def test_a_plain_loop_trains_as_one_process(family: str, schedule: Any, stages: int, ranks: int) -> None:
    batches = make_token_batches(4, size=4)

    def run() -> None:
        torch.manual_seed(1)
        model = make_causal_lm(CONFIGS[family])
        alone = copy.deepcopy(model)
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        flags: Any = {"pp_schedule": schedule, "pp_stages_per_rank": stages, "pp_microbatches": 4}
        config = FSDP2Config(**flags, mp_policy=policy)
        mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
        FSDP2Manager(config, mesh).parallelize(model)
        control, rank = get_pipeline(model).control, get_mesh(mesh, "data_parallel").get_local_rank()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, eps=EPSILON) for m in (model, alone)]
        for number in range(0, len(batches), 2):
            pair = batches[number : number + 2]
            # two batches for each optimizer step: the same on all data parallel ranks, so that one process needs no sum
            with defer_grad_sync(model):
                train_on_stages(model, lambda part: compute_loss(model, part), pair[0], is_last=False)
            loss = train_on_stages(model, lambda part: compute_loss(model, part), pair[1])
            expected = [compute_loss(alone, batch) for batch in pair]
            sum(expected).backward()  # type: ignore[union-attr]
            assert abs(loss.item() - expected[1].item()) <= 1e-5, rank
            gradients = whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            references = {name: p.grad for name, p in alone.named_parameters()}
            assert_equal_gradients(merge_stages(gradients, control), references, number)
            norms = clip_grad_norm_(model.parameters(), 0.1), nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            torch.testing.assert_close(*norms, rtol=1e-4, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights = merge_stages(whole(dict(model.named_parameters())), control)
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=0, atol=5e-5, msg=name)

    run_ranks(run, ranks)


@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_batches_that_are_summed_one_by_one_add_up(set_to_none: bool) -> None:
    """Without ``defer_grad_sync``, each batch adds to gradients that the stages have already summed."""

    def run() -> None:
        torch.manual_seed(1)
        model = make_causal_lm(CONFIGS["qwen3"])  # with tied embeddings
        alone, batches = copy.deepcopy(model), make_token_batches(4, size=4)
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        config = FSDP2Config(mp_policy=policy, pp_microbatches=4)
        FSDP2Manager(config, create_device_mesh(config, pp_size=2, device_type="cpu")).parallelize(model)
        for pair in (batches[:2], batches[2:]):
            for each in (model, alone):
                torch.optim.SGD(each.parameters()).zero_grad(set_to_none)
            for batch in pair:
                train_on_stages(model, lambda part: compute_loss(model, part), batch)
                compute_loss(alone, batch).backward()
            gradients = whole({name: p.grad for name, p in model.named_parameters()})
            references = {name: p.grad for name, p in alone.named_parameters()}
            assert_equal_gradients(merge_stages(gradients, get_pipeline(model).control), references)

    run_ranks(run, 2)


class Wrapper(nn.Module):
    """A module of one's own around the model, with code after it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids).logits[:, -1]


def test_a_step_ends_with_the_model_inside_of_a_wrapper() -> None:
    """Hooks of the wrapper see a result on every stage. A step and an evaluation before may call the model alone."""

    def run() -> tuple[int, int]:
        config = FSDP2Config(mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy())
        wrapper = Wrapper(make_causal_lm(CONFIGS["llama"]))
        [batch] = make_token_batches(1, size=4)
        with torch.no_grad():
            expected = wrapper(batch["input_ids"])
        ends, results = [], []
        wrapper.register_forward_hook(lambda module, inputs, result: results.append(result))
        FSDP2Manager(config, create_device_mesh(config, pp_size=2, device_type="cpu")).parallelize(wrapper)
        train_on_stages(wrapper, lambda part: compute_loss(wrapper.model, part), batch)
        with torch.no_grad():
            torch.testing.assert_close(wrapper(batch["input_ids"]), expected, atol=1e-5, rtol=0)
        results.clear()

        def step(part: dict[str, Tensor]) -> Tensor:
            logits = wrapper(part["input_ids"])
            ends.append(logits.shape)
            return logits.square().mean()

        train_on_stages(wrapper, step, batch)
        return len(ends), len(results)

    assert run_ranks(run, 2) == [(0, 4), (4, 4)]


def test_the_last_backward_that_computes_something_reduces_if_the_first_stage_is_frozen() -> None:
    def run() -> None:
        model: Any = make_causal_lm(CONFIGS["llama"])
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
        alone, [batch] = copy.deepcopy(model), make_token_batches(1, size=4, ragged=False)
        compute_loss(alone, batch).backward()
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        config = FSDP2Config(mp_policy=policy, pp_schedule="interleaved_1f1b", pp_stages_per_rank=2)
        FSDP2Manager(config, create_device_mesh(config, pp_size=2, device_type="cpu")).parallelize(model)
        train_on_stages(model, lambda part: compute_loss(model, part), batch)
        gradients = whole({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        references = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
        assert_equal_gradients(merge_stages(gradients, get_pipeline(model).control), references)

    run_ranks(run, 2)


def test_ranks_with_other_numbers_of_rows_get_an_error_instead_of_waiting() -> None:
    def run() -> None:
        config = FSDP2Config(reshard_after_forward=True)
        mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
        model = FSDP2Manager(config, mesh).parallelize(make_causal_lm(CONFIGS["llama"]))
        size = 4 + 2 * get_mesh(mesh, "data_parallel").get_local_rank()
        with pytest.raises(ValueError, match=r"batches .* have between 4 and 6 rows.*drop_last=True"):
            train_on_stages(model, lambda part: compute_loss(model, part), make_token_batches(1, size=size)[0])

    run_ranks(run, 4)


@pytest.mark.parametrize(
    "flags",
    [
        {"pp_microbatches": 2},
        {"pp_schedule": "gpipe"},
        {"pp_schedule": "interleaved_1f1b"},
        {"pp_layers_per_stage": [2, 2]},
    ],
)
def test_flags_of_one_stage_are_said_to_do_nothing(flags: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    def run() -> list[str]:
        for config in (FSDP2Config(), FSDP2Config(**flags)):
            FSDP2Manager(config, create_device_mesh(config, device_type="cpu")).parallelize(nn.Linear(2, 2))
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    [messages] = run_ranks(run, 1)
    found = [message for message in messages if "pp_schedule, pp_microbatches" in message]
    assert len(found) == 1  # the first config is that of a run without a pipeline
    assert "have no effect with one pipeline rank" in found[0]


def test_micro_batches_that_do_not_divide_the_rows_get_an_error() -> None:
    def run() -> None:
        config = FSDP2Config(pp_microbatches=3)
        mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
        model = FSDP2Manager(config, mesh).parallelize(make_causal_lm(CONFIGS["llama"]))
        with pytest.raises(ValueError, match="pp_microbatches=3 does not divide the 4 rows"):
            train_on_stages(model, lambda part: compute_loss(model, part), make_token_batches(1, size=4)[0])

    run_ranks(run, 2)


@pytest.mark.guarantees("refused-pipelines")
def test_results_and_caches_of_all_layers_are_refused() -> None:
    def run() -> None:
        config = FSDP2Config()
        mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
        model = FSDP2Manager(config, mesh).parallelize(make_causal_lm(CONFIGS["llama"]))
        batch = make_token_batches(1, size=4)[0]
        for asked in (
            {"past_key_values": DynamicCache()},
            {"cache": DynamicCache()},
            {"cache_params": DynamicCache()},
            {"use_cache": True},
            {"output_hidden_states": True},
        ):
            with pytest.raises(ValueError, match=rf"pp_size=2: .* was called with {next(iter(asked))}="):
                model(input_ids=batch["input_ids"], **asked)

    run_ranks(run, 2)


def test_stages_that_read_different_first_batches_are_refused() -> None:
    def run() -> None:
        config = FSDP2Config()
        mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
        model = FSDP2Manager(config, mesh).parallelize(make_causal_lm(CONFIGS["llama"]))
        batch = make_token_batches(2, size=4)[torch.distributed.get_rank()]
        with pytest.raises(ValueError, match="different first batches"):
            train_on_stages(model, lambda part: compute_loss(model, part), batch)

    run_ranks(run, 2)
