"""Damage is found and named, before a run goes on from it."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_fsdp2 import (
    CausalLM,
    consolidate_checkpoint,
    export_hf,
    load_checkpoint,
    load_from_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_fsdp2.checkpoint import verify as verify_module
from lightning_fsdp2.checkpoint.files import storage
from lightning_fsdp2.checkpoint.files.chunks import Chunk
from lightning_fsdp2.checkpoint.verify import verify_alone

DATA = "__0_0.distcp"


def make_checkpoint(folder: Path) -> Path:
    path = folder / "a.ckpt"
    save_checkpoint(path, nn.Linear(64, 64), extra={"step": 3})
    return path


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def make_older_checkpoint(folder: Path) -> Path:
    """Write what version 2 of the format was: a checksum for each file, and none for chunks."""
    path = make_checkpoint(folder)
    summary = json.loads((path / "meta.json").read_text())
    (path / "checksums.json").unlink()
    files = {name: read_size_and_checksum(path / name) for name in summary["files"] if name != "checksums.json"}
    (path / "meta.json").write_text(json.dumps({**summary, "format_version": 2, "files": files}))
    return path


def read_size_and_checksum(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}


def test_an_intact_checkpoint_is_verified_file_by_file(tmp_path: Path) -> None:
    lines = verify_checkpoint(make_checkpoint(tmp_path))
    assert {line.partition(":")[0] for line in lines} == {DATA, ".metadata", "meta.pt", "checksums.json"}


@pytest.mark.guarantees("checksums")
def test_chunks_have_the_checksums_of_what_they_hold(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_checkpoint(tmp_path / "a.ckpt", model)
    stored = json.loads((tmp_path / "a.ckpt" / "checksums.json").read_text())
    weight, bias = (tensor.detach().numpy().tobytes() for tensor in (model.weight, model.bias))
    expected = {b"torch.float32 (2, 3)" + weight, b"torch.float32 (2,)" + bias}
    assert set(stored[DATA].values()) == {xxhash.xxh3_128_hexdigest(content) for content in expected}


@pytest.mark.parametrize("name", [DATA, ".metadata", "meta.pt", "checksums.json"])
def test_a_flipped_bit_is_named(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    flip_bit(path / name, (path / name).stat().st_size // 2)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        verify_checkpoint(path)


def test_what_is_longer_than_what_was_written_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    with (path / DATA).open("ab") as file:
        file.write(b"?")
    with pytest.raises(ValueError, match=f"damaged: {DATA}"):
        verify_checkpoint(path)


@pytest.mark.guarantees("damage-on-every-rank")
@pytest.mark.parametrize(
    ("make", "named"), [(make_checkpoint, f"{DATA} (state_dict.weight)"), (make_older_checkpoint, DATA)]
)
def test_a_flipped_bit_in_a_weight_is_found_at_load_on_every_rank(
    make: Callable[[Path], Path], named: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    load_checkpoint(path, nn.Linear(64, 64))
    flip_bit(path / DATA, (path / DATA).stat().st_size // 2)

    def load() -> None:
        load_checkpoint(path, nn.Linear(64, 64), verify=False)
        with pytest.raises(ValueError, match=rf"{re.escape(named)} has changed since it was written"):
            load_checkpoint(path, nn.Linear(64, 64))

    run_ranks(load, 2)


@pytest.mark.guarantees("own-part-is-checked")
def test_ranks_read_and_compare_what_they_need_and_nothing_else(tmp_path: Path) -> None:
    """Each of two ranks reads one chunk of a weight that two have written, and neither the optimizer's states."""
    path = tmp_path / "a.ckpt"

    def make_sharded() -> nn.Module:
        torch.manual_seed(0)
        return fully_shard(nn.Linear(64, 64, bias=False))

    def save() -> None:
        model = make_sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        save_checkpoint(path, model, optimizer)

    def load() -> list[tuple[str, int, int]]:
        compared: list[tuple[str, int, int]] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(
                storage, "Chunk", lambda file, *at: compared.append((file.name, *at)) or Chunk(file, *at)
            )
            load_checkpoint(path, make_sharded())
        return compared

    run_ranks(save, 2)
    sums = {name: sorted(map(int, sums)) for name, sums in json.loads((path / "checksums.json").read_text()).items()}
    for rank, compared in enumerate(run_ranks(load, 2)):
        ((name, start, length),) = compared
        assert Path(name).name == f"__{rank}_0.distcp"
        assert 64 * 32 * 4 < length < 64 * 32 * 4 + 2048
        assert start in sums[Path(name).name]


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "meta.json", DATA, "file.ckpt"])
def test_a_flipped_bit_anywhere_is_no_reason_to_trust_the_file(name: str, tmp_path: Path) -> None:
    """It loads, or the error names the file; only other checkpoints than ours, without checksums, may ask for trust."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, model, optimizer, extra={"step": 3, "lr": 0.1, "names": ["a", "b"]})
    file = path / name
    if name == "file.ckpt":
        file = path = tmp_path / name
        torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "step": 3}, path)
    content = file.read_bytes()
    chance = random.Random(name)
    errors = []
    for number, position in enumerate(chance.sample(range(len(content)), 60)):
        flip_bit(file, position, chance.randrange(8))
        try:
            load_checkpoint(path, model, optimizer, verify=number % 2 == 0)
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
        file.write_bytes(content)
    assert all(path.name in error and "trust" not in error for error in errors)
    if name in (".metadata", "meta.pt"):
        assert len(errors) == 60
        assert all(f"damaged: {name} has changed" in error for error in errors)


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_damage_is_named_without_checksums_too(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    (path / "meta.json").unlink()  # as in a directory of Lightning's
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:5] + b"?" * (len(content) - 5))
    with pytest.raises(ValueError, match=rf"a\.ckpt/{name}' is damaged".replace(".m", r"\.m")):
        load_checkpoint(path, nn.Linear(64, 64))


def test_a_folder_that_one_rank_cannot_read_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)

    def verify(monkeypatch: pytest.MonkeyPatch) -> None:
        if dist.get_rank() == 1:
            monkeypatch.setattr(verify_module, "get_files", lambda path: (path / "other mount").read_bytes())
        with pytest.raises(FileNotFoundError, match="other mount"):
            verify_module.verify_together(path)

    with pytest.MonkeyPatch.context() as monkeypatch:
        run_ranks(verify, 2, monkeypatch)


@pytest.mark.guarantees("verified-reads")
@pytest.mark.parametrize("how", ["consolidate", "load", "export"])
def test_a_flipped_bit_is_found_by_whatever_reads_a_checkpoint(how: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, make_causal_lm(LLAMA))
    flip_bit(path / DATA, (path / DATA).stat().st_size // 2)

    def use() -> None:
        if how == "consolidate":
            consolidate_checkpoint(path, tmp_path / "out")
        elif how == "load":
            load_from_checkpoint(CausalLM, path)
        else:
            export_hf(path, tmp_path / "out")

    with pytest.raises(ValueError, match=rf"{DATA} \(state_dict\..*\) has changed since it was written"):
        use()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [DATA, "meta.pt", ".metadata", "meta.json"])
def test_truncated_and_missing_files_are_refused(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    size = (path / name).stat().st_size
    os.truncate(path / name, size // 2)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_checkpoint(path, nn.Linear(64, 64))
    if name != "meta.json":  # a checkpoint of Lightning's has none
        (path / name).unlink()
        with pytest.raises(ValueError, match=f"incomplete: {name}".replace(".", r"\.")):
            load_checkpoint(path, nn.Linear(64, 64))


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    summary = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**summary, "format_version": 99}))
    with pytest.raises(ValueError, match=r"format_version=99.*install a later version"):
        load_checkpoint(path, nn.Linear(64, 64))


@pytest.mark.parametrize("content", ["", "[]", '{"format_version": "x"}', '{"format_version": 2, "files": {"a": {}}}'])
def test_a_damaged_summary_is_named(content: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    (path / "meta.json").write_text(content)
    for use in (verify_checkpoint, lambda path: load_checkpoint(path, nn.Linear(64, 64))):
        with pytest.raises(ValueError, match=r"damaged: meta\.json"):
            use(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"text\.ckpt' is truncated, or was not written"):
        load_checkpoint(tmp_path / "text.ckpt", model)
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="is not a checkpoint: it is neither"):
        load_checkpoint(tmp_path / "list.ckpt", model)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"Hugging Face model.*CausalLM\(pretrained"):
        load_checkpoint(tmp_path / "model", model)
    (tmp_path / "file").touch()
    with pytest.raises((NotADirectoryError, FileExistsError), match=r"file' of the checkpoint is a file; choose"):
        save_checkpoint(tmp_path / "file" / "a.ckpt", model)


def test_a_single_file_is_verified_by_its_own_checksums(tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    torch.save({"state_dict": nn.Linear(64, 64).state_dict()}, path)
    assert "CRC-32" in verify_checkpoint(path)[0]
    verify_alone(path)
    flip_bit(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"damaged: file\.ckpt"):
        verify_alone(path)
    with pytest.raises(ValueError, match=r"damaged: file\.ckpt"):
        verify_checkpoint(path)
    with pytest.raises(ValueError, match=r"damaged: file\.ckpt"):
        load_checkpoint(path, nn.Linear(64, 64))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match="truncated"):
        load_checkpoint(path, nn.Linear(64, 64))


@pytest.mark.parametrize(("field", "bit"), [("flags", 1 << 0), ("compression", 1 << 5), ("name", 1 << 7)])
def test_a_damaged_list_of_a_single_file_is_named_on_every_rank(field: str, bit: int, tmp_path: Path) -> None:
    """Where `zipfile` takes a record for encrypted, compressed in a way of its own, or named in no known letters."""
    path = tmp_path / "file.ckpt"
    torch.save({"state_dict": nn.Linear(64, 64).state_dict()}, path)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + {"flags": 8, "compression": 10, "name": 46}[field]] ^= bit
    path.write_bytes(data)

    def load() -> None:
        with pytest.raises(ValueError, match=r"damaged: file\.ckpt"):
            load_checkpoint(path, nn.Linear(64, 64))

    run_ranks(load, 2)
    with pytest.raises(ValueError, match=r"damaged: file\.ckpt"):
        verify_checkpoint(path)
