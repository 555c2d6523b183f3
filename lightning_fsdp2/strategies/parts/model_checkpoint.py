"""Lightning's ``ModelCheckpoint`` on a mesh: it saves on all ranks together, after optimizer steps, and at the end."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.compat.lightning import get_last_saved, is_accumulating, is_last_epoch, save_last

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def take_over(
    callback: ModelCheckpoint,
    trainer: "Trainer",
    *,
    link: Callable[..., None],
    exists: Callable[..., bool],
    save_at_end: bool,
) -> None:
    """Make ``callback`` save on all ranks together, only after optimizer steps, and also at the end of a fit.

    The Trainer's ledger puts the methods back.

    Args:
        callback: Callback whose methods are replaced.
        trainer: Trainer of the callback.
        link: Method for ``_link_checkpoint``.
        exists: Method for ``file_exists``.
        save_at_end: Whether to save the last steps of a fit.
    """
    replace = partial(get_ledger(trainer).replace, callback)
    replace("_link_checkpoint", link, reason="the old link is removed before the new one has a target")
    replace("file_exists", exists, reason="what is being written is not seen, and its name chosen again")
    if type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end:
        save = partial(_save_after_steps, callback)
        replace("on_train_batch_end", save, reason="it saves in micro-batches that no optimizer step follows")
    fast_dev_run = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
    if save_at_end and not fast_dev_run:
        save = partial(_save_last_step, callback, callback.on_train_epoch_end)
        replace("on_train_epoch_end", save, reason="the last steps of a fit may be in no checkpoint")
    if fast_dev_run and type(callback).on_train_end is ModelCheckpoint.on_train_end:
        reason = "it saves under fast_dev_run, maybe in place of the last checkpoint of a long run"
        replace("on_train_end", lambda *args: None, reason=reason)


def _save_after_steps(callback: ModelCheckpoint, trainer: "Trainer", *args: Any) -> None:
    """Call Lightning's hook, except after micro-batches that no optimizer step followed.

    Lightning's hook only checks the number of steps. That number may still call for a save in the micro-batches after
    the step: in a resumed run, or after the end of an epoch, where the hook postpones a save until the next validation.
    """
    if not is_accumulating(trainer):
        ModelCheckpoint.on_train_batch_end(callback, trainer, *args)


def _save_last_step(
    callback: ModelCheckpoint, own: Callable[..., None], trainer: "Trainer", module: "LightningModule"
) -> None:
    """Call Lightning's hook. If the fit ends now, also save if the last steps are not in any checkpoint yet.

    Saving in `on_train_end` would be too late: the schedulers would already be updated for the epoch, and a run that
    resumes from the checkpoint would update them again.
    """
    own(trainer, module)
    _, step = get_last_saved(callback)
    if callback.save_last and step != trainer.global_step and is_last_epoch(trainer):
        save_last(callback, trainer, save_weights_only=callback.save_weights_only)
