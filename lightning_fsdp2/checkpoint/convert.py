"""Convert checkpoint directories to single files."""

from pathlib import Path
from typing import Any

from lightning_fsdp2.checkpoint.files.drafts import get_path, is_local
from lightning_fsdp2.checkpoint.files.paths import resolve_checkpoint
from lightning_fsdp2.checkpoint.find import find_checkpoint
from lightning_fsdp2.checkpoint.formats.directory import read_directory
from lightning_fsdp2.checkpoint.formats.single_file import read_file, write_file_alone
from lightning_fsdp2.checkpoint.state import number_parameters
from lightning_fsdp2.checkpoint.verify import verify_alone
from lightning_fsdp2.checkpoint.whole import read_descriptions
from lightning_fsdp2.weights.description import DESCRIPTIONS_KEY


def consolidate_checkpoint(
    path: str | Path,
    output: str | Path,
    *,
    with_optimizers: bool = True,
    verify: bool = True,
    trust_checkpoint: bool = False,
) -> None:
    """Convert a checkpoint directory to a single file in the format of Lightning's strategies that do not shard.

    Any strategy can resume from the file, and ``LightningModule.load_from_checkpoint`` reads it. The conversion runs in
    one process, which needs host memory for the whole checkpoint. In a process group, call this on one rank only.

    Args:
        path: Checkpoint directory of this package or of Lightning's ``ModelParallelStrategy``.
        output: File to write. An existing file is replaced once the new file is complete.
        with_optimizers: Whether to keep optimizer states.
        verify: Whether to compare the data with its checksums.
        trust_checkpoint: Whether the checkpoint may hold arbitrary objects, which can run code when they are loaded.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        ValueError: When the checkpoint is incomplete, is damaged, is already a single file, or holds arbitrary objects
            while ``trust_checkpoint`` is False.
    """
    found = resolve_checkpoint(path)
    if not found.is_dir():
        raise ValueError(f"{str(path)!r} is a single file already.")
    target = get_path(output)
    if target.is_dir():
        raise ValueError(f"output={str(output)!r} is a directory; give the path of a file.")
    if is_local(found) and is_local(target) and Path(target).resolve().is_relative_to(Path(found).resolve()):
        raise ValueError(f"output={str(output)!r} is inside the checkpoint {str(path)!r}; choose a path outside of it.")
    options = {"with_optimizers": with_optimizers, "verify": verify, "trust": trust_checkpoint}
    checkpoint = read_whole_checkpoint(path, **options)
    write_file_alone(target, {**checkpoint, DESCRIPTIONS_KEY: read_descriptions(found, trust=trust_checkpoint)})


def read_whole_checkpoint(
    path: str | Path, *, with_optimizers: bool = True, verify: bool = True, trust: bool = False
) -> dict[str, Any]:
    """Read a whole checkpoint in one process, and return the dict that Lightning would save in a single file.

    Args:
        path: Checkpoint directory or single file.
        with_optimizers: Whether to read optimizer states. They identify parameters by number, as in
            ``Optimizer.state_dict``.
        verify: Whether to compare the data with its checksums.
        trust: Whether the checkpoint may hold arbitrary objects, which can run code when they are loaded.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        ValueError: When the checkpoint is incomplete, is damaged, or holds arbitrary objects while ``trust`` is False.
    """
    found = find_checkpoint(path, trust=trust)
    if verify:
        verify_alone(found)
    if not found.is_dir():
        return read_file(found, with_optimizers=with_optimizers, trust=trust)
    checkpoint = read_directory(found, with_optimizers=with_optimizers, verify=verify, trust=trust)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [number_parameters(state) for state in checkpoint["optimizer_states"]]
    return checkpoint
