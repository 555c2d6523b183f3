import gzip
import logging
import os
from pathlib import Path

import pytest

from lightning_fsdp2.data import files as data_files
from lightning_fsdp2.data.files import (
    check_lines,
    find_files,
    get_kind,
    open_file,
    read_lines,
    refuse_unreadable_files,
)


@pytest.fixture
def tree(tmp_path):
    """A directory with files of every kind."""
    for name in ["b.txt", "a.md", "code/z.py", "code/deep/y.py", "image.png", ".hidden.txt", ".git/config.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    return tmp_path


def names(files, root):
    return [Path(file).relative_to(root).as_posix() for file in files]


def test_directory_gives_its_known_files_sorted_without_hidden_ones(tree):
    with pytest.warns(UserWarning, match=r"1 of 5 files are left out, .* 1 files \(.png 1\)"):
        files = find_files(str(tree))
    assert names(files, tree) == ["a.md", "b.txt", "code/deep/y.py", "code/z.py"]


def test_suffixes_choose_the_files_of_a_directory(tree):
    with pytest.warns(UserWarning, match=r"3 of 5 files .* suffixes=\['.png', '.md'\]: 3 files \(.py 2, .txt 1\)"):
        files = find_files(str(tree), [".png", ".md"])
    assert names(files, tree) == ["a.md", "image.png"]


def test_file_and_glob_are_taken_whatever_their_suffix(tree):
    assert names(find_files(str(tree / "image.png")), tree) == ["image.png"]
    assert names(find_files(str(tree / "**" / "*.p*")), tree) == ["code/deep/y.py", "code/z.py", "image.png"]


def test_list_keeps_its_order_and_repeats_what_it_repeats(tree, caplog):
    with caplog.at_level(logging.INFO):
        files = find_files([str(tree / "code"), str(tree / "b.txt"), str(tree / "b.txt")])
    assert names(files, tree) == ["code/deep/y.py", "code/z.py", "b.txt", "b.txt"]
    assert f"path: 1 files are read more than once, such as {str(tree / 'b.txt')!r}" in caplog.text


def test_links_are_followed_and_those_to_nothing_are_refused_by_name(tmp_path):
    folder, target = tmp_path / "texts", tmp_path / "elsewhere.md"
    folder.mkdir()
    target.write_text("text")
    (folder / "c.md").symlink_to(target)
    os.mkfifo(folder / "pipe.md")  # which would be waited for
    assert names(find_files(str(folder), [".md"]), folder) == ["c.md"]
    target.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has 1 link\(s\) to files that do not exist, such as '.*/c\.md'; fetch"
    ):
        find_files(str(folder), [".md"])


def test_relative_path_and_home_directory_become_absolute(tree, monkeypatch):
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", str(tree))
    assert find_files("b.txt") == find_files("~/b.txt") == [str(tree / "b.txt")]


def test_python_stdlib_is_the_source_of_this_python_without_tests_and_packages():
    files = find_files("python-stdlib")
    library = Path(os.__file__).parent
    relative = names(files, library)
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(relative)
    assert all(name.endswith(".py") for name in relative)
    assert all(Path(file).stat().st_size for file in files)
    assert not any({"site-packages", "dist-packages", "test", "tests"} & set(Path(name).parts) for name in relative)
    assert files == sorted(files, key=Path)


@pytest.mark.parametrize("path", ["missing.txt", "missing/*.txt"])
def test_missing_path_is_named(tmp_path, path):
    with pytest.raises(
        FileNotFoundError, match=r"path='.*missing.*' is neither a file nor a directory.*check its spelling"
    ):
        find_files(str(tmp_path / path))


