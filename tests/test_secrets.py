"""Secrets in names, URLs and command lines are found."""

import re

import pytest

from lightning_fsdp2._secrets import hide_arguments, hide_secrets, is_secret


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hf_token", "hf-token", "api_key", "apikey", "api_keys", "secretKey", "accessKey", "auth"),
        *("Authorization", "passphrase", "db_pass", "cookie", "PASSWORD", "credentials", "AWS_SECRET_ACCESS_KEY"),
        *("authToken", "cookies"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("eos_token_id", "tokenizer", "passes", "compass", "author", "keyword", "num_tokens_seen"),
        *("eos_token", "pad_token", "image_token", "max_tokens", "label_key", "image_key", "sort_key", "monitor_key"),
        *("key", "keys", "padToken", "fim_prefix_token"),
    ],
)
def test_names_of_other_options(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:s3cret@host/x",
        "postgres://me:s3/cret@host/x",
        "s3://s3cret@host/x",
        "https://host/x?password=s3cret",
        "https://host/x?auth=s3cret",
        "see https://host/x?a=1&client_secret=s3cret now",
        "https://me:a@s3cret@host/x",
    ],
)
def test_secrets_in_urls(url: str) -> None:
    assert not re.search("s3|cret", hide_secrets(url).replace("s3://host", ""))
    assert "host/x" in hide_secrets(url)


@pytest.mark.parametrize(
    "url",
    [
        "hf://datasets/me/ds@main/train.jsonl",
        "s3://bucket/run@3/ckpt",
        "http://host:8080/run@3/x",
        "file:///data/a@b/c",
        "/data/a@b/c",
    ],
)
def test_a_path_may_have_an_at(url: str) -> None:
    assert hide_secrets(url) == url


@pytest.mark.parametrize(
    ("arguments", "hidden"),
    [
        (["--data.init_args.api_key=s3cret", "--a=1"], ["--data.init_args.api_key=hidden", "--a=1"]),
        (["--data.init_args.api_key", "s3cret", "--a", "1"], ["--data.init_args.api_key", "hidden", "--a", "1"]),
        (["--data.secret", "--a", "b"], ["--data.secret", "--a", "b"]),
        (["--data.url=https://me:s3cret@host/x"], ["--data.url=https://host/x"]),
        (["fit", "--data.path", "s3://s3cret@host/x"], ["fit", "--data.path", "s3://host/x"]),
    ],
)
def test_secrets_in_command_lines(arguments: list[str], hidden: list[str]) -> None:
    assert hide_arguments(arguments) == hidden
