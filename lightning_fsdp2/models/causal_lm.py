"""LightningModule that trains Hugging Face causal language models. It can be configured in YAML alone."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp2.callbacks.logging_steps import is_logging_step
from lightning_fsdp2.checkpoint.stages import gather_over_stages
from lightning_fsdp2.compat.torch import has_fused_optimizers, leave_unscaling_to_scaler
from lightning_fsdp2.compat.transformers import assume_unpacked_sequences, get_attention
from lightning_fsdp2.labels import IGNORE_INDEX, shift_left
from lightning_fsdp2.models.hugging_face import (
    build_config,
    build_model,
    build_pretrained_model,
    find_pretrained,
    get_optional_folder,
)
from lightning_fsdp2.models.language_checks import (
    check_causal,
    check_length,
    check_names,
    refuse_optimizer_of_matrices,
    warn_of_unknown_monitors,
)
from lightning_fsdp2.models.lora import add_lora, build_lora_config, check_base, to_mapping
from lightning_fsdp2.models.router_loss import RouterLoss, check_coefficient, find_router_loss, record_routing
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.modules.structure import get_class_name, get_hf_models
from lightning_fsdp2.parallel.context.apply import get_optional_sharding, shard_sequence, sum_over_positions
from lightning_fsdp2.parallel.data.gradients import get_total_norm
from lightning_fsdp2.parallel.layers.packed_sequences import require_separate_documents
from lightning_fsdp2.parallel.loss.chunked import LogitsTail, compute_chunked_token_losses, trace_logits_tail
from lightning_fsdp2.parallel.loss.cross_entropy import token_cross_entropy
from lightning_fsdp2.parallel.loss.load_balance import compute_load_balance, sum_routing
from lightning_fsdp2.parallel.loss.token_mean import (
    TokenMean,
    add_load_balance,
    apply_token_mean_,
    reduce_token_losses,
)
from lightning_fsdp2.parallel.pipeline.apply import add_over_stages, get_from_last_stage
from lightning_fsdp2.ranks.collectives import gather_for_ranks

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]

LossMethod = Literal["full", "chunked"]

_METRICS = (
    *("train/loss", "train/perplexity", "train/tokens", "train/gradient_norm", "train/learning_rate"),
    *("train/load_balance_loss", "val/loss", "val/perplexity"),
)
"""Names of the metrics that the module logs in a fit."""


class CausalLM(LightningModule):
    """LightningModule that trains a Hugging Face causal language model on batches of ``input_ids`` and ``labels``.

    The loss is the mean over all tokens with labels in an optimizer step. It does not depend on how these tokens are
    split over ranks and micro-batches. On logging steps, the module logs ``train/loss``, ``train/perplexity``,
    ``train/tokens`` (the number of tokens with labels in the step), ``train/gradient_norm`` and
    ``train/learning_rate``. After each validation, it logs ``val/loss`` and ``val/perplexity``.

    Args:
        pretrained: Directory of a model saved by ``save_pretrained``, or a model id on the Hugging Face Hub. Each rank
            reads only its shards of the weights.
        config: Architecture of a new model: a mapping with ``model_type`` and other fields of the config
            (``{model_type: llama, hidden_size: 256, ...}``), or a directory or hub id with a ``config.json``. Give
            either ``config`` or ``pretrained``.
        optimizer: Callable that builds the optimizer from the parameter groups. Adam and AdamW use torch's fused kernel
            if there is one for the device, unless ``fused``, ``foreach`` or ``differentiable`` is given. On a device
            without a fused kernel, ``fused=True`` is ignored with a warning.
        lr_scheduler: Callable that builds the learning rate schedule from the optimizer. The schedule is stepped after
            every optimizer step. None keeps the learning rate constant. If the schedule has a method ``fit_to_run``, as
            :class:`~lightning_fsdp2.schedulers.WarmupCosine` has, the method gets the run's number of steps.
        decay_norms_and_biases: Whether weight decay also applies to one-dimensional parameters (norms and biases).
        attn_implementation: transformers' attention function, such as ``"sdpa"`` or ``"eager"``. None for the one that
            transformers chooses for the architecture: ``"sdpa"``, or ``"eager"`` for architectures without it, which is
            then said once.
        loss: ``"full"`` to compute the logits of all positions at once; ``"chunked"`` to compute the logits of about a
            thousand positions at a time, and to recompute them in backward. Both give the same loss and gradients.
            Chunks cost one more matrix product with the head, but avoid the full logits, often the largest tensor of a
            step. Under tensor parallelism, each rank computes the loss on its part of the vocabulary.
        allow_missing: Names, or patterns such as ``"lm_head.*"``, of weights that the files of ``pretrained`` may lack;
            missing weights are initialised as in a new model. Any other missing tensor is an error.
        lora: Low-rank adapters to train while the model itself is frozen. Give fields of peft's ``LoraConfig``, such as
            ``{r: 16, target_modules: [q_proj, v_proj]}``; ``{}`` means r=16 and alpha=32 on all linear layers. Or give
            the directory of an adapter that peft or ``export_hf`` wrote, to continue training this adapter. None trains
            the model itself.
        router_aux_loss_coef: Coefficient of the auxiliary load-balance loss of a mixture of experts; 0 for no such
            loss. None means the coefficient in the model's config if this config has ``output_router_logits: true``,
            and 0 otherwise. The auxiliary loss of a micro-batch is computed over the tokens of all ranks, and added to
            the loss of every token with a label. It is logged as ``train/load_balance_loss``, without the coefficient,
            and is not part of ``train/loss``. A subclass with its own ``training_step`` has to call the one of
            ``CausalLM`` to get this loss.

    Raises:
        ImportError: When ``lora`` is given and peft is not installed.
        ValueError: When both or neither of ``pretrained`` and ``config`` are given, the mapping lacks ``model_type``,
            ``loss`` or a field of ``lora`` is unknown, or ``pretrained`` is a file or a checkpoint of a training run.
            In ``configure_model``, when ``pretrained`` is quantised, ``lora`` belongs to a different model, the model
            does not allow ``loss="chunked"``, or has no auxiliary loss for ``router_aux_loss_coef``. Once the model is
            sharded, when the files do not match the model.
            In the first step, when a data module with ``separate_documents=True`` packs documents, and the model's
            attention would cross their boundaries.
        FileNotFoundError: When a ``pretrained`` directory has no safetensors files, or a ``lora`` directory lacks
            peft's files.
    """

    model: "PreTrainedModel | PeftModel"

    def __init__(
        self,
        pretrained: str | None = None,
        config: dict[str, Any] | str | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1),
        lr_scheduler: LRSchedulerCallable | None = None,
        decay_norms_and_biases: bool = False,
        attn_implementation: str | None = None,
        loss: LossMethod = "full",
        allow_missing: Sequence[str] = (),
        lora: dict[str, Any] | str | None = None,
        router_aux_loss_coef: float | None = None,
    ) -> None:
        super().__init__()
        if (pretrained is None) == (config is None):
            raise ValueError(
                f"CausalLM(pretrained={pretrained!r}, config={config!r}): give exactly one of them: `pretrained` to"
                " start from a model's weights, or `config` to start with a new model."
            )
        if loss not in get_args(LossMethod):
            raise ValueError(f"CausalLM(loss={loss!r}) is unknown; use 'full' or 'chunked'.")
        self.save_hyperparameters(
            *("pretrained", "config", "decay_norms_and_biases", "attn_implementation", "loss", "allow_missing", "lora"),
            "router_aux_loss_coef",
        )
        self.pretrained, self.attn_implementation = pretrained, attn_implementation
        self.decay_norms_and_biases = decay_norms_and_biases
        self.loss = loss
        self.allow_missing = allow_missing
        self.router_aux_loss_coef = check_coefficient(router_aux_loss_coef)
        if pretrained is not None:
            get_optional_folder(pretrained)  # report a wrong path before the run starts
        self.lora_config = None if lora is None else build_lora_config(lora)
        self._lora_folder = Path(lora) if isinstance(lora, str) else None
        self.hf_config = build_config(pretrained or config)
        # the model is built in `configure_model`, which Lightning calls after the device mesh has been created
        self.model = None
        self._logits_tail: LogitsTail | None = None
        self._router_loss: RouterLoss | None = None
        self._router_logits_by_default = getattr(self.hf_config.get_text_config(), "output_router_logits", False)
        self._evaluation_totals: Tensor | None = None
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._gradient_norm: Tensor | None = None
        self._learning_rate = 0.0
        self._token_mean: TokenMean | None = None
        self._checked_lengths: set[int] = set()

    # ------------------------------------------------------------------ model

    @property
    def has_router_loss(self) -> bool:
        """Whether training adds the auxiliary loss of routers; see ``router_aux_loss_coef``."""
        return self._router_loss is not None

    def prepare_data(self) -> None:
        if self.pretrained is not None:
            find_pretrained(self.pretrained)

    def configure_model(self) -> None:
        if self.model is None:
            self._check_causal()
            self._build_model()
        self._router_loss = find_router_loss(get_hf_models(self)[0], self.router_aux_loss_coef)
        if self.loss == "chunked" and self._logits_tail is None:
            if type(self).forward is not CausalLM.forward:
                raise ValueError(
                    f"{type(self).__name__}(loss='chunked') would not call the `forward` that this class defines; use"
                    " loss='full'."
                )
            self._logits_tail = trace_logits_tail(self.model)

    def _check_causal(self) -> None:
        # a subclass with its own `training_step` may use a loss for which attention to later tokens is fine
        if type(self).training_step is CausalLM.training_step:
            source = "config=..." if self.pretrained is None else f"pretrained={self.pretrained!r}"
            check_causal(self.hf_config, source)

    def _build_model(self) -> None:
        # Our strategies shard a model on the meta device and then give it weights; other strategies do not.
        # `self._trainer` is used because `self.trainer` raises an error if there is no Trainer.
        on_meta = getattr(getattr(self._trainer, "strategy", None), "materializes_models", False)
        options: dict[str, Any] = {"attn_implementation": self.attn_implementation, "dtype": torch.get_default_dtype()}
        if self.pretrained is None:
            self.model = build_model(self.hf_config, on_meta=on_meta, **options)
        else:
            folder = find_pretrained(self.pretrained, download=False)
            if self._lora_folder is not None:
                check_base(self._lora_folder, self.lora_config, self.pretrained, folder)
            self.model = build_pretrained_model(
                folder, self.hf_config, allow_missing=self.allow_missing, on_meta=on_meta, **options
            )
        attention = get_attention(self.model.config)
        if self.attn_implementation is None and attention != "sdpa":
            rank_zero_info(
                f"{type(self.model).__name__} computes attention with {attention!r}, because transformers has no SDPA"
                " for this architecture (attn_implementation)."
            )
        if self.lora_config is not None:
            self.model = add_lora(self.model, self.lora_config, base=self.pretrained, folder=self._lora_folder)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Save the architecture, so that the checkpoint can be loaded without the files from which training started.
        # A subclass with its own `__init__` has to do so itself, because it may have different arguments.
        if type(self).__init__ is not CausalLM.__init__:
            return
        hparams = checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]
        if self.lora_config is not None:
            hparams.update(lora=to_mapping(self.lora_config))
        # weights that the checkpoint leaves out, because they are in the pretrained files
        stages = get_optional_stages(self)
        names = self.state_dict().keys() if stages is None else stages.state.keys()
        leaves_out = names - set(chain.from_iterable(gather_over_stages(self, list(checkpoint["state_dict"]))))
        if not leaves_out and not isinstance(self.hparams["config"], dict):
            hparams.update(pretrained=None, config=self.hf_config.to_dict())

    def setup(self, stage: str) -> None:
        if stage == "fit":
            warn_of_unknown_monitors(cast(Any, self.trainer).callbacks, _METRICS)
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(length := getattr(data, "sequence_length", None), int):
            restarts = bool(getattr(data, "separate_documents", False))
            check_length(self.hf_config, length, f"sequence_length={length}", restarts=restarts)
            self._checked_lengths.add(length)
        tokenizer = getattr(data, "tokenizer", None)
        vocab_size = getattr(self.hf_config.get_text_config(), "vocab_size", None)  # a vision model has none
        if None not in (tokenizer, vocab_size) and len(tokenizer) > vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens, but the model's vocab_size is {vocab_size}: larger ids"
                f" have no embedding. Set vocab_size to {len(tokenizer)} or more, or use the model's own tokenizer."
            )

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return the logits, of shape [batch, sequence, vocabulary].

        With ``FSDP2Config.loss_parallel``, the logits are a DTensor. With context parallelism, each rank gets the
        logits of its own positions; :func:`~lightning_fsdp2.parallel.context.apply.gather_sequence` collects the logits
        of all ranks.
        """
        if self._router_logits_by_default:
            inputs["output_router_logits"] = False  # only training needs router logits, from the base model alone
        return self.model(input_ids=input_ids, use_cache=False, **inputs).logits

    # ------------------------------------------------------------------ steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self._router_loss is None:
            return reduce_token_losses(self, *self._compute_token_losses(batch))
        summarise = partial(self._sum_routing, self._router_loss, self._get_router_mask(batch))
        with record_routing(self._router_loss.base_model, summarise) as recorded:
            losses, has_label = self._compute_token_losses(batch)
        loss = reduce_token_losses(self, losses, has_label)
        return loss + self._compute_router_loss(self._router_loss, recorded, has_label)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._update_evaluation_loss(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._update_evaluation_loss(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the log-probability of each sequence's labels, and the number of these labels.

        Both results, ``log_probability`` and ``tokens``, are tensors of shape [batch].
        """
        losses, counts = self._compute_token_losses(batch)
        sums = sum_over_positions(self.model, torch.stack([-losses.sum(-1).double(), counts.sum(-1).double()]))
        return {"log_probability": sums[0].to(losses.dtype), "tokens": sums[1].long()}

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation_loss("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation_loss("test")

    def _compute_token_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of every position of this rank, and whether the position has a label.

        Both tensors have the shape [batch, positions]. The loss of a position without a label is 0.
        """
        self._check_batch(batch)
        compute_logits = partial(self._compute_logits, **{name: batch[name] for name in batch if name != "labels"})
        labels = shard_sequence(self.model, shift_left(batch.get("labels", batch["input_ids"])))
        if self.loss == "full":
            losses = token_cross_entropy(compute_logits(), labels, model=self.model)
        elif self._logits_tail is None:
            raise RuntimeError(
                f"{type(self).__name__}(loss='chunked') is prepared in CausalLM's `configure_model`; call"
                " `super().configure_model()` in your override."
            )
        else:
            losses = compute_chunked_token_losses(self.model, compute_logits, labels, tail=self._logits_tail)
        return losses, labels != IGNORE_INDEX

    def _get_router_mask(self, batch: Batch) -> Tensor | None:
        """Return the attention mask of the tokens whose router logits this rank gets, or None without padding."""
        mask, sharding = batch.get("attention_mask"), get_optional_sharding(self.model)
        if mask is None or sharding is None:
            return mask
        # the rows of the logits are those of all context parallel ranks, one rank after the other
        return gather_for_ranks(sharding.shard(mask, 1).flatten(), 0, sharding.group)

    def _sum_routing(self, router_loss: RouterLoss, mask: Tensor | None, logits: Sequence[Tensor]) -> Tensor:
        return add_over_stages(self, sum_routing(logits, router_loss.top_k, attention_mask=mask))

    def _compute_router_loss(self, router_loss: RouterLoss, recorded: list[Tensor], has_label: Tensor) -> Tensor:
        """Return the auxiliary loss of the last recorded forward, as a scalar to add to the micro-batch's loss."""
        if not recorded:
            raise ValueError(
                f"router_aux_loss_coef={router_loss.coefficient}: the forward of"
                f" {get_class_name(router_loss.base_model)} returned no router logits; use router_aux_loss_coef=0."
            )
        world = getattr(self.trainer.strategy, "world", None)  # only our strategies have it
        group = _get_world_group() if world is None else world.loss_group
        balance = compute_load_balance(recorded[-1], has_label.sum(), group=group)
        return add_load_balance(self, balance, router_loss.coefficient)

    def _check_batch(self, batch: Batch) -> None:
        # `setup` checks only the sequence length that the data module declares. A user's own data module does not have
        # to declare one, and the tensor names are not known before the first batch.
        length = batch["input_ids"].shape[-1]
        if length not in self._checked_lengths:
            self._checked_lengths.add(length)
            check_length(self.hf_config, length, f"A batch of {length} tokens", restarts="position_ids" in batch)
            check_names(get_hf_models(self)[0], batch.keys())

    def _compute_logits(self, **inputs: Tensor) -> Tensor:
        with self._treat_documents(inputs):
            return self(**inputs)

    def _treat_documents(self, inputs: Batch) -> AbstractContextManager[None]:
        # Ask the data module, not the batch, whether to separate documents, so that all ranks do the same.
        # On some ranks, a batch may have no boundary between documents.
        datamodule = getattr(self._trainer, "datamodule", None)
        if getattr(datamodule, "separate_documents", False):
            is_sharded = get_optional_sharding(self.model) is not None
            return nullcontext() if is_sharded else require_separate_documents(self.model, len(inputs["input_ids"]))
        # Without `position_ids`, no sequences are packed. So transformers can skip its check for packed sequences. The
        # check would make the CPU wait for the device.
        return nullcontext() if "position_ids" in inputs else assume_unpacked_sequences()

    def _update_evaluation_loss(self, batch: Batch) -> None:
        losses, counts = self._compute_token_losses(batch)
        totals = torch.stack([losses.sum().double(), counts.sum().double()])
        self._evaluation_totals = totals if self._evaluation_totals is None else self._evaluation_totals + totals

    def _log_evaluation_loss(self, stage: str) -> None:
        totals, self._evaluation_totals = get_from_last_stage(self, self._evaluation_totals), None
        if totals is None:  # other ranks may have samples
            totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        # log metrics from host memory, so that the progress bar does not wait for the device at every refresh
        totals = sum_over_positions(self.model, totals)
        loss_sum, tokens = self.trainer.strategy.reduce(totals, reduce_op="sum").cpu().unbind()
        if not tokens:  # a subclass has its own `validation_step`
            return
        loss = loss_sum / tokens
        self.log(f"{stage}/loss", loss, prog_bar=True, sync_dist=True)
        self.log(f"{stage}/perplexity", loss.exp(), sync_dist=True)

    # ------------------------------------------------------------------ optimizer

    def configure_optimizers(self) -> Any:
        groups = self._get_parameter_groups()
        try:
            optimizer = self._optimizer(groups)
        except ValueError as error:
            refuse_optimizer_of_matrices(self, error)
            raise
        _prepare_fused(optimizer)
        if self._lr_scheduler is None:
            return optimizer
        scheduler = self._lr_scheduler(optimizer)
        if hasattr(scheduler, "fit_to_run") and self._trainer is not None:
            scheduler.fit_to_run(self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _get_parameter_groups(self) -> list[dict[str, Any]]:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.decay_norms_and_biases:
            return [{"params": parameters}]
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
        # decide by the parameters of all pipeline stages, because all stages must have the same groups
        stages = get_optional_stages(self)
        trained = [each for each in stages.parameters.values() if each.requires_grad] if stages else parameters
        kinds = {len(parameter.shape) > 1 for parameter in trained}
        groups: dict[bool, dict[str, Any]] = {
            True: {"params": matrices},
            False: {"params": vectors, "weight_decay": 0.0},
        }
        return [group for are_matrices, group in groups.items() if are_matrices in kinds]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # scale the gradients to those of the mean loss per token, unless one of our strategies has already done so
        mean = apply_token_mean_(self, _get_world_group(), loss_divisor=self.trainer.accumulate_grad_batches)
        self._token_mean = mean or getattr(self.trainer.strategy, "token_mean", None)
        if is_logging_step(self.trainer):
            # read the learning rate before the schedule changes it
            self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        is_logged = is_logging_step(self.trainer)
        plugin: Any = self.trainer.precision_plugin
        # do not compute the norm twice: when our strategies clip by norm, their precision plugin stores the norm
        is_told = gradient_clip_val and gradient_clip_algorithm != "value" and hasattr(plugin, "gradient_norm")
        if is_logged and not is_told:
            self._gradient_norm = get_total_norm(self.parameters())
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if is_logged and is_told:
            self._gradient_norm = plugin.gradient_norm

    # ------------------------------------------------------------------ logging

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        mean, self._token_mean = self._token_mean, None
        norm, self._gradient_norm = self._gradient_norm, None
        if mean is None or norm is None or not is_logging_step(self.trainer):
            return
        names: tuple[str, ...] = ("train/loss", "train/tokens", "train/gradient_norm")
        values = [mean.loss, mean.tokens, norm]
        if mean.load_balance is not None:
            names, values = (*names, "train/load_balance_loss"), [*values, mean.load_balance]
        # Copy all metrics to host memory at once, so that the CPU waits for the device only once per logging step.
        numbers = torch.stack([value.double() for value in values]).cpu()
        metrics = dict(zip(names, numbers, strict=True))
        metrics["train/perplexity"] = metrics["train/loss"].exp()
        metrics["train/learning_rate"] = torch.tensor(self._learning_rate, dtype=torch.float64)
        self.log("train/loss", metrics.pop("train/loss"), prog_bar=True)
        self.log_dict(metrics)


def _prepare_fused(optimizer: Optimizer) -> None:
    """Make an optimizer use torch's fused kernel if there is one, in a way that still allows gradient clipping."""
    groups = optimizer.param_groups
    without = sorted({p.device.type for group in groups for p in group["params"] if not has_fused_optimizers(p.device)})
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not without:
        for group in groups:
            if group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
                group["fused"] = True
    fused = [group for group in groups if group.get("fused")]
    if not fused:
        return
    leave_unscaling_to_scaler(optimizer)
    if without:
        name = type(optimizer).__name__
        rank_zero_warn(f"{name}(fused=True): torch has no fused kernel for {', '.join(without)}; fused is ignored.")
        for group in fused:
            group["fused"] = None


def _get_world_group() -> Any:
    return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
