"""Parameters that several stages hold: one gradient, which is that of one process."""

import copy
from typing import Any

import pytest
import torch
from helpers.models import make_causal_lm, make_token_batches
from helpers.oracle import assert_equal_gradients, whole
from helpers.pipelines import CONFIGS
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.plain_loop import train_on_stages


class Wrapper(nn.Module):
    """Modules of one's own before and after a tied model, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_causal_lm(CONFIGS["qwen3"])
        self.before, self.after, self.unused = nn.Linear(32, 32), nn.Linear(101, 3), nn.Linear(2, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self.before(self.model.get_input_embeddings()(input_ids))
        return self.after(self.model(inputs_embeds=embedded).logits)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"]).square().mean()


@pytest.mark.guarantees("parameters-of-all-stages")
@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"pp_size": 4}])
def test_every_copy_has_the_gradient_of_one_process(sizes: dict[str, int]) -> None:
    def run() -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = Wrapper()
        alone, batch = copy.deepcopy(model), make_token_batches(1, size=4)[0]
        compute_loss(alone, batch).backward()
        expected = {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        FSDP2Manager(config, create_device_mesh(config, device_type="cpu", **sizes)).parallelize(model)
        train_on_stages(model, lambda part: compute_loss(model, part), batch)
        gradients = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert_equal_gradients(gradients, {name: expected[name] for name in gradients})
        shared: Any = get_pipeline(model).shared
        names = {parameter: name for name, parameter in model.named_parameters()}
        held = {names[parameter] for parameter in shared.parameters.values()}
        assert "unused.weight" in held  # held, but without a gradient in one process, too
        assert held & expected.keys() == held & gradients.keys()
        return {name: gradients[name] for name in held & gradients.keys()}

    ranks = run_ranks(run, sizes["pp_size"])
    around = {"before.weight", "before.bias", "after.weight", "after.bias"}
    tied = "model.model.embed_tokens.weight"
    assert [set(rank) for rank in (ranks[0], ranks[-1])] == [around | {tied}] * 2
    assert all(set(rank) == around for rank in ranks[1:-1])
    for rank in ranks[1:]:  # to the last bit, so that the copies stay the same
        torch.testing.assert_close(rank, {name: ranks[0][name] for name in rank}, rtol=0, atol=0)
