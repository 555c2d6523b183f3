"""Changes that make Lightning's ``ModelCheckpoint`` callback work on a device mesh."""

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
    """Replace methods of ``callback``, so that it saves on all ranks, after optimizer steps, and at the end of a fit.

    The original methods are restored when the stage of the Trainer ends.

    Args:
        callback: Callback whose methods are replaced.
        trainer: Trainer of the callback.
        link: Replacement for the method ``_link_checkpoint``.
        exists: Replacement for the method ``file_exists``.
        save_at_end: Whether to save a checkpoint at the end of a fit if no checkpoint contains the last steps yet.
    """
    replace = partial(get_ledger(trainer).replace, callback)
    replace("_link_checkpoint", link, reason="the old link is removed before the new one has a target")
    replace(
        "file_exists",
        exists,
        reason="it does not see a file that is still being written, and its name would be used again",
    )
    if type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end:
        save = partial(_save_after_steps, callback)
        replace("on_train_batch_end", save, reason="it saves after micro-batches without an optimizer step")
    fast_dev_run = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
    if save_at_end and not fast_dev_run:
        save = partial(_save_last_step, callback, callback.on_train_epoch_end)
        replace("on_train_epoch_end", save, reason="the last steps of a fit may be in no checkpoint")
    if fast_dev_run and type(callback).on_train_end is ModelCheckpoint.on_train_end:
        reason = "it saves under fast_dev_run, and may replace the last checkpoint of a long run"
        replace("on_train_end", lambda *args: None, reason=reason)


def _save_after_steps(callback: ModelCheckpoint, trainer: "Trainer", *args: Any) -> None:
    """Call Lightning's hook for the end of a batch, but only if the batch ended with an optimizer step.

    Lightning's hook only looks at the number of optimizer steps, so it may save again in the micro-batches after a
    step. It does so in resumed runs, and after an epoch whose save was postponed until the next validation.
    """
    if not is_accumulating(trainer):
        ModelCheckpoint.on_train_batch_end(callback, trainer, *args)


def _save_last_step(
    callback: ModelCheckpoint, own: Callable[..., None], trainer: "Trainer", module: "LightningModule"
) -> None:
    """Call Lightning's hook for the end of an epoch. In the last epoch, also save the last steps if they are unsaved.

    Saving in ``on_train_end`` would be too late: the epoch's scheduler updates would be part of the checkpoint, and a
    resumed run would repeat them.
    """
    own(trainer, module)
    _, step = get_last_saved(callback)
    if callback.save_last and step != trainer.global_step and is_last_epoch(trainer):
        save_last(callback, trainer, save_weights_only=callback.save_weights_only)
