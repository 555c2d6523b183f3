"""What the command line does with checkpoints, in process and once as a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.models import LLAMA, make_causal_lm
from safetensors.torch import load_file
from torch import nn

from lightning_fsdp2 import save_checkpoint
from lightning_fsdp2.cli import main
from lightning_fsdp2.cli.commands import parse_options
from lightning_fsdp2.config import dtype_from_str


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    save_checkpoint(tmp_path / "a.ckpt", model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"step": 3})
    return tmp_path / "a.ckpt"


def run(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in args])
    return exit_.value.code


@pytest.mark.guarantees("checkpoint-commands")
def test_verify_names_the_files(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", path) == 0
    *files, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in files] == ["__0_0.distcp", "meta.pt", "checksums.json", ".metadata"]
    assert last == f"{path} is complete."


@pytest.mark.guarantees("checkpoint-commands")
def test_consolidate_writes_a_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("consolidate", path, tmp_path / "b.ckpt") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'b.ckpt'} is complete.\n"
    content = torch.load(tmp_path / "b.ckpt", weights_only=True)
    torch.manual_seed(0)
    assert torch.equal(content["state_dict"]["weight"], nn.Linear(8, 8).weight)
    assert content["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1
    assert run("consolidate", path, tmp_path / "b.ckpt", "--with_optimizers=false") == 0
    assert "optimizer_states" not in torch.load(tmp_path / "b.ckpt", weights_only=True)


@pytest.mark.guarantees("trusted-checkpoints")
@pytest.mark.filterwarnings("ignore:This run's checkpoints hold objects")
def test_objects_need_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2), extra=Path("an object"))
    assert run("consolidate", tmp_path / "a.ckpt", tmp_path / "b.ckpt") == 2
    assert "`--trust_checkpoint=true` on the command line" in capsys.readouterr().err
    assert run("consolidate", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--trust_checkpoint=true") == 0
    assert torch.load(tmp_path / "b.ckpt", weights_only=False)["extra"] == Path("an object")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["verify", "absent"], "There is no checkpoint 'absent'."),
        (["verify"], "the following arguments are required: path"),
        (["verify", "absent", "--nothing=1"], "unrecognized arguments: --nothing=1"),
        (["consolidate", "absent", "x"], "There is no checkpoint 'absent'."),
        (["nothing"], "there is no command 'nothing'; use one of 'fit', "),
    ],
)
def test_errors_are_one_line(args: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert error in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("name", "nearest"), [("last", "last.ckpt"), ("epoch=1-step=9.ckpt", "epoch=1-step=90.ckpt")])
def test_a_checkpoint_with_a_similar_name(
    name: str, nearest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("last.ckpt", "epoch=1-step=90.ckpt", "epoch=0-step=45.ckpt"):
        (tmp_path / "checkpoints" / other).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run("verify", f"checkpoints/{name}") == 2
    expected = f"error: There is no checkpoint 'checkpoints/{name}'; did you mean 'checkpoints/{nearest}'?\n"
    assert capsys.readouterr().err == expected


@pytest.mark.slow
def test_a_damaged_checkpoint_ends_a_process_with_2(path: Path) -> None:
    data = path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    command = [sys.executable, "-m", "lightning_fsdp2", "verify", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert [line for line in result.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: The checkpoint {str(path)!r} is damaged: __0_0.distcp (optimizer_0.param_groups.0.params) has changed"
        " since it was written. Use an earlier checkpoint."
    ]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["a", "b"], {"merge": False, "overwrite": False, "verify": True}),
        (["a", "b", "--merge"], {"merge": True, "overwrite": False, "verify": True}),
        (
            ["--merge", "a", "--max-shard-size", "7", "b"],
            {"merge": True, "path": "a", "output": "b", "max_shard_size": 7},
        ),
        (["--merge", "false", "a", "b"], {"merge": False, "path": "a"}),
        (["a", "b", "--overwrite", "--verify=false"], {"merge": False, "overwrite": True, "verify": False}),
        (["a", "b", "--dtype=bf16"], {"dtype": "bfloat16"}),
        (["a", "b", "--dtype", "fp16", "--merge", "--tokenizer=fp32"], {"dtype": "float16", "tokenizer": "fp32"}),
    ],
)
def test_options_in_short(arguments: list[str], options: dict[str, object]) -> None:
    parsed = parse_options("export", arguments)
    assert (parsed["path"], parsed["output"]) == ("a", "b")
    assert options.items() <= parsed.items()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_short_names_of_dtypes_are_those_of_the_package(name: str) -> None:
    parsed = parse_options("export", ["a", "b", f"--dtype={name}"])
    assert getattr(torch, parsed["dtype"]) is dtype_from_str(name)


def test_export_writes_a_model_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_causal_lm(LLAMA)
    save_checkpoint(tmp_path / "run.ckpt", model)
    assert run("export", tmp_path / "run.ckpt", tmp_path / "out", "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'} is complete.\n"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    state = model.state_dict()
    assert weights
    assert all(weight.equal(state[name].bfloat16()) for name, weight in weights.items())
