"""Callback that exports the trained model in Hugging Face's format."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fsdp2.callbacks.exponential_moving_average import use_averages
from lightning_fsdp2.export.hugging_face import (
    ExportDtype,
    check_exportable,
    check_free,
    export_hf,
    start_draft,
)
from lightning_fsdp2.ranks.coordination import on_first_rank


class HuggingFaceExport(Callback):
    """Callback that exports the model in Hugging Face's format at the end of ``fit``.

    It calls :func:`~lightning_fsdp2.export_hf`, so each rank writes its share of the files. If the Trainer has an
    ``ExponentialMovingAverage``, the averages are exported.

    Nothing is written with ``fast_dev_run``, or when training ends with an error. After an error, export a checkpoint
    instead. A job that resumes another job (``ckpt_path``) needs ``overwrite=True`` or a directory of its own, because
    the first job has already exported its model.

    Args:
        dirpath: Directory to write to. None for ``huggingface`` in the directory of the logger or, without one, the
            Trainer's ``default_root_dir``.
        model: Path of the model in the LightningModule, such as ``"student"``, if the LightningModule holds several.
        tokenizer: Directory or hub id of a tokenizer to save with the model. None for the data module's ``tokenizer``
            if that is a transformers tokenizer, else the tokenizer of the pretrained model.
        dtype: Dtype of the written weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``. None keeps the dtype of
            the trained weights, which is float32 under ``precision="bf16-mixed"``.
        max_shard_size: Largest size of a file, in bytes or as a string such as ``"5GB"``.
        merge: Whether to merge a LoRA adapter into the weights of its base model. If False, the adapter alone is
            written, in peft's format.
        overwrite: Whether to replace the contents of the directory, once the new files are complete.

    Raises:
        ValueError: When ``dirpath`` is remote. Before training, when ``dirpath`` is the working directory or contains
            it.
        FileExistsError: Before training, when the directory is not empty and ``overwrite`` is False.
        TypeError: Before training, when the LightningModule holds no Hugging Face model, or ``tokenizer`` is from
            another library.
        ValueError: Before training, when the LightningModule holds several models and ``model`` names none of them,
            when the model has adapters other than LoRA, when ``merge`` is True but there is no adapter, when ``dtype``
            or ``max_shard_size`` is invalid, or when the directory ``tokenizer`` holds no tokenizer.
        OSError: Before training, when ``tokenizer`` cannot be loaded or ``dirpath`` cannot be created.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        model: str | None = None,
        tokenizer: str | None = None,
        dtype: ExportDtype | None = None,
        max_shard_size: int | str = "5GB",
        merge: bool = False,
        overwrite: bool = False,
    ) -> None:
        if "://" in str(dirpath):
            raise ValueError(
                f"HuggingFaceExport(dirpath={str(dirpath)!r}) is not local: export to a local directory and upload it."
            )
        self.dirpath = dirpath
        self.model = model
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.max_shard_size = max_shard_size
        self.merge = merge
        self.overwrite = overwrite
        self._out: Path | None = None
        self._options: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # check the directory before training, so that a long run does not end with an error
        if stage == "fit":
            # all ranks must read `log_dir`, because Lightning broadcasts it from rank 0
            root = trainer.log_dir or trainer.default_root_dir
            out = Path(self.dirpath or Path(root) / "huggingface").resolve()
            on_first_rank(lambda: check_free(out, self.overwrite, name="HuggingFaceExport: dirpath"))
            if not _is_dry_run(trainer):
                on_first_rank(lambda: start_draft(out).discard())
            self._out = out

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._options = {
            "model": self.model,
            "tokenizer": self.tokenizer or _get_optional_tokenizer(trainer),
            "dtype": self.dtype,
            "max_shard_size": self.max_shard_size,
            "merge": self.merge,
        }
        check_exportable(pl_module, **self._options)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_dry_run(trainer):
            return
        with use_averages(trainer):
            export_hf(pl_module, self._out, overwrite=self.overwrite, **self._options)
        rank_zero_info(f"Exported the model to {self._out}.")


def _is_dry_run(trainer: Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))


def _get_optional_tokenizer(trainer: Trainer) -> Any:
    """Return the data module's tokenizer if transformers can save it. Otherwise, warn and return None."""
    tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
    if tokenizer is None or isinstance(tokenizer, str | Path) or hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    rank_zero_warn(
        f"HuggingFaceExport: the data module's tokenizer, a {type(tokenizer).__name__}, is not a transformers tokenizer"
        " and is not exported; set HuggingFaceExport(tokenizer=...) to save one with the model."
    )
    return None
