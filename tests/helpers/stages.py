"""The pipeline stages of a model, run one after the other in one process, and a model that can break their rules."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.pipeline.split import Split, build_split


class Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, use_cache=False)


def split_model(model: nn.Module, *, ranks: int = 2, **options: Any) -> list[Split]:
    """A copy of ``model`` for each rank, which holds only the modules of this rank."""
    splits = []
    for rank in range(ranks):
        split = build_split(find_structure(Root(copy.deepcopy(model))), ranks=ranks, rank=rank, **options)
        split.drop()
        splits.append(split)
    return splits


@dataclass
class StagesRun:
    """A forward of all stages. Each stage's input is a leaf, as a received tensor is."""

    inputs: list[Tensor | None]
    outputs: list[Tensor | None]
    logits: Tensor

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for output, received in reversed([*zip(self.outputs, self.inputs[1:], strict=False)]):
            output.backward(received.grad)


def run_stages(splits: list[Split], **inputs: Any) -> StagesRun:
    received, result = None, StagesRun([], [], torch.empty(0))
    for stage in range(splits[0].num_stages):
        split = splits[stage % len(splits)]
        if received is not None:
            received = received.detach().requires_grad_(torch.is_grad_enabled())
        result.inputs.append(received)
        with split.run_stage(stage, received) as passage:
            result.logits = split.root(**inputs).logits
        received = passage.output
        result.outputs.append(received)
    return result


def add_gradients(splits: list[Split]) -> dict[str, Tensor]:
    """The gradients of all stages by name; those of copies of a tied parameter are added up."""
    gradients: dict[str, Tensor] = {}
    for split in splits:
        for name, parameter in split.root.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return gradients


def assert_equal_gradients(actual: dict[str, Tensor], model: nn.Module) -> None:
    """Compare with the gradients of the whole model, by the tolerances of the project."""
    expected = {name: p.grad for name, p in Root(model).named_parameters() if p.grad is not None}
    assert {name for name, grad in actual.items() if grad.any()} <= expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        error = (actual.get(name, torch.zeros(())) - grad).abs().max()
        assert error <= 1e-5 * grad.abs().max() + 1e-7 * largest, (name, error)


# ---------------------------------------------------------------------- a model that breaks rules


class ToyConfig(PretrainedConfig):
    model_type = "toy"
    is_encoder_decoder = False


class ToyLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
        return hidden + self.projection(hidden).tanh()


Step = Callable[["ToyModel", Tensor], Tensor]


def run_layers(model: "ToyModel", hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = layer(hidden)
    return hidden


class ToyModel(PreTrainedModel):
    """A language model of 4 layers; ``run`` computes the hidden states after them from those before them."""

    config_class = ToyConfig

    def __init__(self, run: Step = run_layers, layer: type[ToyLayer] = ToyLayer, width: int = 8) -> None:
        super().__init__(ToyConfig())
        self.embedding = nn.Embedding(101, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(layer(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 101, bias=False)
        self.run = run

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.norm(self.run(self, self.embedding(input_ids)))))
