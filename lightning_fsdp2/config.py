"""Configs with the flags of each distributed strategy, and with the options of checkpoints.

Sizes such as ``dp_size`` and ``tp_size`` are not part of a config. They are arguments of the strategy and of
``create_device_mesh``. Creating a config only checks and normalises its values. Whether a flag fits the model, the mesh
and the machine is checked later, by the code that uses the flag.

A wrong value raises a ``ValueError``, and a wrong type a ``TypeError``. Each message names the option, its value, the
rule and the remedy. The docstring under a field is its help text on the command line.
"""

import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch.distributed import Backend
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fsdp2._suggestions import DTYPES, suggest, with_suggestions
from lightning_fsdp2.startup.cli_types import register_cli_types

__all__ = [
    "ActivationCheckpointing",
    "ActivationCheckpointingScope",
    "CheckpointConfig",
    "DDPConfig",
    "DistributedConfig",
    "FSDP2Config",
    "Float8Config",
    "MegatronFSDPConfig",
    "dtype_from_str",
]

ActivationCheckpointing: TypeAlias = bool | Literal["full", "selective"]
ScopeWord: TypeAlias = Literal["all", "language", "vision", "audio", "multimodal"]
ActivationCheckpointingScope: TypeAlias = ScopeWord | list[ScopeWord]
ContextParallelMethod: TypeAlias = Literal["auto", "allgather", "ulysses"]
PipelineSchedule: TypeAlias = Literal["1f1b", "interleaved_1f1b", "gpipe"]
Float8Recipe: TypeAlias = Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"]
CheckpointFormat: TypeAlias = Literal["sharded", "full"]

T = TypeVar("T")


