import json
import logging
import os
from pathlib import Path

import pytest
from datasets import Dataset

from lightning_fsdp2.data.sources import find_files, load_documents, load_rows


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
    assert names(find_files(str(tree)), tree) == ["a.md", "b.txt", "code/deep/y.py", "code/z.py"]


def test_suffixes_choose_the_files_of_a_directory(tree):
    assert names(find_files(str(tree), [".png", ".md"]), tree) == ["a.md", "image.png"]


def test_file_and_glob_are_taken_whatever_their_suffix(tree):
    assert names(find_files(str(tree / "image.png")), tree) == ["image.png"]
    assert names(find_files(str(tree / "**" / "*.p*")), tree) == ["code/deep/y.py", "code/z.py", "image.png"]


def test_list_keeps_its_order_and_takes_a_file_once(tree):
    files = find_files([str(tree / "code"), str(tree / "b.txt"), str(tree)])
    assert names(files, tree) == ["code/deep/y.py", "code/z.py", "b.txt", "a.md"]


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


def test_text_files_are_one_document_each_with_line_ends_as_newlines(tmp_path, cache):
    (tmp_path / "a.py").write_bytes(b"first\n\n\nsecond\r\n  end")
    (tmp_path / "b.txt").write_text("é漢")
    assert load_documents(find_files(str(tmp_path)), cache_dir=cache)["text"][:] == ["first\n\n\nsecond\n  end", "é漢"]


def test_formats_mix_and_other_columns_go(tmp_path, cache):
    rows = [{"body": "one\ntwo", "id": 1}, {"body": "three", "id": 2}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "list.json").write_text(json.dumps([{"body": "four", "id": 3}]))
    Dataset.from_dict({"other": [0, 1], "body": ["five", "six"]}).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "z.txt").write_text("zero")
    documents = load_documents(find_files(str(tmp_path)), text_column="body", cache_dir=cache)
    assert documents.column_names == ["text"]
    assert documents["text"][:] == ["zero", "one\ntwo", "three", "four", "five", "six"]


def test_names_with_glob_characters(tmp_path, cache):
    for name in ["a[1].txt", "b*.txt", "c ?#%20.txt", "d.jsonl"]:
        (tmp_path / name).write_text('{"text": "row"}' if name.endswith("jsonl") else name)
    (tmp_path / "a1.txt").write_text("what the pattern a[1].txt matches")
    files = [str(tmp_path / name) for name in ["a[1].txt", "b*.txt", "c ?#%20.txt", "d.jsonl"]]
    assert load_documents(files, cache_dir=cache)["text"][:] == ["a[1].txt", "b*.txt", "c ?#%20.txt", "row"]


def test_changed_file_is_read_again(tmp_path, cache):
    file = tmp_path / "a.txt"
    file.write_text("before")
    assert load_documents([str(file)], cache_dir=cache)["text"][:] == ["before"]
    file.write_text("after it")
    assert load_documents([str(file)], cache_dir=cache)["text"][:] == ["after it"]


def test_empty_documents_are_left_out(tmp_path, cache):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.jsonl").write_text('{"text": null}\n{"text": ""}\n{"text": "c"}')
    assert load_documents(find_files(str(tmp_path)), cache_dir=cache)["text"][:] == ["b", "c"]


def test_files_that_are_not_utf8_are_left_out_with_a_warning(tmp_path, cache, caplog):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "utf8.txt").write_text("café")
    with caplog.at_level(logging.WARNING, "lightning_fsdp2"):
        documents = load_documents(find_files(str(tmp_path)), cache_dir=cache)
    assert documents["text"][:] == ["café"]
    assert "1 of 2 text files are left out because they are not UTF-8" in caplog.text


def test_corpus_without_text(tmp_path, cache):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"path holds no text: the 1 file\(s\) \(the first is '.*a.txt'\) are"):
        load_documents([str(tmp_path / "a.txt")], cache_dir=cache)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("body", r"text_column='body' is not a column of '.*a.jsonl', which has \['text', 'id'\]; set text_column"),
        ("id", r"text_column='id' of '.*a.jsonl' contains Value\('int64'\), not strings; set text_column"),
    ],
)
def test_wrong_column(tmp_path, cache, column, message):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 1}')
    with pytest.raises(ValueError, match=message):
        load_documents([str(tmp_path / "a.jsonl")], text_column=column, cache_dir=cache)


def test_rows_are_objects_in_json_with_the_place_they_are_from(tmp_path, cache):
    # the second one has other columns and types, which no table holds
    rows = [{"a": 1}, {"a": "é", "b": [{"c": None}]}]
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.json", "c.json")]
    Path(files[0]).write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + "\n")
    Path(files[1]).write_text(json.dumps(rows, indent=1))
    Path(files[2]).write_text(json.dumps(rows[0]))
    expected = [(f"{files[0]}, line 1", rows[0]), (f"{files[0]}, line 3", rows[1])]
    expected += [(f"{files[1]}, item 1", rows[0]), (f"{files[1]}, item 2", rows[1]), (f"{files[2]}, line 1", rows[0])]
    for streaming in (False, True):
        read = [(row["location"], json.loads(row["text"])) for row in load_rows(files, streaming=streaming)]
        assert read == expected


def test_damaged_list_is_named(tmp_path, cache):
    file = tmp_path / "a.json"
    file.write_text('[{"a": 1},')
    with pytest.raises(
        ValueError, match=rf"^{file}: the file is not a JSON list \(.*\); repair it, or write one object per"
    ):
        load_rows([str(file)], cache_dir=cache)
