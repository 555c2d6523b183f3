import bz2
import gzip
import json
import logging
import lzma
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from lightning_fsdp2.data import files as data_files
from lightning_fsdp2.data import sources as data_sources
from lightning_fsdp2.data.files import find_files
from lightning_fsdp2.data.sources import DatasetSplit, load_documents, load_rows


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
    with pytest.warns(UserWarning, match=r"3 of 5 documents of 3 files .*a.txt'\) have no text and are left out"):
        assert load_documents(find_files(str(tmp_path)), cache_dir=cache)["text"][:] == ["b", "c"]


def test_rows_without_text_are_counted_and_streams_say_that_they_leave_some_out(tmp_path, cache):
    file = tmp_path / "nokey.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [{"text": "a"}, {"other": 1}] * 30))
    with pytest.warns(UserWarning, match=r"30 of 60 documents of '.*nokey.jsonl' have no text and are left out"):
        load_documents([str(file)], cache_dir=cache)
    with pytest.warns(UserWarning, match="Documents of '.*nokey.jsonl' that have no text are left out"):
        assert len(list(load_documents([str(file)], streaming=True))) == 30


@pytest.mark.parametrize("streaming", [False, True])
def test_compressed_files_are_read_like_the_others(tmp_path, cache, streaming):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"zero"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}'))
    (tmp_path / "c.json.xz").write_bytes(lzma.compress(b'[{"text": "three"}]'))
    (tmp_path / "d.jsonl.bz2").write_bytes(bz2.compress(b'{"text": "four"}'))
    (tmp_path / "e.csv").write_text('id,text\n1,"five, or so"\n')
    (tmp_path / "f.csv.gz").write_bytes(gzip.compress(b"id,text\n1,six\n"))
    Dataset.from_dict({"text": ["seven"]}).to_parquet(tmp_path / "g.parquet")
    documents = load_documents(find_files(str(tmp_path)), cache_dir=cache, streaming=streaming)
    expected = ["zero", "one", "two", "three", "four", "five, or so", "six", "seven"]
    assert [row["text"] for row in documents] == expected


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("load", [load_documents, load_rows])
def test_repeated_path_is_read_as_often_as_it_is_given(tmp_path, cache, load, streaming):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    files = find_files([str(tmp_path / name) for name in ("a.jsonl", "a.jsonl", "b.jsonl")])
    texts = [row["text"] for row in load(files, cache_dir=cache, streaming=streaming)]
    assert texts == [texts[0], texts[0], texts[2]] != [texts[0]] * 3


def test_compressed_rows(tmp_path, cache):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}'))
    (tmp_path / "b.json.xz").write_bytes(lzma.compress(b'[{"a": 3}]'))
    Dataset.from_dict({"a": [4]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "c.parquet.gz").write_bytes(gzip.compress((tmp_path / "c.parquet").read_bytes()))
    rows = load_rows([str(tmp_path / name) for name in ("a.jsonl.gz", "b.json.xz", "c.parquet.gz")], cache_dir=cache)
    assert [json.loads(row["text"])["a"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", 7], r"values such as '7' in row 2 \(int\), not strings; write every value of this column as a string"),
        ([None, 7], r"values such as '7' in row 2 \(int\), not strings; write every"),
        ([["a", "b"]], r"values such as \"\['a', 'b'\]\" in row 1 \(list\), not strings; write every"),
    ],
)
def test_first_row_that_is_not_text_is_named(tmp_path, cache, values, message):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": value}) for value in values))
    with pytest.raises(ValueError, match=message):
        load_documents([str(tmp_path / "a.jsonl")], cache_dir=cache)


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
        (
            "id",
            r"text_column='id' of '.*a.jsonl' contains values such as '1' in row 1 .*; set .* one of \['text'\]",
        ),
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


@pytest.mark.parametrize("streaming", [False, True])
def test_nulls_that_a_table_has_filled_in_are_left_out(tmp_path, cache, streaming):
    """All objects of a column of a table have the same keys."""
    calls = [{"arguments": {"city": "Rome", "tags": [{"a": 1}]}}, {"arguments": {"zone": "UTC", "tags": [{"b": None}]}}]
    rows = Dataset.from_list([{"messages": [{"role": "assistant", "calls": [call]}], "tools": None} for call in calls])
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    expected = [{"messages": [{"role": "assistant", "calls": [call]}]} for call in calls]
    expected[1]["messages"][0]["calls"][0]["arguments"]["tags"] = [{}]
    for source in ([str(tmp_path / "a.parquet")], DatasetSplit(str(tmp_path / "saved"), None, "train")):
        read = [json.loads(row["text"]) for row in load_rows(source, streaming=streaming, cache_dir=cache)]
        assert [{key: value for key, value in row.items() if value is not None} for row in read] == expected


def test_damaged_list_is_named(tmp_path, cache):
    file = tmp_path / "a.json"
    file.write_text('[{"a": 1},')
    with pytest.raises(
        ValueError, match=rf"^{file}: the file is not a JSON list \(.*\); repair it, or write one object per"
    ):
        load_rows([str(file)], cache_dir=cache)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("load", [load_documents, load_rows])
def test_files_of_several_zstd_frames_are_read_whole(tmp_path, cache, load, streaming):
    zstandard = pytest.importorskip("zstandard")
    texts = [f"{number} " + "text " * 20_000 for number in range(6)]  # longer than a block
    frames = [zstandard.compress(json.dumps({"text": text}).encode() + b"\n") for text in texts]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    rows = load([str(tmp_path / "a.jsonl.zst")], streaming=streaming, cache_dir=cache)
    assert [row["text"] if load is load_documents else json.loads(row["text"])["text"] for row in rows] == texts


def test_csv_rows_of_chats_are_named_by_their_lines_and_damage_too(tmp_path, cache):
    long = "long " * 40_000
    (tmp_path / "a.csv").write_text(f'\ufeffprompt,completion\n"two\nlines",b\n{long},"d, e"\n', encoding="utf-8")
    rows = list(load_rows([str(tmp_path / "a.csv")], cache_dir=cache))
    assert [json.loads(row["text"]) for row in rows] == [
        {"prompt": "two\nlines", "completion": "b"},
        {"prompt": long, "completion": "d, e"},
    ]
    assert [row["location"].removeprefix(f"{tmp_path}/") for row in rows] == ["a.csv, line 3", "a.csv, line 4"]
    (tmp_path / "b.csv").write_text("prompt,completion\na,b\nc\0,d\n")
    if sys.version_info < (3, 11):  # later ones take NUL for any other character
        with pytest.raises(ValueError, match=r"b.csv, line 3: the line is not CSV"):
            load_rows([str(tmp_path / "b.csv")], cache_dir=cache)


@pytest.mark.guarantees("long-lines")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.csv", "a.csv.gz", "a.txt.gz"])
def test_line_that_is_too_long_is_refused_before_it_is_in_memory(tmp_path, cache, monkeypatch, name):
    for module in (data_files, data_sources):
        monkeypatch.setattr(module, "LONGEST_LINE", 100)
    monkeypatch.setattr(data_files, "_BLOCK", 50)
    rows = {"csv": "text\n" + "a" * 200, "json": '[{"text": "' + "a" * 200 + '"}]'}
    content = rows.get(name.split(".")[1], '{"text": "a"}\n{"text": "' + "a" * 200 + '"}').encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for load in (load_documents, load_rows):
        with pytest.raises(ValueError, match=rf"{name}, line \d: the line is longer than"):
            load([str(tmp_path / name)], cache_dir=cache)
