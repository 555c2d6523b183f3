"""The record of stages names every tensor of the whole module, in the order of one process."""

import torch
from helpers.models import GPT2, LLAMA, make_causal_lm
from torch import nn

from lightning_fsdp2.modules.stages import Stages, StageTensor, describe_tensors, get_optional_stages, mark_stages


def test_tensors_are_listed_as_in_one_process() -> None:
    root = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "model": make_causal_lm(GPT2).to(torch.bfloat16)})
    root["norm"].weight.requires_grad_(False)
    embedding = root["model"].get_input_embeddings().weight
    parameters, state = describe_tensors(root, {embedding: {1, 0}, root["norm"].bias: [1]}, 2)
    assert [*parameters] == [name for name, _ in root.named_parameters()]
    assert [*state] == [*root.state_dict()]
    source = "model.transformer.wte.weight"
    tied = StageTensor(embedding.shape, torch.bfloat16, True, (0, 1), source)
    assert parameters[source] == state[source] == state["model.lm_head.weight"] == tied
    assert parameters["norm.bias"] == StageTensor(torch.Size([3]), torch.float32, True, (1,), "norm.bias")
    assert not parameters["norm.weight"].requires_grad
    assert state["norm.running_mean"].ranks == (0, 1)


def test_a_tied_parameter_counts_on_its_first_rank() -> None:
    root = make_causal_lm(LLAMA)
    assert get_optional_stages(root) is None
    head = root.lm_head.weight
    others = {parameter: [1] for parameter in root.parameters() if parameter is not head}
    parameters, state = describe_tensors(root, others | {head: [0, 2]}, 3)
    records = [Stages(rank=rank, num_ranks=3, own=(rank,), parameters=parameters, state=state) for rank in range(3)]
    mark_stages(root, records[0])
    assert get_optional_stages(root) is records[0]
    assert records[0].tied == {"lm_head.weight": (0, 2)}
    assert [stages.is_own("lm_head.weight") for stages in records] == [True, False, True]
    assert [stages.is_counted("lm_head.weight") for stages in records] == [True, False, False]
    assert [stages.is_counted("model.norm.weight") for stages in records] == [False, True, False]
