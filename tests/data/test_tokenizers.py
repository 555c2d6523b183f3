"""A tokenizer that cannot be loaded is told by the file at fault."""

from pathlib import Path

import pytest

from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
from lightning_fsdp2.data.tokenizers import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_byte_tokenizer().save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path))) == 257
    return tmp_path


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["{broken", "", None], ids=["no-json", "empty", "cut"])
def test_file_that_is_not_json_is_named(folder: Path, name: str, damage: str | None) -> None:
    content = (folder / name).read_text()
    (folder / name).write_text(content[: len(content) // 2] if damage is None else damage)
    with pytest.raises(ValueError, match=rf"^tokenizer='{folder}': {name} is not JSON .* download the tokenizer again"):
        load_tokenizer(str(folder))


def test_directory_without_a_tokenizer_is_told_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^tokenizer='{folder}': it has no tokenizer.json, .* again\.$"):
            load_tokenizer(str(folder))
        (folder / "tokenizer_config.json").unlink(missing_ok=True)


def test_valid_json_that_is_no_tokenizer_is_told_by_the_reason_of_transformers(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"^tokenizer='{folder}': it cannot be loaded \(.+\); copy or download"):
        load_tokenizer(str(folder))


def test_file_that_may_not_be_read_is_not_called_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def refuse(path: Path) -> str:
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    (folder / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"tokenizer.json may not be read \(Permission denied\); let this user"):
        load_tokenizer(str(folder))