def test_missing_path_names_the_nearest_file_and_else_what_the_module_can_read(tree):
    with pytest.raises(FileNotFoundError, match=rf"path='{tree}/c.txt' is neither .*; did you mean '{tree}/b.txt'\?$"):
        find_files(str(tree / "c.txt"))
    with pytest.raises(FileNotFoundError, match=r"check its spelling, or name a dataset .* as `dataset`\.$"):
        find_files("nobody/chats", [".jsonl"])
    with pytest.raises(FileNotFoundError, match=r"`dataset`, or use 'python-stdlib' for"):
        find_files("nobody/texts")
    with pytest.raises(FileNotFoundError, match=r"validation_path=.* check its spelling\.$"):
        find_files("nobody/chats", [".jsonl"], option="validation_path")


def test_directory_without_known_files_names_the_suffixes(tmp_path):
    (tmp_path / "a.rs").write_text("fn main() {}")
    with pytest.raises(FileNotFoundError, match=r"suffixes=\['.txt', .*set suffixes"):
        find_files(str(tmp_path))


def test_empty_list_of_paths():
    with pytest.raises(FileNotFoundError, match=r"path=\[\] is empty"):
        find_files([])


def test_compressed_files_of_known_endings_are_taken_and_the_others_counted(tmp_path, caplog):
    for name in ["README.md", "a.jsonl.gz", "b.csv", "c.jsonl.zst", "d.tar.gz", "e.png", "f.png", "Makefile"]:
        (tmp_path / name).write_text("")
    left_out = r"4 of 8 files are left out, .* 4 files \(.png 2, .tar.gz 1, no ending 1\)"
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match=left_out):
        files = find_files(str(tmp_path), option="test_path")
    assert names(files, tmp_path) == ["README.md", "a.jsonl.gz", "b.csv", "c.jsonl.zst"]
    assert "test_path: 4 files (.csv 1, .jsonl.gz 1, .jsonl.zst 1, .md 1)" in caplog.text


@pytest.mark.parametrize(
    ("file", "kind"), [("a/b.c/rows.jsonl.gz", ".jsonl"), ("a.b/rows", ""), ("rows.gz", ""), ("x.parquet", ".parquet")]
)
def test_kind_is_the_ending_without_compression(file, kind):
    assert get_kind(file) == kind


def test_compressed_file_is_opened_decompressed(tmp_path):
    file = tmp_path / "a#[1].txt.gz"
    file.write_bytes(gzip.compress(b"content"))
    with open_file(str(file)) as content:
        assert content.read() == b"content"


def test_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"a.txt' may not be read \(Permission denied\); let this user read it"):
        refuse_unreadable_files([str(tmp_path / "a.txt")])


def test_pointers_and_files_that_nothing_can_decompress_are_refused_by_name(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match=r"a.txt' is a Git LFS pointer, .* run `git lfs pull`"):
        refuse_unreadable_files([str(file)])
    monkeypatch.setattr("lightning_fsdp2.data.files.find_spec", lambda name: None)
    file = file.rename(tmp_path / "a.jsonl.zst")
    file.write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match=r"a.jsonl.zst' is compressed .* pip install zstandard"):
        refuse_unreadable_files([str(file)])


@pytest.fixture
def short_lines(monkeypatch):
    """Let lines have at most 8 bytes, and files be read in blocks of 3."""
    monkeypatch.setattr(data_files, "LONGEST_LINE", 8)
    monkeypatch.setattr(data_files, "_BLOCK", 3)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"12345678", None),
        (b"1234567\n12345678\n\n1\n", None),
        (b"\n" * 30, None),
        (b"123456789", 1),
        (b"1\n2\n3456789012\n4", 3),
        (b"1\n2\n3\n4567890123456789012", 4),
    ],
)
def test_line_that_is_too_long_is_named_by_both_ways_to_read(tmp_path, short_lines, name, content, line):
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for read in (check_lines, lambda file: list(read_lines(file))):
        if line is None:
            read(str(file))
        else:
            with pytest.raises(ValueError, match=rf"{name}, line {line}: the line is longer than .* MiB, the most"):
                read(str(file))
