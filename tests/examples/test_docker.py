"""The images' instructions, carried out in plain directories, since tests have no Docker engine."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .cluster import ROOT, TOY

IMAGES = ("Dockerfile", "Dockerfile.cpu")
NEEDS_ROOT = ("apt-get", "useradd")


def read_instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of an image in their order, continued lines in one."""
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def read_constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    own = [each for each in requirements if each.marker is None or each.marker.evaluate({"python_version": "3.11"})]
    return {each.name.lower().replace("_", "-"): str(each.specifier).removeprefix("==") for each in own}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_pinned_and_end_without_root(name: str) -> None:
    instructions = read_instructions(name)
    [base] = [rest for word, rest in instructions if word == "FROM"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert '"Programming Language :: Python :: 3.11"' in (ROOT / "pyproject.toml").read_text()
    assert [rest for word, rest in instructions if word == "USER"] == ["1000"]
    assert all(
        "-c constraints.txt" in rest or "--no-deps" in rest for word, rest in instructions if "pip install" in rest
    )


def test_images_differ_in_what_the_hardware_needs() -> None:
    gpu, cpu = (read_instructions(name) for name in IMAGES)
    assert [rest for word, rest in gpu if (word, rest) not in cpu and word == "ENV"] == [
        "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    ]
    only = [(word, rest) for word, rest in cpu if (word, rest) not in gpu]
    assert [word for word, _ in only] == ["RUN", "RUN"]
    assert "apt-get" in only[0][1]
    assert f"torch=={read_constraints()['torch']}+cpu" in only[1][1]


def test_the_context_has_what_images_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        rest.split()[index]
        for name in IMAGES
        for word, rest in read_instructions(name)
        if word == "COPY"
        for index in range(len(rest.split()) - 1)
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


class Builder:
    """Carries out instructions below a folder, with a virtual environment for the image's Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder
        python = folder / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", python], check=True)
        self.bin = python / "bin"
        pip = self.bin / "pip"
        pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip --python "{self.bin / "python"}" "$@"\n')
        pip.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment = {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def carry_out(self, word: str, rest: str) -> None:
        if word == "WORKDIR":
            self.directory = self.folder / rest.lstrip("/")
            self.directory.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                self.copy(ROOT / source, self.directory / (source if target == "./" else target))
        elif word == "ENV":
            self.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "RUN" and not any(program in rest for program in NEEDS_ROOT):
            self.run(rest)

    def copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(source, target)

    def run(self, command: str) -> str:
        result = subprocess.run(
            command, shell=True, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        return result.stdout + result.stderr


@pytest.mark.guarantees("launch-scripts")
@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_image_for_cpus_trains(tmp_path: Path) -> None:
    builder = Builder(tmp_path)
    for word, rest in read_instructions("Dockerfile.cpu"):
        builder.carry_out(word, rest)
    installed = {
        package["name"].lower().replace("_", "-"): package["version"].removesuffix("+cpu")
        for package in json.loads(builder.run("pip list --format json"))
    }
    del installed["lightning-fsdp2"]
    assert installed.items() <= read_constraints().items(), "a package is not pinned"
    assert not {"pytest", "mypy", "ruff"} & set(installed)

    (builder.directory / "text").mkdir()
    (builder.directory / "text" / "lines.txt").write_text("".join(f"line {i} of the text\n" for i in range(400)))
    output = builder.run(f"lightning-fsdp2 fit --config configs/quickstart.yaml {shlex.join(TOY)}")
    assert "Training ended after 2 steps" in output
    assert str(tmp_path / "python") in builder.run(
        "python -c 'import lightning_fsdp2; print(lightning_fsdp2.__file__)'"
    )
    [help_] = [json.loads(rest) for word, rest in read_instructions("Dockerfile.cpu") if word == "CMD"]
    assert "fit" in builder.run(shlex.join(help_))
