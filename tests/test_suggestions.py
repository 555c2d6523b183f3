"""Words that a newcomer gets for a name that is misspelt, or that other software uses."""

import inspect
import re
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fsdp2 import DDPConfig, DDPStrategy, FSDP2Config, FSDP2Strategy, MegatronFSDPStrategy
from lightning_fsdp2._suggestions import _ELSEWHERE, find_nearest, list_options, suggest, suggest_path

OWN = {name.rpartition(".")[2] for name in list_options(FSDP2Strategy).values()}


@pytest.mark.parametrize(
    ("word", "words", "nearest"),
    [
        ("tp_sise", ["tp_size", "dp_size", "cp_size"], "tp_size"),
        ("sequence_paralel", ["tp_size", "config.sequence_parallel"], "config.sequence_parallel"),
        ("trainer.max_stepz", ["trainer.max_steps", "model.max_step"], "trainer.max_steps"),
        ("trainer.gpus", ["trainer.plugins", "trainer.devices"], None),  # an option of earlier versions of Lightning
        ("tensor_parallel_size", ["dp_size", "tp_size"], "tp_size"),
        ("gradient_checkpointing", ["tp_size", "config.activation_checkpointing"], "config.activation_checkpointing"),
        ("lr", ["config", "lora", "optimizer"], "optimizer.lr"),
        ("nothing", ["tp_size"], None),
    ],
)
def test_the_nearest_word(word: str, words: list[str], nearest: str | None) -> None:
    assert find_nearest(word, words, cutoff=0.65) == nearest
    assert suggest(word, words, cutoff=0.65) == (f"; did you mean {nearest!r}?" if nearest else "")


@pytest.mark.guarantees("names-of-other-software")
def test_every_name_of_other_software_leads_to_an_option() -> None:
    elsewhere = {name: here for name, here in _ELSEWHERE.items() if "." not in here}
    assert set(elsewhere.values()) <= OWN | inspect.signature(ModelCheckpoint).parameters.keys()
    assert not elsewhere.keys() & OWN


@pytest.mark.parametrize("strategy", [FSDP2Strategy, MegatronFSDPStrategy])
def test_names_of_other_strategies_in_python(strategy: type) -> None:
    with pytest.raises(TypeError, match=r"has no option 'tensor_parallel_size'; did you mean 'tp_size'\?$"):
        strategy(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("component", "option", "remark"),
    [
        (FSDP2Strategy, "auto_wrap_policy", "leave it out, because the layers to shard are found"),
        (FSDP2Config, "transformer_layer_cls_to_wrap", "leave it out, because the layers to shard are found"),
        (FSDP2Strategy, "find_unused_parameters", "it is an option of DDPConfig only"),
        (FSDP2Strategy, "sharding_strategy", "FSDP2Strategy has config.reshard_after_forward=false for SHARD_GRAD_OP"),
        (FSDP2Config, "tp_size", "it is an option of the strategies that shard, such as FSDP2Strategy"),
        (DDPConfig, "ep_size", "it is an option of the strategies that shard, such as FSDP2Strategy"),
        (DDPStrategy, "find_unused_parameters", "did you mean 'config.find_unused_parameters'?"),
    ],
)
def test_what_to_do_in_place_of_an_option(component: type, option: str, remark: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{component.__name__} has no option {option!r}; {remark}")):
        component(**{option: 2})


def test_without_a_similar_word_all_are_listed() -> None:
    with pytest.raises(TypeError, match=r"^DDPStrategy has no option 'xyzzy'; it has config, checkpoint, timeout, "):
        DDPStrategy(xyzzy=1)


def test_classes_look_as_before() -> None:
    """To people, editors and the command line."""
    assert list(inspect.signature(FSDP2Strategy).parameters)[:2] == ["dp_size", "dp_replicate_size"]
    parser = ArgumentParser()
    parser.add_class_arguments(FSDP2Config, "config")
    assert parser.parse_args(["--config.sequence_parallel=true"]).config.sequence_parallel is True


def test_a_link_whose_target_is_gone_is_not_suggested_for_itself(tmp_path: Path) -> None:
    link = tmp_path / "last.ckpt"
    link.symlink_to("step=10.ckpt")
    assert suggest_path(link) == ""
    (tmp_path / "last-v1.ckpt").touch()
    assert suggest_path(link) == f"; did you mean '{tmp_path}/last-v1.ckpt'?"
