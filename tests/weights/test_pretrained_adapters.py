"""Adapters from peft's files in sharded models, against the model that wrote them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models import LLAMA, add_adapters, make_causal_lm
from helpers.oracle import make_config, whole
from helpers.ranks import run_ranks
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.weights.pretrained import load_pretrained, set_pretrained
from lightning_fsdp2.weights.pretrained_adapters import WEIGHTS_FILE, set_adapter_weights

LINEAR = ["q_proj", "down_proj"]
EMBEDDING = ["embed_tokens", "v_proj"]
"""peft also saves the base weights of the embedding."""


def save(folder: Path, targets: list[str]) -> dict[str, torch.Tensor]:
    """Write a model and its adapter, and return the weights of both."""
    torch.manual_seed(0)
    base: Any = make_causal_lm(LLAMA)
    base.save_pretrained(folder / "base")
    adapted: Any = add_adapters(base, target_modules=targets)
    adapted.save_pretrained(folder / "adapter", save_embedding_layers="embed_tokens" in targets)
    return dict(adapted.state_dict())


def build(folder: Path, targets: list[str]) -> Any:
    """Return the adapted model without weights, which knows where they are."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(make_config(LLAMA))
        set_pretrained(base, folder / "base")
        adapted: Any = get_peft_model(base, LoraConfig(r=3, target_modules=targets))
    adapted.peft_config["default"].init_lora_weights = "pissa"  # no stage can, and need not, initialise it like this
    set_adapter_weights(adapted, folder / "adapter")
    return adapted


@pytest.mark.parametrize(
    ("targets", "meshes"), [(LINEAR, [{"tp_size": 2}, {"pp_size": 2}]), (EMBEDDING, [{}, {"pp_size": 2}])]
)
def test_a_sharded_model_has_the_weights_of_the_adapter(
    targets: list[str], meshes: list[dict[str, int]], tmp_path: Path
) -> None:
    expected = save(tmp_path, targets)

    def run() -> None:
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
        for sizes in meshes:
            model = build(tmp_path, targets)
            FSDP2Manager(config, create_device_mesh(config, device_type="cpu", **sizes)).parallelize(model)
            weights = whole(model.state_dict())
            assert "pp_size" in sizes or weights.keys() == expected.keys()
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], rtol=0, atol=0, msg=name)
            trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            assert trained == {name for name in weights if "lora_" in name}

    run_ranks(run, 2)


def test_one_process_has_the_weights_of_the_adapter(tmp_path: Path) -> None:
    expected = save(tmp_path, ["q_proj"])
    model = build(tmp_path, ["q_proj"])
    load_pretrained(model, torch.device("cpu"))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0, msg=name)
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for file in tmp_path.glob("*/*.safetensors"):
            file.unlink()
    load_pretrained(model, torch.device("cpu"))  # what is loaded is not read again
    assert all(torch.equal(weight, kept[name]) for name, weight in model.state_dict().items())


def test_a_file_that_one_rank_cannot_read_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, ["q_proj"])

    def run() -> None:
        own = tmp_path / str(dist.get_rank())
        shutil.copytree(tmp_path / "adapter", own / "adapter")
        (own / "base").symlink_to(tmp_path / "base")
        model, mesh = build(own, ["q_proj"]), create_device_mesh(device_type="cpu")
        if dist.get_rank() == 1:
            (own / "adapter" / WEIGHTS_FILE).unlink()
        with pytest.raises(FileNotFoundError, match=rf"1/adapter/{WEIGHTS_FILE}"):
            FSDP2Manager(FSDP2Config(), mesh).parallelize(model)

    run_ranks(run, 2)


def test_an_adapter_of_another_model_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    save(tmp_path, ["q_proj"])
    file = tmp_path / "adapter" / WEIGHTS_FILE
    weights = load_file(file)
    first, second, *_ = sorted(weights)
    lacks = {name: value for name, value in weights.items() if name != second}
    for stored, says in (
        ({**weights, first: weights[first][:1]}, rf"{first} is \[1, 32\], here \[3, 32\]\. "),
        (lacks, rf"it lacks {second}\. "),
        ({**weights, "more": torch.ones(1)}, r"this model has no more\. "),
        ({**lacks, "more": torch.ones(1)}, rf"it lacks {second} \(and 1 more\)\. "),
    ):
        save_file(stored, file)
        with pytest.raises(ValueError, match=rf"is an adapter for another base model \(.*\): {says}"):
            build(tmp_path, ["q_proj"])
