"""Callback that reports the outcome of a training run in plain words."""

import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fsdp2._secrets import hide_arguments
from lightning_fsdp2.callbacks.exponential_moving_average import use_averages
from lightning_fsdp2.callbacks.throughput import Throughput
from lightning_fsdp2.modules.sharder import find_optional_call_sharder
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.parallelizer import unshard_fsdp2_model

_INITIAL_LOSS = "initial_loss"


class RunReport(Callback):
    """Callback that writes a report at the end of a run: loss, speed, checkpoints, how to resume, and a text sample.

    The validation loss is reported before and after training. The loss before training comes from the Trainer's sanity
    check; set ``num_sanity_val_steps=-1`` to use the whole validation set. The speed is in tokens per second, as
    measured by the Trainer's ``Throughput``. The sample uses the averaged weights if the Trainer has an
    ``ExponentialMovingAverage``. Rank 0 writes the report with Lightning's Python logger, as an info message.

    Args:
        monitor: Name of the logged validation loss.
        prompt: Text that the model continues; None writes no sample. Writing a sample gathers the whole model on every
            rank, except under Megatron-FSDP, where each forward gathers one layer at a time. The sample needs a data
            module with a ``tokenizer`` and a LightningModule whose ``model`` can ``generate``.
        max_new_tokens: Largest number of tokens in the sample.
        temperature: Temperature of sampling; 0 takes the likeliest token each time.

    Raises:
        ValueError: At the start of training, when there is a ``prompt``, but pipeline parallelism divides the model.
    """

    def __init__(
        self,
        monitor: str = "val/loss",
        prompt: str | None = None,
        max_new_tokens: int = 200,
        temperature: float = 0.7,
    ) -> None:
        self.monitor = monitor
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._initial_loss: float | None = None
        self._final_loss: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {_INITIAL_LOSS: self._initial_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._initial_loss = state_dict[_INITIAL_LOSS]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._final_loss = None
        stages = get_optional_stages(pl_module)
        if self.prompt is not None and stages is not None:
            raise ValueError(
                f"RunReport(prompt={self.prompt!r}): with pp_size={stages.num_ranks}, the model cannot generate text,"
                " because each rank has the caches of its own layers only. Leave prompt out, and generate with the"
                " exported model (HuggingFaceExport)."
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = trainer.callback_metrics.get(self.monitor)
        if loss is None:
            return
        if trainer.sanity_checking:
            self._initial_loss = float(loss)
        else:
            self._final_loss = float(loss)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sample = None
        if self.prompt is not None:
            with use_averages(trainer):
                sample = self._write_sample(trainer, pl_module)
        self._report(trainer, sample)

    def _report(self, trainer: Trainer, sample: str | None) -> None:
        lines = [f"Training ended after {trainer.global_step:,} steps."]
        if self._final_loss is not None:
            before = "" if self._initial_loss is None else f" (before training: {self._initial_loss:.3f})"
            lines.append(f"Validation loss: {self._final_loss:.3f} nats per token{before}")
        for callback in cast(Any, trainer).callbacks:
            if isinstance(callback, Throughput) and callback.average is not None:
                ranks = f"{trainer.world_size} rank(s)"
                lines.append(f"Speed: {callback.average:,.0f} tokens per second on {ranks}, without validation")
        checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "")
        lines += _describe_checkpoints(trainer)
        if checkpoint:
            launcher = " (with the launcher of this run)" if trainer.num_nodes > 1 else ""
            how = _describe_resume(checkpoint, _get_raised_limits(trainer))
            lines.append(f"Continue from the last checkpoint{launcher}: {how}")
        if sample is not None:
            lines.append(f"A sample, continuing {self.prompt!r}:\n{sample}")
        rank_zero_info("\n".join(lines))

    def _write_sample(self, trainer: Any, pl_module: Any) -> str:
        """Generate a sample. All ranks must call this, because each holds only some weights; all get the same text."""
        tokenizer = trainer.datamodule.tokenizer
        prompt = torch.tensor([tokenizer(self.prompt)["input_ids"]], device=pl_module.device)
        was_training = pl_module.training
        pl_module.eval()
        devices = [] if pl_module.device.type == "cpu" else [pl_module.device]
        # gather all weights once if possible, because otherwise each forward gathers each layer again
        can_gather = find_optional_call_sharder(pl_module) is None
        gathered = unshard_fsdp2_model(pl_module) if can_gather else nullcontext()
        with torch.random.fork_rng(devices), torch.no_grad(), gathered:
            torch.manual_seed(0)
            output = pl_module.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.max_new_tokens,
                do_sample=self.temperature > 0,
                temperature=self.temperature or None,
                pad_token_id=tokenizer.eos_token_id,
                synced_gpus=trainer.world_size > 1,  # forwards communicate, so no rank may stop before the others
            )
        pl_module.train(was_training)
        return tokenizer.decode(output[0], skip_special_tokens=True)


def _describe_checkpoints(trainer: Any) -> list[str]:
    """Return one line of the report for each checkpoint that was kept, the last checkpoint first."""
    steps: dict[str, int] = getattr(trainer.strategy, "saved_steps", {})
    lines = []
    for callback in trainer.checkpoint_callbacks:
        kept = [getattr(callback, "last_model_path", ""), *getattr(callback, "best_k_models", ())]
        for path in filter(None, dict.fromkeys(kept)):
            step = steps.get(path)
            lines.append(f"Checkpoint: {path} " + ("(of an earlier run)" if step is None else f"(step {step:,})"))
    return lines


def _describe_resume(checkpoint: str, options: dict[str, int]) -> str:
    """Return the command that resumes from the last checkpoint, without secrets.

    If a user's own script started the run, return the Python call to put into that script instead.

    Args:
        checkpoint: Path of the checkpoint.
        options: Options of the Trainer that limit the run, such as ``max_steps``, with new, higher values.
    """
    program = Path(sys.argv[0])
    if program.name != "lightning-fsdp2" and program.parts[-2:] != ("lightning_fsdp2", "__main__.py"):
        changes = "".join(f", {name}={value}" for name, value in options.items())
        return f"Trainer(...{changes}).fit(..., ckpt_path={checkpoint!r})"
    replaced = {"--ckpt_path": "last", **{f"--trainer.{name}": str(value) for name, value in options.items()}}
    arguments, words = [], iter(sys.argv[1:])
    for word in words:
        if word in replaced:
            next(words, None)  # skip the option's value
        elif word.partition("=")[0] not in replaced:
            arguments.append(word)
    return shlex.join(
        [*_get_launcher(), *hide_arguments(arguments), *(f"{name}={value}" for name, value in replaced.items())]
    )


def _get_launcher() -> list[str]:
    # with several nodes, leave out torchrun, since its rendezvous address is not known here
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["GROUP_WORLD_SIZE"] != "1":
        return ["lightning-fsdp2"]
    return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "lightning_fsdp2"]


def _get_raised_limits(trainer: Trainer) -> dict[str, int]:
    """Return the limit to use when resuming: ``{"max_steps": value}`` or ``{"max_epochs": value}``.

    The name is that of the limit that ended the run, and the value is twice the old one. The dict is empty if a time
    limit or a metric ended the run.
    """
    max_epochs = trainer.max_epochs or -1
    if 0 < trainer.max_steps <= trainer.global_step:
        return {"max_steps": 2 * trainer.max_steps}
    if 0 < max_epochs <= trainer.current_epoch:
        return {"max_epochs": 2 * max_epochs}
    return {}
