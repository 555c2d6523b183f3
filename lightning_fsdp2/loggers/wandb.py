"""Logger for Weights & Biases. A resumed job continues its W&B run, and failures of W&B never end training."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch import loggers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

from lightning_fsdp2.checkpoint.files.drafts import SUMMARY_FILE, get_path, is_local
from lightning_fsdp2.compat.lightning import get_last_saved
from lightning_fsdp2.loggers.axes import TOTAL_TOKENS

if TYPE_CHECKING:
    from wandb import Artifact, Run

_STEP = "trainer/global_step"

_FLUSH_SECONDS = 1.0
"""Seconds between two writes to disk by W&B's service. A killed job loses rows not yet written.

W&B's default is 15 seconds.
"""

_ROWS_BEHIND_A_SAVE = 10
"""Size of the gap that a resumed run leaves in the row numbers after those of its checkpoint.

The gap is reserved for metrics that a step logs after its checkpoint is saved. Unused row numbers are harmless.
"""

CheckpointLogging = Literal["reference", "upload"]


class MissingKeyError(ValueError):
    """Error for an online run that has no W&B API key."""


class WandbLogger(loggers.WandbLogger):
    """Logger like Lightning's ``WandbLogger``, for jobs on many ranks that may be killed and resumed.

    Under the strategies of this package, a job that resumes from a checkpoint (``ckpt_path``) continues the W&B run
    whose id is in the checkpoint. A job without a checkpoint starts a new run. Only rank 0 has a run. On all other
    ranks, and on rank 0 until the checkpoint has been read, ``experiment`` is a stand-in that accepts every call.

    Failures of W&B never end training. If a run cannot be started online, it is recorded offline. If W&B fails later, a
    warning says so once, and the values that could not be logged are dropped. Only a missing API key for an online run
    is an error, which is raised before the first step. ``WANDB_MODE=disabled`` switches W&B off, and
    ``WANDB_MODE=offline`` has the same effect as ``offline=True``.

    Args:
        project: Name of the project. None for ``WANDB_PROJECT`` or ``"lightning_logs"``.
        name: Name of the run on the W&B website. None lets W&B choose a name.
        save_dir: Directory in which W&B creates its directory ``wandb``.
        entity: User or team that owns the run. None for the account's default.
        group: Name of a group of runs that belong together.
        job_type: Kind of job, such as ``"pretrain"``.
        tags: Words by which the run can be found.
        notes: Description of the run.
        id: Id of the run. None continues the run of the checkpoint, or generates a new id if there is no checkpoint.
        offline: Whether to record only to ``save_dir``. The command ``wandb sync`` uploads the run later.
        checkpoints: What to do with the checkpoints of ``ModelCheckpoint`` once they are complete. ``"reference"`` logs
            an artifact with the paths of their files. ``"upload"`` uploads the files as an artifact, in the background.
            None logs no checkpoints.
        prefix: Prefix of the names of metrics.

    Raises:
        ValueError: When ``checkpoints`` is unknown.
        MissingKeyError: Before the first step, on every rank, when there is no API key.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        save_dir: str = ".",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        id: str | None = None,
        offline: bool = False,
        checkpoints: CheckpointLogging | None = "reference",
        prefix: str = "",
    ) -> None:
        if checkpoints is not None and checkpoints not in get_args(CheckpointLogging):
            raise ValueError(
                f"WandbLogger(checkpoints={checkpoints!r}) is unknown; use 'reference' to log where checkpoints are,"
                " 'upload' to upload them, or None."
            )
        details: dict[str, Any] = {"entity": entity, "group": group, "job_type": job_type, "tags": tags, "notes": notes}
        super().__init__(name=name, save_dir=save_dir, project=project, id=id, prefix=prefix, **details)
        self._wandb_init.pop("anonymous", None)  # W&B has dropped this option
        self.offline = offline
        self.checkpoints = checkpoints
        self._is_id_given = id is not None
        self._is_held = False
        self._first_row = 0
        self._when_complete: Callable[[Callable[[], None]], None] = lambda action: action()
        self._others = ""
        self._said: set[str] = set()
        self._uploader: ThreadPoolExecutor | None = None
        self._uploads: list[Future[None]] = []

    # ------------------------------------------------------------------ the run

    @property
    @override
    def experiment(self) -> "Run":
        """W&B's run. On ranks other than 0, and until :meth:`release`, a stand-in that does nothing."""
        if rank_zero_only.rank > 0 or (self._is_held and self._experiment is None):  # type: ignore[attr-defined]
            return _StandIn()
        if self._experiment is None:
            self._experiment = self._start()
        return self._experiment

    def get_optional_problem(self) -> str | None:
        """Return an error message if the run needs an API key and there is none, else None.

        Without this check, W&B would prompt for the key, and a job would wait forever.
        """
        import wandb

        try:
            from requests.utils import get_netrc_auth  # as W&B itself does

            settings = wandb.setup().settings
            if self._experiment is not None or wandb.run is not None or self._get_mode() in ("offline", "disabled"):
                return None
            has_token = getattr(settings, "identity_token_file", None)
            if settings.api_key or has_token or get_netrc_auth(settings.base_url):
                return None
        except Exception:
            return None  # ignore the error, because starting the run will report it
        return (
            f"WandbLogger(offline=False) has no API key for {settings.base_url}: set WANDB_API_KEY, run `wandb login`"
            " once, or use offline: true (or WANDB_MODE=offline) and `wandb sync` later."
        )

    def hold(self, when_complete: Callable[[Callable[[], None]], None], others: str) -> None:
        """Postpone the start of the run until :meth:`release`.

        The id of the run to continue is in the checkpoint, but the Trainer uses ``experiment`` before it reads the
        checkpoint.

        Args:
            when_complete: Function that calls its argument once the most recently saved checkpoint is complete.
            others: Names of the other loggers, as text for a warning.
        """
        self._is_held, self._when_complete, self._others = True, when_complete, others
        if self.version is None:
            # set an id now, since ModelCheckpoint names its directory after the id
            self._set_id(secrets.token_hex(4))

    def release(self) -> None:
        """Allow the run to start, after :meth:`hold` has postponed the start."""
        self._is_held = False

    @rank_zero_only
    def continue_run(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint, unless the logger was created with an ``id``.

        Args:
            state: State in the checkpoint, as returned by :meth:`get_state`.
        """
        if self._is_id_given or state["id"] == self.version:
            return
        if self._experiment is None:
            self._set_id(state["id"])
            self._first_row = state["row"]
            return
        rank_zero_warn(
            f"W&B: run {self.version} was started before the checkpoint of run {state['id']} was read, so it does not"
            " continue that run. Use `logger.experiment` only from `on_fit_start` on, or give WandbLogger(id=...)."
        )

    def get_state(self) -> dict[str, Any]:
        """Return the run's state for a checkpoint: its id, and the number of the next row of metrics (W&B's step)."""
        return {"id": self.version, "row": getattr(self._experiment, "step", 0) + _ROWS_BEHIND_A_SAVE}

    def _set_id(self, id: str) -> None:
        self._id = self._wandb_init["id"] = id

    def _get_mode(self) -> Any:
        import wandb

        mode = wandb.setup().settings.mode
        return "offline" if mode == "dryrun" or (self.offline and mode != "disabled") else mode

    def _start(self) -> Any:
        import wandb

        if wandb.run is not None:
            return super().experiment  # Lightning then uses the existing run and issues a warning
        try:
            return self._init(self._get_mode())
        except Exception as error:
            return self._start_without(error)

    def _init(self, mode: Any) -> Any:
        import wandb

        if self.save_dir and mode != "disabled":
            # create the directory, because W&B would write to a different directory if it did not exist
            os.makedirs(self.save_dir, exist_ok=True)
        # write logged rows to disk often, so that a killed job does not lose rows from before its last checkpoint
        has_interval = "x_transaction_log_flush_interval" in wandb.Settings.model_fields  # wandb 0.31
        settings = {"x_transaction_log_flush_interval": _FLUSH_SECONDS} if has_interval else {}
        run = wandb.init(**self._wandb_init, mode=mode, settings=settings)
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        run.define_metric(f"{self._prefix}{self.LOGGER_JOIN_CHAR}{TOTAL_TOKENS}" if self._prefix else TOTAL_TOKENS)
        # an offline run does not know how many rows were logged before it resumed, so set the number of its first row
        if run.step < self._first_row:
            run.log({}, step=self._first_row)
        run.__dict__["log"] = partial(self._try, "logging metrics", run.log)  # users call `log` too
        return run

    def _start_without(self, error: Exception) -> Any:
        """Record the run offline after it failed to start online. If this fails too, continue without W&B."""
        import wandb

        try:
            # stop W&B's background service, which would otherwise keep retrying and reject the run's id
            wandb.teardown()
            run = self._init("offline")
        except Exception:
            return self._give_up("starting the run", error)
        rank_zero_warn(
            f"W&B: the run could not be started ({error!r}) and is recorded offline; upload it with `wandb sync"
            f" {os.path.dirname(run.dir)}`."
        )
        return run

    # ------------------------------------------------------------------ what is logged

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._try("logging metrics", super().log_metrics, metrics, step)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self._try("logging hyper-parameters", super().log_hyperparams, params)

    @override
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        if self.checkpoints is None:
            return
        path, step = get_last_saved(checkpoint_callback)
        aliases = ["latest", f"step-{step}"]
        metadata: dict[str, Any] = {"step": step, "path": path}
        # A ModelCheckpoint may monitor the step or epoch in order to keep the newest checkpoints. It then considers
        # every new checkpoint the best, so do not add the alias "best".
        monitor, score = checkpoint_callback.monitor, checkpoint_callback.current_score
        if monitor not in (None, "step", "epoch") and score is not None:
            metadata[monitor] = float(score)
            aliases += ["best"] if checkpoint_callback.best_model_path == path else []
        self._when_complete(partial(self._log_checkpoint, path, aliases, metadata))

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        for upload in self._uploads if status == "success" else ():
            upload.result()
        self._uploads.clear()

    def _log_checkpoint(self, path: str, aliases: list[str], metadata: dict[str, Any]) -> None:
        if self.checkpoints == "reference":
            self._log_artifact(_add_references, path, aliases, metadata)
            return
        # upload in the background, since W&B reads all files to compute checksums
        self._uploader = self._uploader or ThreadPoolExecutor(1, thread_name_prefix="wandb")
        self._uploads.append(self._uploader.submit(self._log_artifact, _add_files, path, aliases, metadata))

    def _log_artifact(
        self, add: "Callable[[Artifact, str], None]", path: str, aliases: list[str], metadata: dict[str, Any]
    ) -> None:
        try:
            import wandb

            artifact = wandb.Artifact(f"model-{self.version}", "model", metadata=metadata)
            add(artifact, path)
            self.experiment.log_artifact(artifact, aliases=aliases)
        except Exception as error:
            self._say_once(f"W&B: the checkpoint {path!r} could not be logged ({error!r}).", "checkpoints")

    # ------------------------------------------------------------------ what fails

    def _try(self, what: str, action: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            action(*args, **kwargs)
        except (TypeError, ValueError) as error:
            self._say_once(f"W&B: {what} failed ({error!r}); the values are not logged.", what)
        except Exception as error:
            self._experiment = self._give_up(what, error)

    def _give_up(self, what: str, error: Exception) -> Any:
        import wandb

        others = f"metrics still go to {self._others}" if self._others else "no other logger keeps its metrics"
        self._say_once(f"W&B: {what} failed ({error!r}). Training goes on without W&B; {others}.")
        # after a lost connection to its background service, W&B would raise another error at exit
        if isinstance(error, ConnectionError):
            with suppress(Exception):
                wandb.teardown()
        return wandb.init(id=self._id, mode="disabled")

    def _say_once(self, message: str, topic: str = "") -> None:
        if (topic or message) not in self._said:
            self._said.add(topic or message)
            rank_zero_warn(message)


class _StandIn:
    """Stand-in for W&B's run. It accepts every call and does nothing."""

    def __getattr__(self, name: str) -> "_StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_StandIn":
        return self

    def __getitem__(self, key: Any) -> "_StandIn":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _add_references(artifact: "Artifact", path: str) -> None:
    """Add references to a checkpoint's files to ``artifact``. W&B reads only the small file that has all checksums."""
    found = get_path(path)
    if not is_local(found):
        artifact.add_reference(path, checksum=False)
        return
    root = found.absolute()
    for file in sorted(root.rglob("*")) if root.is_dir() else (root,):
        name = str(file.relative_to(root)) if file != root else file.name
        artifact.add_reference(file.as_uri(), name=name, checksum=name == SUMMARY_FILE)


def _add_files(artifact: "Artifact", path: str) -> None:
    found = get_path(path)
    # by default, W&B would copy all files twice before the upload: once to its cache, once to protect against changes
    add = artifact.add_dir if found.is_dir() else artifact.add_file
    add(str(found), policy="immutable", skip_cache=True)
