"""Entry point of pipeline parallelism: the runner of the stages is put around a model that is split and sharded."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.compat.transformers import CACHE_NAMES, install_output_hooks
from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.modules.stages import set_pipeline_ranks
from lightning_fsdp2.modules.structure import find_hf_models, get_class_name, get_entrances, is_lightning_module
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.pipeline.evaluate import evaluate_in_stages, share_from_last_stage
from lightning_fsdp2.parallel.pipeline.run import PipelineRun
from lightning_fsdp2.parallel.pipeline.shared import build_shared_parameters
from lightning_fsdp2.parallel.pipeline.split import Split

T = TypeVar("T")

_ATTRIBUTE = "_lightning_fsdp2_pipeline"

_RECORDS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments that ask a model for results of every layer, which a stage does not have."""


def apply_pipeline_parallel(root: nn.Module, split: Split, device_mesh: DeviceMesh, config: FSDP2Config) -> None:
    """Make a split model run its stages, in the steps of a Trainer and in evaluations.

    Call this function after the model has been sharded, so that the hooks of FSDP2 run before a stage ends.

    Args:
        root: Module that holds the model; changed in place.
        split: Division of the model into stages.
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh`, with several pipeline ranks.
        config: Flags of FSDP2.
    """
    shared = build_shared_parameters(root, split, device_mesh)
    set_pipeline_ranks(root, shared.ranks)
    run = PipelineRun(split, root, shared, device_mesh, config)
    for module in (root, split.model):  # users may export or save either of them
        module.__dict__[_ATTRIBUTE] = run
    if len(split.own_stages) > 1:  # a forward has only the layers of one of them
        for model in find_hf_models(split.model):
            install_output_hooks(model)
    wrap_method(split.model, partial(_run_model, run))
    for part in find_hf_models(split.model):
        if part is not split.model and not set(split.layers).isdisjoint(part.modules()):
            wrap_method(part, partial(run.run_part, get_class_name(part)))
    # before FSDP2's hook, which would make real logits of those of a stand-in when it casts them
    split.model.register_forward_hook(
        lambda *_: () if run.is_running and not run.is_on_last_stage else None, prepend=True
    )
    split.model.register_forward_hook(lambda *_: run.end_model() if run.is_running else None)
    if hasattr(split.model, "generate"):
        refuse = partial(_refuse_generate, get_class_name(split.model), run.group.size())
        wrap_method(split.model, refuse, "generate")
    if root is not split.model:
        for name in get_entrances(root):
            wrap_method(root, run.end_entrance, name)
        if not is_lightning_module(root):
            root.register_forward_hook(lambda *_: run.end_wrapper())


def get_optional_pipeline(root: nn.Module) -> PipelineRun | None:
    """Return the runner of the stages of ``root`` or of the model in it, or None if it is not split into stages."""
    run: PipelineRun | None = root.__dict__.get(_ATTRIBUTE)
    return run


def get_pipeline(root: nn.Module) -> PipelineRun:
    """Return the runner of the stages of ``root``.

    Raises:
        ValueError: If ``root`` is not split into stages.
    """
    run = get_optional_pipeline(root)
    if run is None:
        raise ValueError(
            f"{get_class_name(root)} is not split into pipeline stages; shard it with FSDP2 on a mesh from"
            " lightning_fsdp2.create_device_mesh(pp_size=...)."
        )
    return run


def add_over_stages(root: nn.Module, value: Tensor) -> Tensor:
    """Add ``value`` to the values of earlier stages, inside the forward of the model that ``root`` holds.

    Returns:
        The sum, with gradients for all stages. On the last stage, it is the sum over all stages. Without a pipeline, it
        is ``value``.
    """
    run = get_optional_pipeline(root)
    return value if run is None else run.add_over_stages(value)


def get_from_last_stage(root: nn.Module, value: T) -> T:
    """Return ``value`` of the rank that runs the last stage on all ranks of the pipeline; see :mod:`.evaluate`."""
    run = get_optional_pipeline(root)
    return value if run is None else share_from_last_stage(run, value)


def _run_model(run: PipelineRun, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the model's forward on one stage in a step, and through all stages anywhere else."""
    model: Any = run.split.model
    config = model.config.get_text_config()
    asked = [name for name in _RECORDS if kwargs.get(name, getattr(config, name, False))]
    asked += [name for name in CACHE_NAMES if kwargs.get(name) is not None]
    asked += [name for name in ("use_cache",) if kwargs.get(name)]
    if asked:
        value = kwargs.get(asked[0], True)
        raise ValueError(
            f"pp_size={run.group.size()}: {get_class_name(model)} was called with {asked[0]}={value!r}, but each rank"
            " has only the results and caches of its own layers. Leave it out, or use pp_size=1."
        )
    call = run.run_model if run.is_running else partial(evaluate_in_stages, run)
    return call(forward, *args, **_without_cache(model, kwargs))


def _without_cache(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, with ``use_cache=False`` if the model would build a cache by default."""
    return {**kwargs, "use_cache": False} if hasattr(model.config, "use_cache") else kwargs


def _refuse_generate(name: str, ranks: int, generate: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"pp_size={ranks}: {name}.generate() is not possible, because each rank has the caches of its own layers only."
        " Export the model (lightning_fsdp2.export_hf) and generate with the exported model, or use pp_size=1."
    )