def dtype_from_str(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``, such as ``"float32"``, ``"torch.bfloat16"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: If torch has no such dtype.
    """
    bare_name = name.removeprefix("torch.")
    dtype = getattr(torch, DTYPES.get(bare_name, bare_name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{name!r} is not the name of a torch dtype; use bfloat16 (bf16), float16 (fp16, half), "
            "float32 (fp32, float) or another name that torch knows."
        )
    return dtype


@dataclass(frozen=True)
class _Refusal:
    """Rule for a field that must keep its default. Any other value raises an error, which names an alternative."""

    allowed: object
    """The default, which is the only accepted value."""

    reason: str
    remedy: str
    error: type[Exception] = ValueError


_REFUSED = {
    ("FSDP2Config", "use_hf_tp_plan"): _Refusal(
        allowed=None,
        reason="is no longer an option",
        remedy='use tp_plan="hf" for the plan of the Hugging Face model, or tp_plan=None for our plan.',
        error=TypeError,
    ),
    **{
        (config, "float8"): _Refusal(
            allowed=None, reason=f"is not an option of {config}", remedy="use FSDP2Strategy, or leave the option out."
        )
        for config in ("DDPConfig", "MegatronFSDPConfig")
    },
    ("MegatronFSDPConfig", "average_in_collective"): _Refusal(
        allowed=False,
        reason="fails in megatron-fsdp for models without Megatron's own expert parallelism",
        remedy="leave it False: gradients are scaled before they are summed, which gives the same mean.",
    ),
}
"""Fields that must keep their default, by config and name."""


class _Flags:
    """Base class of the configs, with their common methods."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of the fields by name. It is a shallow copy: policy objects and plans are not copied."""
        return {flag.name: getattr(self, flag.name) for flag in fields(self)}  # type: ignore[arg-type]

    def _set(self, name: str, value: object) -> None:
        """Set a field of the frozen dataclass. Only ``__post_init__`` may call this."""
        object.__setattr__(self, name, value)

    def _check_refused(self, **init_only: object) -> None:
        """Refuse any value other than the default for the fields in ``_REFUSED``, which cannot be changed.

        Args:
            init_only: Values of the ``InitVar`` fields, which the config does not store.
        """
        configs = {base.__name__ for base in type(self).__mro__}
        for name, refusal in ((name, refusal) for (config, name), refusal in _REFUSED.items() if config in configs):
            value = init_only[name] if name in init_only else getattr(self, name)
            if value != refusal.allowed:
                raise refusal.error(f"{name}={value!r} {refusal.reason}; {refusal.remedy}")

    def _check_bools(self) -> None:
        """Raise a TypeError if a bool flag has a value of another type: the string ``"false"`` would count as true."""
        for flag in fields(self):  # type: ignore[arg-type]
            value = getattr(self, flag.name)
            if flag.type is bool and not isinstance(value, bool):
                raise TypeError(f"{flag.name}={value!r} must be a bool; use True or False.")
            if flag.type == bool | None and not isinstance(value, bool | None):
                raise TypeError(f"{flag.name}={value!r} must be a bool or None; use True, False or None.")


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class Float8Config(_Flags):
    """Options of linear layers that multiply in float8.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If ``recipe`` is unknown.
    """

    recipe: Float8Recipe = "rowwise_with_gw_hp"
    """Recipe of torchao for scales. "rowwise_with_gw_hp" has one for each row, but one for the whole weight in the
    gradient of the input, and computes the gradients of weights in high precision. "rowwise" has one for each row, and
    computes these gradients in float8 too. "tensorwise" has one for each matrix: it is the fastest, and the least exact
    if a few values are much larger than the others."""

    skip: list[str] | None = None
    """Linear layers to leave out, by name relative to the Hugging Face model. A * stands for a part between dots, as in
    "model.layers.*.mlp.down_proj". None leaves out the output head. A list replaces this: name the head too, if it
    should stay."""

    filter_small: bool = False
    """Whether to leave out layers that float8 would make slower, by torchao's rule for the sizes of weights on an
    H100."""

    emulate: bool = False
    """Whether to round to float8, but multiply in float32, on devices without units for float8. Training is then slower
    than without float8."""

    def __post_init__(self) -> None:
        self._check_bools()
        _check_word("recipe", self.recipe, get_args(Float8Recipe))
        if self.skip is not None:
            if not isinstance(self.skip, list | tuple) or not all(isinstance(name, str) for name in self.skip):
                raise TypeError(f"skip={self.skip!r} must be a list of names of layers; use None for the output head.")
            self._set("skip", list(self.skip))


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class FSDP2Config(_Flags):
    """Flags of :class:`~lightning_fsdp2.FSDP2Strategy`, which shards with torch's ``fully_shard``.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is not allowed for its field.
    """

    sequence_parallel: bool = False
    """Whether tensor parallelism also shards the activations between the parallel layers along the sequence."""

    tp_plan: dict[str, str | ParallelStyle] | str | None = None
    """Tensor parallel plan. None uses the plan registered for the model's class or family. If there is none, it uses
    this package's plan for the family, and otherwise the Hugging Face model's own plan. "hf" always uses the model's
    own plan. A dict maps module names, relative to the Hugging Face model, to styles. Any other string is the import
    path of such a dict, or of a function that takes the model and returns a dict. In Python, the function itself can be
    given."""

    patch_is_packed_sequence: bool = False
    """Whether transformers' test for packed sequences always returns False during the run. This saves one GPU-to-CPU
    sync per forward, or one per layer with flash attention at batch size 1. It also keeps shapes static for
    torch.compile. Leave this flag off for packed sequences, because attention would mix their documents. Batches with
    position_ids that restart are therefore refused. With CausalLM, the flag only makes a difference for batches with
    position_ids."""

    mp_policy: MixedPrecisionPolicy | None = None
    """Mixed-precision policy of the FSDP units. None uses the dtypes of Trainer(precision=...). A policy overrides a
    Trainer precision of 32-true. A mapping of the policy's fields to dtypes or their names can be given instead. A
    policy that sets param_dtype but no reduce_dtype reduces gradients in float32."""

    offload_policy: bool | CPUOffloadPolicy | None = None
    """Whether parameters, gradients and optimizer states are kept in CPU memory. True stands for CPUOffloadPolicy(). A
    mapping such as {pin_memory: false} stands for a policy with these fields. The config stores the policy, or None
    for no offloading."""

    autocast_dtype: torch.dtype | None = None
    """Dtype of torch.autocast. If it is set to bfloat16, the only supported dtype, forward runs under autocast on the
    model's device type. With output_dtype=float32 in mp_policy, the residual stream then stays in float32, while matrix
    products run in bfloat16. If mp_policy also sets param_dtype to bfloat16, weights are gathered in bfloat16, and
    autocast does not need to cast them."""

    activation_checkpointing: ActivationCheckpointing = False
    """Activation checkpointing. False keeps all activations. True or "full" recomputes each layer in backward.
    "selective" also recomputes each layer, but keeps the results of fused attention, of reductions over ranks and of
    every second matrix product, if backward needs them."""

    activation_checkpointing_scope: ActivationCheckpointingScope = "all"
    """Parts of the model to which activation_checkpointing applies. This is "all", or one or several of "language",
    "vision", "audio" and "multimodal"."""

    defer_fsdp_grad_sync: bool = True
    """Whether gradients are reduced only in the last micro-batch of an accumulation window. This needs memory for
    unsharded gradients. False reduces and shards the gradients in every micro-batch. So do a hook on a parameter, for
    the unit of the parameter, and a hook `on_after_backward`."""

    reshard_after_forward: bool | int | None = None
    """Whether a unit's parameters are freed between forward and backward. None frees all parameters except those of the
    last layer and the head, which backward needs first. True frees all parameters. False frees none, which needs less
    communication but more memory. An int keeps the head gathered, and shards the layers over groups of that many
    ranks."""

    loss_parallel: bool = False
    """Whether the logits stay sharded along the vocabulary under tensor parallelism, so that the loss is computed on
    the shards. The logits are then a DTensor."""

    context_parallel_method: ContextParallelMethod = "auto"
    """Method that lets attention see the whole sequence under context parallelism. "allgather" gathers keys and values.
    "ulysses" gives each rank the whole sequence for some of the heads. "auto" chooses by the model and the mesh."""

    context_parallel_inputs: dict[str, int | None] = field(default_factory=dict)
    """Additional arguments of the model's forward to shard under context parallelism. Each name is mapped to the dim in
    which the tensor has one value per position, such as {span_ids: 1}. A tensor that is mapped to null stays whole."""

    backend: str | None = None
    """Backend of the process group, such as "nccl", "gloo", or one per device type, as in "cpu:gloo,cuda:nccl". None
    chooses the backend by the device type."""

    bind_device_id: bool = False
    """Whether the process group is bound to the rank's device, as with device_id in init_process_group. NCCL then
    connects the ranks at the start, which shows network errors at once. It also creates the mesh's groups by splitting
    one communicator, instead of creating each group at its first use. This flag needs an accelerator whose backend is
    not gloo."""

    enable_async_tensor_parallel: bool = False
    """Whether torch.compile overlaps the collectives of tensor parallelism with matrix products. This needs tp_size > 1
    and CUDA devices that can access each other's memory (NVLink). It also needs sequence_parallel and enable_compile,
    and turns them on, with a warning if they are off."""

    enable_compile: bool = False
    """Whether each transformer layer is compiled with torch.compile. The loss of CausalLM and of token_mean_loss is
    compiled too, except with loss_parallel. Parameter names do not change."""

    enable_fsdp2_prefetch: bool = True
    """Whether the parameters of the next layers are explicitly all-gathered before they are needed."""

    fsdp2_backward_prefetch_depth: int = 2
    """Number of layers whose parameters are gathered ahead in backward. 1 needs less memory but hides less of the
    all-gather. 0 leaves prefetching to FSDP."""

    fsdp2_forward_prefetch_depth: int = 1
    """Number of layers whose parameters are gathered ahead in forward. 0 leaves prefetching to FSDP."""

    pp_schedule: PipelineSchedule = "1f1b"
    """Order in which a pipeline parallel rank computes the forwards and backwards of its micro-batches. "1f1b" starts
    the backward of each micro-batch as early as possible, so that a rank keeps the activations of at most pp_size
    micro-batches. "interleaved_1f1b" also gives each rank several stages, which shortens the time that ranks wait for
    each other, but needs more communication. "gpipe" computes all forwards first, and keeps all activations."""

    pp_microbatches: int | None = None
    """Number of micro-batches into which each batch is split under pipeline parallelism. It must divide the batch's
    number of samples. None uses 2 for each stage of the model (2 x pp_size x stages per rank) if that divides the
    batch, and otherwise the largest divisor below it; the number is logged. With token_mean_loss, the number does not
    change the gradients. Any other loss is averaged over the micro-batches with equal weights, even if they have
    different numbers of labels."""

    pp_stages_per_rank: int | None = None
    """Number of stages on each pipeline parallel rank. None uses 2 for the schedule "interleaved_1f1b", which needs at
    least 2, and 1 for the other schedules, which allow only 1."""

    pp_layers_per_stage: list[int] | None = None
    """Number of the model's layers in each stage, from the first stage to the last. Stage 0 runs on the first pipeline
    parallel rank, stage 1 on the second, and so on, around the ranks again if there are several stages on each. None
    balances the stages by the FLOPs of their layers and of the head."""

    float8: bool | Float8Config | None = None
    """Options of linear layers that multiply in float8 (torchao); True uses the defaults. Weights and checkpoints keep
    their dtypes. A mapping of the options can be given instead of a Float8Config. This needs a GPU with units for
    float8, such as an H100, and is faster only with enable_compile."""

    use_hf_tp_plan: InitVar[bool | None] = None
    """Option that must stay None. It was replaced by tp_plan="hf"."""

    def __post_init__(self, use_hf_tp_plan: bool | None) -> None:
        self._check_bools()
        self._check_refused(use_hf_tp_plan=use_hf_tp_plan)
        _check_tp_plan(self.tp_plan)
        self._set("mp_policy", _to_mp_policy(self.mp_policy))
        self._set("offload_policy", _to_offload_policy(self.offload_policy))
        self._set("float8", _to_float8(self.float8))
        self._set("autocast_dtype", _to_autocast_dtype(self.autocast_dtype))
        _check_activation_checkpointing(self.activation_checkpointing)
        _check_scope(self.activation_checkpointing_scope)
        _check_reshard_after_forward(self.reshard_after_forward)
        _check_word("context_parallel_method", self.context_parallel_method, get_args(ContextParallelMethod))
        _check_context_parallel_inputs(self.context_parallel_inputs)
        _check_backend(self.backend)
        _check_backend_of_offload(self.backend, self.offload_policy)
        _check_depth("fsdp2_backward_prefetch_depth", self.fsdp2_backward_prefetch_depth)
        _check_depth("fsdp2_forward_prefetch_depth", self.fsdp2_forward_prefetch_depth)
        _check_optional_count("pp_microbatches", self.pp_microbatches)
        check_pipeline_schedule(self.pp_schedule, self.pp_stages_per_rank)
        _check_layers_per_stage(self.pp_layers_per_stage)
        missing = [name for name in ("sequence_parallel", "enable_compile") if not getattr(self, name)]
        if self.enable_async_tensor_parallel and missing:
            warnings.warn(
                f"enable_async_tensor_parallel=True needs {' and '.join(f'{name}=True' for name in missing)}, which is "
                "now turned on; set it in the config to avoid this warning.",
                stacklevel=4,
            )
            for name in missing:
                self._set(name, True)

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each pipeline parallel rank: ``pp_stages_per_rank``, or the default of the schedule."""
        return self.pp_stages_per_rank or (2 if self.pp_schedule == "interleaved_1f1b" else 1)


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class MegatronFSDPConfig(_Flags):
    """Flags of :class:`~lightning_fsdp2.MegatronFSDPStrategy`, which shards with the ``megatron-fsdp`` package.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is not allowed for its field.
    """

    sequence_parallel: bool = False
    """Whether tensor parallelism also shards the activations between the parallel layers along the sequence."""

    tp_plan: dict[str, str | ParallelStyle] | str | None = None
    """Tensor parallel plan. None uses the plan registered for the model's class or family. If there is none, it uses
    this package's plan for the family, and otherwise the Hugging Face model's own plan. "hf" always uses the model's
    own plan. A dict maps module names, relative to the Hugging Face model, to styles. Any other string is the import
    path of such a dict, or of a function that takes the model and returns a dict. In Python, the function itself can be
    given."""

    loss_parallel: bool = False
    """Whether the logits stay sharded along the vocabulary under tensor parallelism, so that the loss is computed on
    the shards. The logits are then a DTensor."""

    megatron_fsdp_unit_modules: list[str] | None = None
    """Import paths of the module classes that become FSDP units. None uses the classes of the model's layers, and also
    torch's MultiheadAttention, because its forward reads its child's weights without calling the child."""

    zero_dp_strategy: int = 3
    """Level of sharding over data parallel ranks. 0 shards nothing, 1 shards optimizer states, 2 also shards gradients,
    and 3 also shards parameters."""

    init_fsdp_with_meta_device: bool = False
    """Whether the weights of a model on the meta device are created shard by shard. Without this flag, every rank
    creates all weights of such a model before sharding."""

    grad_reduce_in_fp32: bool = True
    """Whether gradients are reduced in float32 for parameters of any dtype."""

    preserve_fp32_weights: bool = True
    """Whether the optimizer updates float32 copies of the weights. Without them, an update that is small compared with
    a bfloat16 weight is lost."""

    overlap_grad_reduce: bool = True
    """Whether gradients are reduced while backward is still running."""

    overlap_param_gather: bool = True
    """Whether parameters are gathered while forward and backward are running."""

    check_for_nan_in_grad: bool | None = None
    """Flag that megatron-fsdp no longer reads. True turns on report_nan_in_param_grad, which does the same."""

    report_nan_in_param_grad: bool = False
    """Whether a gradient that is not finite raises an error in the backward that computed it. The check costs one sync
    for each gradient."""

    average_in_collective: bool = False
    """Whether the collective averages gradients, instead of adding up gradients that were scaled beforehand. This flag
    must stay False, because it fails in megatron-fsdp."""

    disable_bucketing: bool = False
    """Whether all parameters of a kind are communicated at once, instead of in buckets of limited size."""

    calculate_per_token_loss: bool = False
    """Whether gradients are summed over the ranks instead of averaged, for a loss that is already divided by the number
    of all tokens."""

    keep_fp8_transpose_cache: bool = False
    """Whether the transposed copies of FP8 parameters are kept between forward and backward. It matters only for
    Transformer Engine modules with FP8 parameters in your own model. This flag was never run."""

    nccl_ub: bool = False
    """Whether communication buffers are registered with NCCL as user buffers. It also turns on fsdp_double_buffer. This
    flag was never run."""

    fsdp_double_buffer: bool = False
    """Whether communication uses two persistent buffers instead of freshly allocated ones. The buffers are global to
    the process. This flag was run on CPU ranks only."""

    activation_checkpointing: ActivationCheckpointing = False
    """Activation checkpointing. False keeps all activations. True or "full" recomputes each layer in backward.
    "selective" keeps the results of expensive operations and recomputes the rest."""

    autocast_dtype: torch.dtype | None = None
    """Dtype of torch.autocast. If it is set, forward runs under autocast. Trainer(precision="bf16-mixed") sets it."""

    backend: str | None = None
    """Backend of the process group, such as "nccl", "gloo", or one per device type, as in "cpu:gloo,cuda:nccl". None
    chooses the backend by the device type."""

    bind_device_id: bool = False
    """Whether the process group is bound to the rank's device, as with device_id in init_process_group. NCCL then
    connects the ranks at the start, which shows network errors at once. It also creates the mesh's groups by splitting
    one communicator, instead of creating each group at its first use. This flag needs an accelerator whose backend is
    not gloo."""

    float8: InitVar[Any] = None
    """Option that must stay None. Only FSDP2Config supports it."""

    def __post_init__(self, float8: Any) -> None:
        self._check_bools()
        self._check_refused(float8=float8)
        _check_tp_plan(self.tp_plan)
        _check_activation_checkpointing(self.activation_checkpointing)
        self._set("autocast_dtype", _to_autocast_dtype(self.autocast_dtype))
        _check_unit_modules(self.megatron_fsdp_unit_modules)
        _check_zero_dp_strategy(self.zero_dp_strategy)
        _check_backend(self.backend)
        if self.check_for_nan_in_grad and not self.report_nan_in_param_grad:
            warnings.warn(
                "megatron-fsdp no longer reads check_for_nan_in_grad=True; report_nan_in_param_grad=True, which does "
                "the same, is turned on. Set report_nan_in_param_grad to avoid this warning.",
                stacklevel=4,
            )
            self._set("report_nan_in_param_grad", True)


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class DDPConfig(_Flags):
    """Flags of :class:`~lightning_fsdp2.DDPStrategy`, which replicates with torch's ``DistributedDataParallel``.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is not allowed for its field.
    """

    activation_checkpointing: ActivationCheckpointing = False
    """Activation checkpointing. False keeps all activations. True or "full" recomputes each layer in backward.
    "selective" also recomputes each layer, but keeps the results of fused attention, of reductions over ranks and of
    every second matrix product, if backward needs them."""

    activation_checkpointing_scope: ActivationCheckpointingScope = "all"
    """Parts of the model to which activation_checkpointing applies. This is "all", or one or several of "language",
    "vision", "audio" and "multimodal"."""

    autocast_dtype: torch.dtype | None = None
    """Dtype of torch.autocast. If it is set, forward runs under autocast on the model's device type."""

    find_unused_parameters: bool = False
    """Whether DDP looks for parameters that forward did not use, before each backward."""

    static_graph: bool = False
    """Whether every iteration uses the same parameters, so that DDP can skip work."""

    gradient_as_bucket_view: bool = False
    """Whether gradients are views of the communication buckets, which saves a copy of them."""

    bucket_cap_mb: float | None = None
    """Size of a communication bucket in MiB. None uses torch's default."""

    broadcast_buffers: bool = True
    """Whether rank 0's buffers are broadcast before each forward."""

    backend: str | None = None
    """Backend of the process group, such as "nccl", "gloo", or one per device type, as in "cpu:gloo,cuda:nccl". None
    chooses the backend by the device type."""

    bind_device_id: bool = False
    """Whether the process group is bound to the rank's device, as with device_id in init_process_group. NCCL then
    connects the ranks at the start, which shows network errors at once. It also creates the mesh's groups by splitting
    one communicator, instead of creating each group at its first use. This flag needs an accelerator whose backend is
    not gloo."""

    float8: InitVar[Any] = None
    """Option that must stay None. Only FSDP2Config supports it."""

    def __post_init__(self, float8: Any) -> None:
        self._check_bools()
        self._check_refused(float8=float8)
        _check_activation_checkpointing(self.activation_checkpointing)
        _check_scope(self.activation_checkpointing_scope)
        self._set("autocast_dtype", _to_autocast_dtype(self.autocast_dtype))
        _check_bucket_cap(self.bucket_cap_mb)
        _check_backend(self.backend)


DistributedConfig: TypeAlias = FSDP2Config | MegatronFSDPConfig | DDPConfig
"""Config of any of the three strategies."""

FLAGS_OF_A_RUN = (
    "backend",
    "bind_device_id",
    "defer_fsdp_grad_sync",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
    "broadcast_buffers",
    "pp_schedule",
    "pp_microbatches",
)
"""Flags that do not change the module. A later Trainer may change them for a module that is already sharded."""


def spell_alike(config: DistributedConfig) -> DistributedConfig:
    """Return ``config`` with each value that has a synonym replaced by the same one of its spellings.

    ``activation_checkpointing=True`` becomes ``"full"``, and ``pp_stages_per_rank=None`` the number that it stands for.
    This way, two configs that mean the same also compare equal.
    """
    if config.activation_checkpointing is True:
        config = replace(config, activation_checkpointing="full")
    return replace(config, pp_stages_per_rank=config.stages_per_rank) if isinstance(config, FSDP2Config) else config


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(_Flags):
    """Options for writing and reading checkpoints under a strategy.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If ``format`` is unknown, or if ``trust_checkpoint`` and ``weights_only`` are both True.
    """

    format: CheckpointFormat = "sharded"
    """Format of written checkpoints. "sharded" is a directory to which each rank writes its own shards. "full" is a
    single file with whole tensors, as under strategies that do not shard, and needs host memory for them on rank 0.
    Both formats can always be read."""

    async_save: bool = False
    """Whether checkpoints are written from copies in host memory while training continues."""

    verify: bool = True
    """Whether each rank checks the data that it reads from a checkpoint against the checksums. A damaged checkpoint is
    then an error."""

    save_at_end: bool = True
    """Whether a ModelCheckpoint with save_last also saves last.ckpt at the end of a completed fit. If False,
    last.ckpt is the last checkpoint that the callback saved at one of its intervals."""

    trust_checkpoint: bool = False
    """Whether a checkpoint may hold arbitrary Python objects, which can run code when they are loaded."""

    weights_only: bool | None = None
    """Whether only tensors and plain values may be loaded, as in torch.load. None stands for True, unless
    trust_checkpoint is set."""

    frozen_parameters: bool = True
    """Whether checkpoints contain frozen parameters of a pretrained model, such as those under LoRA. Without these
    parameters, checkpoints are much smaller, but can only be loaded where the pretrained model is available."""

    def __post_init__(self) -> None:
        self._check_bools()
        _check_word("format", self.format, get_args(CheckpointFormat))
        if self.trust_checkpoint and self.weights_only:
            raise ValueError(
                "trust_checkpoint=True and weights_only=True contradict each other; leave one of them out."
            )


def _check_word(option: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{option}={value!r} is unknown; use {_either(words)}.")


def _check_activation_checkpointing(value: object) -> None:
    if not isinstance(value, bool) and value not in ("full", "selective"):
        raise ValueError(f"activation_checkpointing={value!r} is unknown; use False, True, 'full' or 'selective'.")


def _check_scope(value: object) -> None:
    option = "activation_checkpointing_scope"
    if isinstance(value, str):
        _check_word(option, value, get_args(ScopeWord))
        return
    if not isinstance(value, list | tuple):
        raise TypeError(f"{option}={value!r} must be a word or a list of words; use {_either(get_args(ScopeWord))}.")
    if not value:
        raise ValueError(f"{option}={value!r} names no part of the model; use activation_checkpointing=False.")
    for word in value:
        _check_word(option, word, get_args(ScopeWord))
    if "all" in value and len(value) > 1:
        raise ValueError(f"{option}={value!r} combines 'all' with other words; use 'all' alone, or leave it out.")


def _check_reshard_after_forward(value: object) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        raise TypeError(f"reshard_after_forward={value!r} must be a bool, an int or None.")
    if value < 1:
        raise ValueError(
            f"reshard_after_forward={value} must be a bool, None or an int >= 1; use False to keep parameters gathered."
        )


def _check_depth(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option}={value!r} must be an int; use the number of layers to prefetch, 0 for none.")
    if value < 0:
        raise ValueError(f"{option}={value} must not be negative; use 0 to prefetch nothing.")


def _check_optional_count(option: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option}={value!r} must be an int or None.")
    if value < 1:
        raise ValueError(f"{option}={value} must be an int >= 1; use None for the default.")


def check_pipeline_schedule(schedule: str, value: int | None) -> None:
    """Check a pipeline schedule, and the number of stages on each rank that it is to run; None for the default.

    Raises:
        TypeError: When the number is no int.
        ValueError: When the schedule is not known, or does not run this number of stages.
    """
    option = "pp_stages_per_rank"
    _check_word("pp_schedule", schedule, get_args(PipelineSchedule))
    _check_optional_count(option, value)
    if schedule == "interleaved_1f1b" and value == 1:
        raise ValueError(
            f"{option}=1 with pp_schedule={schedule!r}: only several stages on each rank can be interleaved; use an int"
            " >= 2, or pp_schedule='1f1b'."
        )
    if schedule != "interleaved_1f1b" and value not in (None, 1):
        raise ValueError(
            f"{option}={value} with pp_schedule={schedule!r}: this schedule has one stage on each rank; leave {option}"
            " out, or use pp_schedule='interleaved_1f1b'."
        )


def _check_layers_per_stage(value: object) -> None:
    option = "pp_layers_per_stage"
    if value is None:
        return
    if not isinstance(value, list | tuple) or any(type(number) is not int for number in value):
        raise TypeError(f"{option}={value!r} must be a list of ints, one for each stage; use None to balance them.")
    if not value or min(value) < 1:
        raise ValueError(f"{option}={value!r} must have an int >= 1 for each stage; use None to balance them.")


def _check_context_parallel_inputs(value: object) -> None:
    option = "context_parallel_inputs"
    if not isinstance(value, Mapping):
        raise TypeError(f"{option}={value!r} must be a mapping of names to dims; use for example {{'span_ids': 1}}.")
    for name, dim in value.items():
        if not isinstance(name, str) or isinstance(dim, bool) or not isinstance(dim, int | None):
            raise TypeError(
                f"{option}[{name!r}]={dim!r} must map an argument's name to the sequence dim (an int), or to None for "
                "a tensor without a sequence dim."
            )


def _check_zero_dp_strategy(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"zero_dp_strategy={value!r} must be an int; use 0, 1, 2 or 3.")
    if value not in range(4):
        raise ValueError(f"zero_dp_strategy={value} is unknown; use 0, 1, 2 or 3 (3 also shards the parameters).")


def _check_unit_modules(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(path, str) for path in value):
        raise TypeError(
            f"megatron_fsdp_unit_modules={value!r} must be a list of import paths; use for example "
            '["transformers.models.llama.modeling_llama.LlamaDecoderLayer"], or None.'
        )


def _check_bucket_cap(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"bucket_cap_mb={value!r} must be a number of MiB; use None for torch's default.")
    if not value > 0:
        raise ValueError(f"bucket_cap_mb={value} must be greater than 0; use None for torch's default.")


def _check_backend(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"backend={value!r} must be a string; use 'nccl', 'gloo' or None.")
    known = [name for name in Backend.backend_list if name != Backend.UNDEFINED]
    parts = [part.rpartition(":") for part in value.split(",")]
    for _, _, name in parts:
        if name not in known:
            raise ValueError(f"backend={value!r} has an unknown backend {name!r}; use {_either(known)}.")
    devices = [device for device, _, _ in parts]
    is_single_name = devices == [""]
    if not is_single_name and (not all(devices) or len(set(devices)) != len(devices)):
        raise ValueError(f"backend={value!r} must name each device type once; use for example cpu:gloo,cuda:nccl.")


def _check_backend_of_offload(backend: str | None, offload_policy: object) -> None:
    if offload_policy is not None and backend is not None and "gloo" not in backend and "mpi" not in backend:
        raise ValueError(
            f"backend={backend!r} has no collectives for CPU tensors, which offload_policy={offload_policy!r} needs; "
            "use backend=None or for example 'cpu:gloo,cuda:nccl'."
        )


def _check_tp_plan(value: object) -> None:
    if isinstance(value, str) and value != "hf" and "." not in value:
        raise ValueError(
            f'tp_plan={value!r} is neither "hf" nor an import path, which has dots; use "hf" for the plan of the'
            " Hugging Face model, a path such as 'my_package.plans.my_plan', a dict, or None for our plan."
        )
    if value is None or isinstance(value, str) or (callable(value) and not isinstance(value, type)):
        return
    if not isinstance(value, Mapping):
        raise TypeError(f'tp_plan={value!r} must be None, "hf", a dict or an import path.')
    for name, style in value.items():
        if isinstance(style, Mapping) and "_target_" in style:
            raise ValueError(f"tp_plan[{name!r}]={dict(style)!r} has the key '_target_'; use class_path and init_args.")
        if not isinstance(name, str) or not isinstance(style, str | ParallelStyle):
            raise TypeError(f"tp_plan[{name!r}]={style!r} must map a module name to a style's name or a ParallelStyle.")


def _to_floating_dtype(option: str, value: object) -> torch.dtype | None:
    if value is None:
        return None
    try:
        dtype = dtype_from_str(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{option}={error}") from None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{option}={value!r} must be a floating point dtype; use for example torch.bfloat16.")
    return dtype


def _to_autocast_dtype(value: object) -> torch.dtype | None:
    dtype = _to_floating_dtype("autocast_dtype", value)
    if dtype not in (None, torch.bfloat16):
        reason = (
            "needs a gradient scaler, which is not supported"
            if dtype is torch.float16
            else "is not a dtype of autocast"
        )
        raise ValueError(f"autocast_dtype={value!r} {reason}; use torch.bfloat16, or None for no autocast.")
    return dtype


def _to_mp_policy(value: object) -> MixedPrecisionPolicy | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = _policy_from_mapping("mp_policy", value, MixedPrecisionPolicy)
    if not isinstance(value, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy={value!r} must be a MixedPrecisionPolicy, a mapping of its fields or None; to choose only the"
            ' precision of the whole run, use Trainer(precision=...), such as "bf16-mixed".'
        )
    dtypes = {
        name: _to_floating_dtype(f"mp_policy.{name}", getattr(value, name))
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
    }
    # set reduce_dtype, because None means param_dtype up to torch 2.14, but the gradients' dtype from torch 2.15 on
    if dtypes["param_dtype"] is not None and dtypes["reduce_dtype"] is None:
        dtypes["reduce_dtype"] = torch.float32
    changes: dict[str, Any] = {name: dtype for name, dtype in dtypes.items() if dtype is not getattr(value, name)}
    return replace(value, **changes) if changes else value


def _to_offload_policy(value: object) -> CPUOffloadPolicy | None:
    return _to_optional("offload_policy", value, CPUOffloadPolicy, "None to keep everything on the device")


def _to_float8(value: object) -> Float8Config | None:
    return _to_optional("float8", value, Float8Config, "None to multiply in the compute dtype")


def _to_optional(option: str, value: object, kind: type[T], alternative: str) -> T | None:
    """Return options as an instance of ``kind``, which True stands for with its defaults; None if they are off."""
    if value is None or value is False:
        return None
    if value is True:
        return kind()
    if isinstance(value, Mapping):
        value = _policy_from_mapping(option, value, kind)
    if not isinstance(value, kind):
        raise TypeError(
            f"{option}={value!r} must be True, a {kind.__name__} or a mapping of its fields; use {alternative}."
        )
    return value


def _policy_from_mapping(option: str, value: Mapping[str, Any], policy_class: Any) -> Any:
    names = [field.name for field in fields(policy_class)]
    for key in value:
        if key == "_target_":
            raise ValueError(f"{option} has the key '_target_'; leave it out and give only the policy's fields.")
        if key not in names:
            hint = suggest(str(key), names) or f"; use {_either(names)}."
            raise ValueError(f"{option} has an unknown key {key!r}{hint}")
    policy = policy_class(**value)
    for name in value:
        if isinstance(getattr(policy_class, name, None), bool) and not isinstance(value[name], bool):
            raise TypeError(f"{option}.{name}={value[name]!r} must be a bool; use True or False.")
    return policy


def _either(words: list[str] | tuple[str, ...]) -> str:
    *first, last = map(repr, words)
    return f"{', '.join(first)} or {last}" if first else last


register_cli_types(dtype_from_str)
