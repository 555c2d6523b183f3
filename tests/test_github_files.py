"""What GitHub and pre-commit read is valid, and names targets, tools and options that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_fsdp2

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))

SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / f"{kind}.yml" for kind in ("bug", "feature", "question")],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE/config.yml"],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
}


def test_every_file_has_a_schema() -> None:
    assert set(GITHUB.rglob("*.yml")) == {path for paths in SCHEMAS.values() for path in paths}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_valid(schema: str) -> None:
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_actions_are_pinned_by_commit() -> None:
    uses = [line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text())]
    assert len(uses) > 5
    pinned = re.compile(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [line for line in uses if not line.startswith("./") and not pinned.fullmatch(line)] == []


@pytest.mark.guarantees("versions")
def test_ci_makes_targets_that_exist_and_tries_the_versions_of_torch_that_the_readme_names() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"]["make"]["strategy"]["matrix"]["include"]
    targets = [job["target"] for job in jobs]
    [pinned] = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    [tested] = re.findall(r"torch \S+ or later \(tested: (.*?)\)", (ROOT / "README.md").read_text())
    others = sorted(set(tested.split(", ")) - {pinned})
    pythons = [job.get("python", "3.11") for job in jobs if job["target"] == "test"]
    classifiers = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert sorted(pythons) == classifiers == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert targets == ["lint", *["test"] * len(pythons), *(f"test-torch-{version}" for version in others)]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in ("lint", "test", "test-torch-%"))


def test_the_release_reads_the_version_as_python_does(tmp_path: Path) -> None:
    """The step that compares the tag is run for a right and a wrong one, and for a changelog without the version."""
    steps = yaml.safe_load((GITHUB / "workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    [script] = [step["run"] for step in steps if step.get("name", "").startswith("The tag is the version")]
    (tmp_path / "lightning_fsdp2").symlink_to(ROOT / "lightning_fsdp2")
    for tag, section, code in (
        (f"v{lightning_fsdp2.__version__}", lightning_fsdp2.__version__, 0),
        ("v9.9.9", lightning_fsdp2.__version__, 1),
        (f"v{lightning_fsdp2.__version__}", "9.9.9", 1),
    ):
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{section}] - 2026-11-23\n")
        command = ["bash", "-e", "-c", script]
        result = subprocess.run(
            command, cwd=tmp_path, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}, check=False
        )
        assert result.returncode == code, (tag, section)


def test_hooks_run_the_tools_of_the_environment() -> None:
    """They have no version of their own, which would differ from that of constraints.txt some day."""
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    constraints = (ROOT / "constraints.txt").read_text()
    for hook in repository["hooks"]:
        tool = Path(hook["entry"].split()[0])
        assert tool.parent == Path(".venv/bin"), hook["id"]
        assert tool.name == "python" or f"\n{tool.name}==" in constraints


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_what_contributors_are_pointed_to_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    makefile = (ROOT / "Makefile").read_text()
    paths = re.findall(r"`((?:tests|tools|lightning_fsdp2|docs)/[\w./]*)`|\]\(([\w./]+)\)", text)
    assert [path for pair in paths for path in pair if path and not (ROOT / path).exists()] == []
    targets = [re.sub(r"[\d.]+$", "%", target) for target in re.findall(r"`make ([\w.-]+)`", text)]
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    plans = (ROOT / "lightning_fsdp2/parallel/tensor/families.py").read_text()
    assert [
        table for table in re.findall(r"`([A-Z_]+(?:FAMILIES|TRAITS|IONS))`", text) if f"\n{table}" not in plans
    ] == []
