"""What the help says, and that each option that it names exists."""

import inspect
import re
import sys
from argparse import ArgumentParser
from typing import get_args, get_type_hints

import pytest

import lightning_fsdp2
from lightning_fsdp2.cli import FSDP2CLI, main
from lightning_fsdp2.cli.commands import COMMANDS, READ_CONFIG, SUMMARIES
from lightning_fsdp2.cli.completion import SHELLS
from lightning_fsdp2.cli.without_run import CLITrainer
from lightning_fsdp2.plan import DEVICES
from lightning_fsdp2.startup.registry import STRATEGIES

MARKUP = re.compile(r":[a-z:]+:`|`")
OWN = {
    "fit": "--ckpt_path",
    "validate": "--verbose",
    "test": "--verbose",
    "predict": "--ckpt_path",
    "describe": "--world_size",
    "plan": "--search",
    "quickstart": "--ckpt_path",
    "consolidate": "--with_optimizers",
    "verify": "--trust_checkpoint",
    "export": "--merge",
}
"""An option of each command that is not an option of the Trainer, the model or the data."""


@pytest.fixture(scope="module")
def parsers() -> dict[str, ArgumentParser]:
    """The parsers of the commands that read a config."""
    found: dict[str, ArgumentParser] = {}

    def keep(self: FSDP2CLI, parser: ArgumentParser, args: object) -> None:
        found.update(parser._subcommands_action.choices)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDP2CLI, "parse_arguments", keep)
        patch.setattr(sys, "argv", ["lightning-fsdp2"])
        with pytest.raises(SystemExit):
            FSDP2CLI()
    return found


def show(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    assert exit_.value.code == 0
    return capsys.readouterr().out


def list_options(page: str) -> list[str]:
    """The options of a page of help, in order: words at the start of a line, or after a comma."""
    return re.findall(r"^  (?:-\w, )?(--[\w.]+)", page, re.MULTILINE)


def test_front_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = show(capsys, "--help")
    assert page == show(capsys) == show(capsys, "-h")
    assert "(default: null)" not in page
    assert "{" + ",".join(SHELLS) + "}" in page
    commands = page.partition("commands:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in commands.splitlines()] == [*OWN] == [*SUMMARIES]
    assert_short(page)


def assert_short(page: str) -> None:
    lines = page.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert not MARKUP.search(page)


@pytest.mark.guarantees("help")
@pytest.mark.parametrize("command", OWN)
def test_a_page_begins_with_the_options_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = show(capsys, command, "--help")
    assert page == show(capsys, command, "-h")
    assert_short(page)
    assert page.startswith(f"usage: lightning-fsdp2 {command} ")
    options = list_options(page)
    assert OWN[command] in options
    assert not any(option.startswith("--trainer") for option in options[: options.index(OWN[command])])


@pytest.mark.parametrize("command", COMMANDS)
def test_pages_of_commands_for_checkpoints_have_all_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = show(capsys, command, "--help")
    assert page == show(capsys, command, "--help=all")
    parameters = inspect.signature(COMMANDS[command]).parameters.values()
    arguments = [parameter.name.upper() for parameter in parameters if parameter.default is parameter.empty]
    assert page.splitlines()[0].split("]")[-1].split() == arguments
    assert re.findall(r"^  ([A-Z]+) ", page, re.MULTILINE) == arguments
    options = {f"--{parameter.name}": parameter.default for parameter in parameters}
    texts = page.split("\n  --")[1:]
    assert {f"--{text.split()[0]}" for text in texts} == {*options} - {f"--{name.lower()}" for name in arguments}
    for text in texts:
        default = options[f"--{text.split()[0]}"]
        if default is not None:
            assert f"Default: {str(default).replace('True', 'true').replace('False', 'false')}." in " ".join(
                text.split()
            )


CLASSES = {
    "--trainer.strategy": lightning_fsdp2.FSDP2Strategy,
    "--model": lightning_fsdp2.CausalLM,
    "--data": lightning_fsdp2.TextDataModule,
}


@pytest.mark.guarantees("help")
@pytest.mark.parametrize("command", [*READ_CONFIG, "quickstart"])
def test_each_option_exists(
    command: str, parsers: dict[str, ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = set(parsers["fit" if command == "quickstart" else command]._option_string_actions)
    for option in list_options(show(capsys, command, "--help")):
        start, _, name = option.rpartition(".")
        if option not in flags:
            assert name in inspect.signature(CLASSES[start]).parameters


def test_the_page_of_plan_has_all_its_options(
    parsers: dict[str, ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {flag for flag in parsers["plan"]._option_string_actions if re.fullmatch(r"--\w+", flag)}
    shown = {*list_options(show(capsys, "plan", "--help"))}
    assert flags - shown == {"--trainer", "--model", "--data", "--seed_everything"}


def test_a_page_has_all_the_words_that_an_option_takes(capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join(show(capsys, "plan", "--help").split())
    *others, last = DEVICES
    assert f"--device NAME {', '.join(others)} or {last}. " in page
    formats = get_args(get_type_hints(CLITrainer.describe)["format"])
    assert f"--format {{{','.join(formats)}}} " in show(capsys, "describe", "--help").replace("\n", " ")
    assert f"NAME {', '.join(STRATEGIES)}, a strategy" in page


def test_short_names_of_a_page_are_parsed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = [
        "fit",
        "--model=CausalLM",
        "--model.pretrained=gpt2",
        "--data=TextDataModule",
        "--data.path=a",
        "--print_config",
    ]
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2", *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert "class_path: lightning_fsdp2.CausalLM" in capsys.readouterr().out


@pytest.mark.parametrize("command", READ_CONFIG)
def test_all_options_begin_with_those_of_the_command(
    command: str, parsers: dict[str, ArgumentParser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = parsers[command].format_help()
    assert page.startswith(f"usage: lightning-fsdp2 {command} ")
    titles = [line.rstrip(":") for line in page.splitlines() if line.endswith(":") and not line.startswith(" ")]
    kinds = ("trainer", "model", "data")
    assert titles == ["options", f"Options of {command}", *(f"Options of the {kind}" for kind in kinds)]
    assert "--trainer.reload_dataloaders_every_n_epochs" in page
    assert not MARKUP.search(page)
    assert (
        re.findall(r"[a-z]\.[A-Z][a-z]+", page.replace("data.DistributedSampler", "")) == []
    )  # run-together sentences


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--trainer.strategy.help", "FSDP2Strategy"),
        ("--trainer.strategy.help", "MegatronFSDPStrategy"),
        ("--model.help", "CausalLM"),
        ("--data.help", "ChatDataModule"),
        ("--trainer.callbacks.help", "ModelCheckpoint"),
    ],
)
def test_help_of_a_class_has_no_markup(
    option: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["fit", f"{option}={name}"]
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2", *args])
    with pytest.raises(SystemExit):
        main()
    page = capsys.readouterr().out
    assert "usage" in page
    assert not MARKUP.search(page)
