"""Exports the trained model in the format of Hugging Face."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fsdp2.checkpoint.coordination import on_first_rank
from lightning_fsdp2.checkpoint.hugging_face import ExportDtype, check_exportable, check_free, export_hf


class HuggingFaceExport(Callback):
    """Writes the model at the end of ``fit`` with :func:`~lightning_fsdp2.export_hf`: all ranks, from their shards.

    Nothing is written with ``fast_dev_run``, or when training ends with an error: export a checkpoint then.

    Args:
        dirpath: The directory to write. None for ``huggingface`` in the directory of the logger or, without one, the
            Trainer's ``default_root_dir``.
        model: Path of the model in the LightningModule, such as ``"student"``, where it holds several.
        tokenizer: Directory or hub id of a tokenizer to save with the model. None for the data module's ``tokenizer``,
            or that of the pretrained model.
        dtype: Of the weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``. None keeps the trained ones', which are
            float32 under ``precision="bf16-mixed"``.
        max_shard_size: Of a file, in bytes or such as ``"5GB"``.
        overwrite: Whether to replace what is in the directory, once the model is written.

    Raises:
        ValueError: When ``dirpath`` is remote.
        FileExistsError: Before training, when the directory has something in it, and not ``overwrite``.
        TypeError: Before training, when the LightningModule holds no Hugging Face model.
        ValueError: Before training, when it holds several and ``model`` names none of them, or one with adapters, when
            ``dtype`` or ``max_shard_size`` is none, or the directory ``tokenizer`` holds no tokenizer.
        OSError: Before training, when ``tokenizer`` cannot be loaded.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        model: str | None = None,
        tokenizer: str | None = None,
        dtype: ExportDtype | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> None:
        if "://" in str(dirpath):
            raise ValueError(
                f"HuggingFaceExport(dirpath={str(dirpath)!r}): export to a local directory and upload that."
            )
        self.dirpath = dirpath
        self.model = model
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.max_shard_size = max_shard_size
        self.overwrite = overwrite
        self._out: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # nobody wants to learn of it when the training is over
        if stage == "fit":
            out = Path(self.dirpath or Path(trainer.log_dir) / "huggingface")  # `log_dir` is rank 0's on all ranks
            on_first_rank(lambda: check_free(out, self.overwrite))
            self._out = out

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_exportable(pl_module, **self._get_options(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(trainer, "fast_dev_run", False):
            return
        export_hf(pl_module, self._out, overwrite=self.overwrite, **self._get_options(trainer))
        rank_zero_info(f"Exported the model to {self._out}.")

    def _get_options(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "model": self.model,
            "tokenizer": self.tokenizer or getattr(getattr(trainer, "datamodule", None), "tokenizer", None),
            "dtype": self.dtype,
            "max_shard_size": self.max_shard_size,
        }
