"""What the command line says that a value must be."""

import pytest
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer, loggers  # noqa: F401  classes are known once they are imported

from lightning_fsdp2 import ChatDataModule, TextDataModule  # noqa: F401  the same
from lightning_fsdp2.cli.messages import describe_type_error, is_about_type, name_options


@pytest.mark.parametrize(
    ("reasons", "types", "words"),
    [
        (["Expected a <class 'int'>. Got value: ten"], "", "an int"),
        (["Expected a <class 'bool'>", "Expected a <class 'float'>"], "", "true, false or a number"),
        (["Expected a typing.Literal['full', 'chunked']", "Expected a <class 'NoneType'>"], "", "'full' or 'chunked'"),
        (["Expected a <class 'collections.abc.Iterable'>"], "", "a list"),
        (
            ["Expected a dot import path string: ten"],
            "Subtypes: [<class 'torch.distributed.fsdp.CPUOffloadPolicy'>, <class 'NoneType'>]",
            "a mapping of options of CPUOffloadPolicy: pin_memory",
        ),
        (
            ["Not a valid subclass of Callback"],
            "Subtypes: [<class 'lightning.pytorch.callbacks.callback.Callback'>]",
            "a mapping of class_path and init_args, with the options under init_args",
        ),
        (
            ["Expected a dot import path string: ten"],
            "Subtypes: [<class 'lightning.pytorch.callbacks.callback.Callback'>]",
            "the class path of a Callback",
        ),
        (
            ["Expected a dot import path string: ten"],
            "Subtypes: [<class 'lightning.pytorch.core.datamodule.LightningDataModule'>]",
            "the class path of a LightningDataModule (such as ChatDataModule, TextDataModule)",
        ),
        (
            ["Expected a dot import path string: ten"],
            "Subtypes: [typing.Callable[[torch.optim.optimizer.Optimizer],"
            " typing.Union[torch.optim.lr_scheduler.LRScheduler]], <class 'NoneType'>]",
            "the class path of a LRScheduler (such as lightning_fsdp2.schedulers.WarmupCosine)",
        ),
    ],
)
def test_types_are_put_in_words(reasons: list[str], types: str, words: str) -> None:
    assert all(map(is_about_type, reasons))
    assert describe_type_error("option", "ten", reasons, types) == f"option=ten must be {words}"


def test_only_classes_that_a_config_can_name_are_listed() -> None:
    reasons = ["Expected a dot import path string: ten", "Expected a <class 'collections.abc.Iterable'>"]
    types = (
        "Subtypes: [<class 'lightning.pytorch.loggers.logger.Logger'>, typing.Iterable[...],"
        " collections.abc.Iterable[lightning.pytorch.loggers.logger.Logger]]"
    )
    line = describe_type_error("logger", "ten", reasons, types)
    assert line.startswith("logger=ten must be the class path of a Logger (such as ")
    assert line.endswith(") or a list")
    assert "CSVLogger" in line
    assert "Dummy" not in line


def test_other_reasons_are_not_about_types() -> None:
    assert not is_about_type("Option 'lr' is not accepted")


@pytest.mark.guarantees("libraries-mistakes")
@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("'full' is none of my words", "flags.checkpointing='full'"),
        ("the full message", ""),
        ("the checkpointing asked for, full, is not implemented", "flags.checkpointing='full'"),
        ("No supported gpu backend found!", "trainer.accelerator='gpu'"),
        ("the number of devices is 'auto' or an int", ""),
        ("cannot read ./text.txt", "data.path='./text.txt'"),
        ("cannot read ./text.txt.gz", ""),
        ("no kernel for bf16-mixed here", "trainer.precision='bf16-mixed'"),
        ("`precision` is wrong", "trainer.precision='bf16-mixed'"),
        ("FlashAttention2 is not installed", "model.attention='FlashAttention2'"),
        ("nothing of the config", ""),
    ],
)
def test_a_librarys_message_names_the_options_that_it_is_about(message: str, options: str) -> None:
    config = Namespace(
        trainer=Namespace(precision="bf16-mixed", accelerator="gpu", devices="auto"),
        flags={"checkpointing": "full"},
        data=Namespace(path="./text.txt"),
        model=Namespace(attention="FlashAttention2"),
    )
    assert name_options(message, config) == (f" (the config has {options})" if options else "")
