"""Lightning ``CheckpointIO`` plugin that writes, reads and removes the checkpoints of runs on a device mesh."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_fsdp2.checkpoint.asynchronous import BackgroundWriter
from lightning_fsdp2.checkpoint.files.drafts import (
    AnyPath,
    clean_folder,
    get_path,
    is_local,
    link_checkpoint,
    remove_checkpoint,
)
from lightning_fsdp2.checkpoint.formats.directory import take_snapshot, write_snapshot
from lightning_fsdp2.checkpoint.formats.single_file import gather_whole, write_file
from lightning_fsdp2.checkpoint.loading import read_checkpoint
from lightning_fsdp2.config import CheckpointConfig
from lightning_fsdp2.ranks.coordination import get_rank, on_first_rank
from lightning_fsdp2.weights.description import DESCRIPTIONS_KEY


class MeshCheckpointIO(CheckpointIO):
    """Checkpoint plugin that writes and reads the checkpoints of a run on a device mesh.

    The options are in :class:`~lightning_fsdp2.CheckpointConfig`. Every rank must call every method. Users can pass an
    instance of a subclass to ``Trainer(plugins=[...])``, and the strategy then calls :meth:`connect` on it.
    """

    config: CheckpointConfig
    _group: dist.ProcessGroup | None = None
    _thread_group: dist.ProcessGroup | None = None
    _pipeline: dist.ProcessGroup | None = None
    _writer: BackgroundWriter | None = None

    def __init__(self) -> None:
        # Lightning resumes SLURM jobs from checkpoints with these names
        self._link_names = [re.compile(r"hpc_ckpt_\d+\.ckpt")]
        self._linked: list[AnyPath] = []
        self._pending: dict[AnyPath, bool] = {}

    def connect(
        self,
        config: CheckpointConfig,
        device: torch.device,
        group: dist.ProcessGroup,
        thread_group: dist.ProcessGroup | None = None,
        pipeline: dist.ProcessGroup | None = None,
    ) -> None:
        """Set the plugin's config, device and process groups.

        Args:
            config: Options for writing and reading checkpoints.
            device: This rank's device.
            group: CPU group of all ranks for the main thread.
            thread_group: CPU group of all ranks for the background thread of ``async_save``.
            pipeline: CPU group of the ranks of the pipeline for the main thread; None without a pipeline.
        """
        if not config.async_save:
            self._writer = None
        elif self._writer is None or group is not self._group:
            self._writer = BackgroundWriter(device, group, thread_group)
        self.config = config
        self._group = group
        self._thread_group = thread_group
        self._pipeline = pipeline

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
        *,
        summary: dict[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Write a checkpoint. With ``async_save``, write it in the background unless ``wait`` is set.

        Args:
            checkpoint: The Trainer's checkpoint dict, with sharded tensors.
            path: Path in the local file system, or in an object store that fsspec supports. An existing checkpoint is
                replaced once the new one is complete.
            storage_options: Must be None.
            summary: Entries for ``meta.json``.
            wait: Whether to return only after the checkpoint is written.

        Raises:
            TypeError: When ``storage_options`` is given.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r}: this checkpoint plugin does not use the argument; leave it out,"
                " and name the object store in the path, such as 's3://bucket/run/last.ckpt'."
            )
        self.wait()
        target = get_path(path)
        group = self._thread_group if self._writer is not None else self._group
        checkpoint, summary = dict(checkpoint), summary or {}
        trust = self._get_trust(None)
        self._linked = [other for other in self._linked if other != target]
        self._pending = {target: True}
        if self.config.format == "full":
            checkpoint[DESCRIPTIONS_KEY] = summary.get(DESCRIPTIONS_KEY, [])
            copies = self._writer is not None
            whole = gather_whole(checkpoint, self._group, copies=copies, trust=trust, pipeline=self._pipeline)
            self._run({}, lambda _: write_file(target, whole, group))
        else:
            tensors = {"state_dict": checkpoint.pop("state_dict")}
            # leave an empty list in `checkpoint`, because Lightning needs the key "optimizer_states"
            if states := checkpoint.get("optimizer_states"):
                tensors |= {f"optimizer_{index}": state for index, state in enumerate(states)}
                del checkpoint["optimizer_states"]
            snapshot = take_snapshot(tensors, checkpoint, summary, self._group, pipeline=self._pipeline, trust=trust)
            # the closure below must not keep the original tensors alive after they have been copied
            bare = snapshot.with_tensors({})
            self._run(snapshot.tensors, lambda copies: write_snapshot(target, bare.with_tensors(copies), group))
        if wait:
            self.wait()

    @override
    def load_checkpoint(  # type: ignore[override]
        self,
        path: str | Path,
        model: nn.Module,
        *,
        with_optimizers: bool = True,
        in_place: bool = False,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint directory or file; see :func:`~lightning_fsdp2.checkpoint.loading.read_checkpoint`.

        Args:
            path: Path of the checkpoint.
            model: Module whose parameters determine how the loaded tensors are sharded.
            with_optimizers: Whether to read optimizer states.
            in_place: Whether to read weights directly into the model's tensors.
            weights_only: Value that overrides the config's ``weights_only``. None keeps the config's value.
        """
        self.wait()
        return read_checkpoint(
            path,
            model,
            with_optimizers=with_optimizers,
            in_place=in_place,
            verify=self.config.verify,
            trust=self._get_trust(weights_only),
            group=self._group,
        )

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint now or, if a save is in progress, once the save has succeeded.

        A checkpoint is kept as long as a link in its folder points to it.
        """
        self._pending[get_path(path)] = False
        if get_rank() == 0:
            self.then(lambda: self._remove(get_path(path)))

    def exists(self, path: str | Path) -> bool:
        """Return whether ``path`` will exist once the save in progress is complete."""
        target = get_path(path)
        is_writing = self._writer is not None and self._writer.is_writing
        return self._pending[target] if is_writing and target in self._pending else target.exists()

    def link(self, target: str | Path, link: str | Path) -> None:
        """Make ``link`` point to the checkpoint ``target`` once ``target`` is complete. Every rank must call this."""
        if os.path.abspath(target) == os.path.abspath(link):
            return
        self._pending[Path(link)] = True
        if self._writer is None or not self._writer.is_writing:
            on_first_rank(lambda: self._link(Path(target), Path(link)), self._group)
        elif get_rank() == 0:
            self._writer.then(lambda: self._link(Path(target), Path(link)))

    def clean(self, folder: str | Path, last: str = ModelCheckpoint.CHECKPOINT_NAME_LAST) -> None:
        """Remove the leftovers of interrupted saves from ``folder``, and cancel postponed removals of checkpoints.

        Args:
            folder: Folder of a ``ModelCheckpoint`` callback.
            last: Name that the callback gives to its last checkpoint. It may contain placeholders, as in
                ``"{epoch}-last"``.
        """
        self._linked.clear()
        name = re.sub(r"\\\{.*?\\\}", ".*", re.escape(last))
        self._link_names.append(re.compile(rf"{name}(-v\d+)?{re.escape(ModelCheckpoint.FILE_EXTENSION)}"))
        on_first_rank(lambda: clean_folder(get_path(folder)), self._group)

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` now or, if a save is in progress, once the save has succeeded."""
        if self._writer is None:
            action()
        else:
            self._writer.then(action)

    def wait_for_copies(self) -> None:
        """Wait until a background save has copied all tensors, so that an optimizer step may change them."""
        if self._writer is not None:
            self._writer.wait_for_copies()

    def poll(self) -> None:
        """Check whether a background save has ended. If so, run the actions that waited for it, or raise its error."""
        if self._writer is not None:
            self._writer.poll()

    def wait(self) -> None:
        """Wait for the background save in progress, if there is one."""
        if self._writer is not None:
            self._writer.wait()

    def settle(self) -> None:
        """Wait for this rank's background save, without communication: after an error, other ranks may be gone."""
        if self._writer is not None:
            self._writer.settle()

    @override
    def teardown(self) -> None:
        self.wait()
        self._remove_linked()

    def _run(self, tensors: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        if self._writer is None:
            write(tensors)
        else:
            self._writer.start(tensors, write)

    def _get_trust(self, weights_only: bool | None) -> bool:
        """Return whether to unpickle arbitrary objects, according to ``weights_only`` or, if it is None, the config."""
        choice = weights_only if weights_only is not None else self.config.weights_only
        return self.config.trust_checkpoint if choice is None else not choice

    def _remove(self, path: AnyPath) -> None:
        links = _get_links(path)
        foreign = [link.name for link in links if not self._is_lightnings(link)]
        if foreign:
            rank_zero_warn(f"The checkpoint {path} is not removed, because {', '.join(foreign)} points to it.")
        elif links:
            # ModelCheckpoint removes the old checkpoint before it moves the link `last.ckpt` to the new one.
            # If the process were killed in between, the link would point to nothing.
            self._linked.append(path)
        else:
            _remove(path)

    def _link(self, target: Path, link: Path) -> None:
        link_checkpoint(target, link)
        for path in self._linked:
            # Also move an earlier run's link `last.ckpt`, because Lightning moves only the links of this run.
            for other in filter(self._is_lightnings, _get_links(path)):
                link_checkpoint(target, other)
        self._remove_linked()

    def _is_lightnings(self, link: Path) -> bool:
        """Return whether ``link`` is named like the links that Lightning makes and moves to newer checkpoints."""
        return any(name.fullmatch(link.name) for name in self._link_names)

    def _remove_linked(self) -> None:
        for path in self._linked:
            if not _get_links(path):
                _remove(path)
        self._linked.clear()


def _remove(path: AnyPath) -> None:
    try:
        remove_checkpoint(path)
    except OSError as error:  # training can continue, since no data is lost
        rank_zero_warn(f"The checkpoint {str(path)!r} could not be removed: {error}")


def _get_links(path: AnyPath) -> list[Path]:
    """Return the symbolic links that point to a checkpoint from within the same folder."""
    if not is_local(path) or not path.exists():
        return []
    links = [entry for entry in path.parent.iterdir() if entry.is_symlink() and entry.exists()]
    return [link for link in links if link.samefile(path)]
