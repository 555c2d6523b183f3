"""The flags of FSDP2, what each value does, and the figures that prove it, for the tests and ``docs/flags.md``.

The figures are those of one training step of a Llama of three layers, 2 sequences of 12 tokens per rank, in float32 if
the flag is not about dtypes. They follow from the model's structure, not from a run:

- units of FSDP2 with weights: the embedding, three layers, [norm, head];
- matrix products of a layer: four of attention, three of the MLP; the head has one; backward computes two for each.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import masking_utils

from helpers.collectives import StepCounter
from helpers.dispatch import LiveBytes, Products
from helpers.float8 import MatrixProducts
from helpers.models import LLAMA, VOCABULARY, make_causal_lm
from lightning_fsdp2 import Float8Config, FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.labels import shift_left
from lightning_fsdp2.parallel.context.apply import shard_sequence
from lightning_fsdp2.parallel.loss.chunked import compute_chunked_token_losses, trace_logits_tail
from lightning_fsdp2.parallel.loss.cross_entropy import token_cross_entropy

LAYERS, UNITS = LLAMA["num_hidden_layers"], 2 + LLAMA["num_hidden_layers"]
PRODUCTS = 3 * (7 * LAYERS + 1)
HIDDEN, INTERMEDIATE, KEYS = LLAMA["hidden_size"], LLAMA["intermediate_size"], 16
LAYER_WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
WEIGHTS = LAYERS * LAYER_WEIGHTS + 2 * VOCABULARY * HIDDEN + HIDDEN
LARGER_HALF = LAYERS * LAYER_WEIGHTS // 2 + 2 * (VOCABULARY + 1) // 2 * HIDDEN + HIDDEN // 2
POSITIONS, CHUNK = 24, 8

BF16 = "bfloat16"
FP32 = "float32"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value of a flag."""

    value: str
    figures: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    ranks: int = 2
    micro_batches: int = 1
    is_slow: bool = False


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of ``FSDP2Config``, or what else decides the same way."""

    name: str
    effect: str
    settings: tuple[Setting, ...] = ()
    measured: bool = True
    """Whether by :func:`measure`; else by a test of its own."""


def make_policies() -> tuple[Setting, ...]:
    dtypes = ("weights", "gathered weights", "products", "residual stream", "logits", "gradients")
    policies = {
        "nothing set": (MixedPrecisionPolicy(), (FP32,) * 6),
        "param_dtype=bfloat16, output_dtype=float32": (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
            (FP32, BF16, BF16, BF16, FP32, FP32),
        ),
        "param_dtype=bfloat16": (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            (FP32, BF16, BF16, BF16, BF16, FP32),
        ),
    }
    return tuple(
        Setting(
            value=name,
            flags={"mp_policy": policy},
            figures=dict(zip(dtypes, row, strict=True)),
            is_slow=name == "param_dtype=bfloat16",
        )
        for name, (policy, row) in policies.items()
    )


FUSED = {
    "forward: all-gathers fused": 2,
    "forward: reduce-scatters fused": 2,
    "backward: all-gathers fused": 2,
    "backward: reduce-scatters left": 2,
}
"""Collectives of a layer under asynchronous tensor parallelism, at micro-batch 1 as at 2."""

FLAGS = (
    Flag(
        name="mp_policy",
        effect="Sets the dtypes of the units. Layers do not cast their output, but the root may. Gradients are reduced"
        " in float32.",
        settings=make_policies(),
    ),
    Flag(
        name="autocast_dtype",
        effect="Runs every forward in torch.autocast. With output_dtype=float32 the residual stream stays in float32.",
        settings=tuple(
            Setting(
                value=f"bfloat16, param_dtype={'None' if dtype is None else BF16}, output_dtype=float32",
                flags={
                    "autocast_dtype": torch.bfloat16,
                    "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, torch.float32),
                },
                figures={
                    "gathered weights": FP32 if dtype is None else BF16,
                    "products": BF16,
                    "residual stream": FP32,
                    "logits": FP32,
                    "gradients": FP32,
                },
                is_slow=dtype is None,
            )
            for dtype in (None, torch.bfloat16)
        ),
    ),
    Flag(
        name="activation_checkpointing",
        effect="full: layers keep only their inputs, and are recomputed in backward. selective: they also keep the"
        " results of fused attention, of reductions over ranks and of every second matrix product, if backward reads"
        " them.",
        settings=(
            Setting(value="False", figures={"matrix products": PRODUCTS, "attentions": LAYERS}),
            Setting(
                value="full",
                flags={"activation_checkpointing": "full"},
                # the layer's last product makes its output, which backward does not need
                figures={"matrix products": PRODUCTS + 6 * LAYERS, "attentions": 2 * LAYERS},
            ),
            Setting(
                value="selective",
                flags={"activation_checkpointing": "selective"},
                figures={"matrix products": PRODUCTS + 3 * LAYERS, "attentions": LAYERS},
            ),
        ),
    ),
    Flag(
        name="float8",
        effect="Makes linear layers multiply in float8, except for the output head. With the recipe"
        " rowwise_with_gw_hp, the gradients of weights are computed in high precision.",
        settings=tuple(
            Setting(
                value=value,
                flags={"float8": float8},
                figures={"products in float8": number, "other matrix products": PRODUCTS - number},
                is_slow=value != "True",
            )
            for value, float8, number in (
                ("None", None, 0),
                ("True", True, 2 * 7 * LAYERS),
                ("recipe=rowwise", Float8Config(recipe="rowwise"), 3 * 7 * LAYERS),
                ("recipe=tensorwise", Float8Config(recipe="tensorwise"), 3 * 7 * LAYERS),
            )
        ),
    ),
    Flag(
        name="enable_compile",
        effect="Compiles each layer; all layers of a kind share a graph. In a forward with gradients, layers get no"
        " key-value cache. Calls that fill a cache (`generate`) run without compilation. The loss of `CausalLM` and"
        " `token_mean_loss` has a separate graph, which is not counted here.",
        settings=(
            Setting(value="False", figures={"graphs": 0}),
            Setting(value="True", is_slow=True, flags={"enable_compile": True}, figures={"graphs": 1}),
            Setting(
                value="True, tp_size=2, sequence_parallel=True",
                is_slow=True,
                flags={"enable_compile": True, "sequence_parallel": True},
                sizes={"tp_size": 2},
                # the first layer splits the sequence, the last one gathers it
                figures={"graphs": 3},
            ),
        ),
    ),
    Flag(
        name="enable_async_tensor_parallel",
        effect="In compiled, sequence parallel layers, collectives overlap the matrix products next to them, on GPUs"
        " that read each other's memory. The counts are for one layer, from the graphs that inductor makes for a CPU:",
        settings=(Setting(value="True", figures=FUSED),),
        measured=False,
    ),
    Flag(
        name="reshard_after_forward",
        effect="Sets which units are freed after forward and gathered again in backward: all except the last layer and"
        " the head (None), all (True), or none (False). With an int, the layers are gathered again within groups of"
        " that many ranks. An untied embedding is not needed in backward.",
        settings=(
            Setting(value="None", figures={"all-gathers": UNITS + LAYERS - 1}),
            Setting(value="True", flags={"reshard_after_forward": True}, figures={"all-gathers": UNITS + LAYERS + 1}),
            Setting(value="False", flags={"reshard_after_forward": False}, figures={"all-gathers": UNITS}),
            Setting(
                value="2, of 4 ranks",
                is_slow=True,
                flags={"reshard_after_forward": 2},
                ranks=4,
                figures={"all-gathers": UNITS + LAYERS},
            ),
        ),
    ),
    Flag(
        name="enable_fsdp2_prefetch, fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth",
        effect="Sets how many units are gathered ahead in a chain of all units. Without prefetching, no unit is"
        " gathered ahead in forward.",
        settings=(
            Setting(value="True, 1, 2", figures={"all-gathers before the first layer": 3}),
            Setting(
                value="True, 2, 1",
                is_slow=True,
                flags={"fsdp2_forward_prefetch_depth": 2, "fsdp2_backward_prefetch_depth": 1},
                figures={"all-gathers before the first layer": 4},
            ),
            Setting(
                value="False",
                flags={"enable_fsdp2_prefetch": False},
                figures={"all-gathers before the first layer": 2},
            ),
        ),
    ),
    Flag(
        name="defer_fsdp_grad_sync",
        effect="True: gradients stay whole until the last micro-batch, and are reduced only there. False: every"
        " micro-batch reduces and shards the gradients; replicas reduce them only in the last micro-batch.",
        settings=tuple(
            Setting(
                value=f"{defers}, {'2 replicas of 2 shards' if ranks == 4 else '2 shards'}, 3 micro-batches",
                flags={"defer_fsdp_grad_sync": defers},
                sizes={"dp_replicate_size": ranks // 2},
                ranks=ranks,
                micro_batches=3,
                is_slow=ranks == 4 or not defers,
                figures={
                    "reduce-scatters": UNITS if defers else 3 * UNITS,
                    "all-reduces": UNITS if ranks == 4 else 0,
                    "bytes of gradients between micro-batches": 4 * (WEIGHTS if defers else LARGER_HALF),
                },
            )
            for ranks in (2, 4)
            for defers in (True, False)
        ),
    ),
    Flag(
        name="offload_policy",
        effect="Keeps shards of parameters, gradients and optimizer states in host memory. On CPU ranks they are there"
        " in any case, so the policy changes nothing.",
        settings=tuple(
            Setting(
                value=value,
                flags={"offload_policy": policy},
                figures={"weights on": "cpu", "gradients on": "cpu", "all-gathers": UNITS + LAYERS - 1},
                is_slow=policy is not True,
            )
            for value, policy in (("None", None), ("True", True), ("{pin_memory: false}", {"pin_memory": False}))
        ),
    ),
    Flag(
        name="patch_is_packed_sequence",
        effect="Stops transformers from looking for packed sequences, because the host would wait for the device. A"
        " batch whose position ids restart or jump is refused. With `CausalLM`, transformers never looks in batches"
        " without position ids, whatever the flag says.",
        settings=(
            Setting(value="False", figures={"searches": 1, "waits of the host": 1}),
            Setting(
                value="True",
                flags={"patch_is_packed_sequence": True},
                figures={"searches": 0, "waits of the host": 0},
            ),
        ),
    ),
    Flag(
        name="tp_size, sequence_parallel, loss_parallel",
        effect="See [tensor_parallel.md](tensor_parallel.md). The counts are of collectives over the tensor parallel"
        " ranks.",
        settings=(
            Setting(
                value="tp_size=2",
                is_slow=True,
                sizes={"tp_size": 2},
                # a layer's attention and MLP sum their results in forward and their inputs' gradients in backward, as
                # do the embedding and the head; the logits are gathered
                figures={"all-reduces": 4 * LAYERS + 2, "all-gathers": 1, "reduce-scatters": 0},
            ),
            Setting(
                value="tp_size=2, loss_parallel=True",
                sizes={"tp_size": 2},
                flags={"loss_parallel": True},
                figures={"all-reduces": 4 * LAYERS + 2 + 2, "all-gathers": 0, "reduce-scatters": 0},
            ),
        ),
    ),
    Flag(
        name="cp_size, context_parallel_method",
        effect="See [context_parallel.md](context_parallel.md). The counts include the collectives of FSDP2. With"
        " allgather, the keys and values of a layer are gathered in forward and in backward, and their gradients are"
        " sent back. With ulysses, heads are exchanged before and after attention, in forward and in backward.",
        settings=(
            Setting(
                value="cp_size=2, allgather",
                sizes={"cp_size": 2},
                flags={"context_parallel_method": "allgather"},
                figures={
                    "rows of logits": POSITIONS // 2,
                    "all-gathers": UNITS + LAYERS - 1 + 2 * LAYERS,
                    "reduce-scatters": UNITS,
                    "all-to-alls": LAYERS,
                },
            ),
            Setting(
                value="cp_size=2, ulysses",
                is_slow=True,
                sizes={"cp_size": 2},
                flags={"context_parallel_method": "ulysses"},
                figures={
                    "rows of logits": POSITIONS // 2,
                    "all-gathers": UNITS + LAYERS - 1,
                    "reduce-scatters": UNITS,
                    "all-to-alls": 4 * LAYERS,
                },
            ),
        ),
    ),
    Flag(
        name="CausalLM(loss=)",
        effect="chunked: the logits exist only for one chunk of positions at a time (1024; here 8 of 24).",
        settings=(
            Setting(value="full", figures={"rows of logits": POSITIONS, "all-gathers": UNITS + LAYERS - 1}),
            Setting(value="chunked", figures={"rows of logits": CHUNK, "all-gathers": UNITS + LAYERS - 1}),
        ),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    """The figures of a step, on every rank of ``run_ranks``. Two others precede it, in which layers are compiled."""
    run = _Run(setting)
    for _ in range(2):
        run.step()
    graphs = counters["stats"]["unique_graphs"]
    with (
        _count_searches() as searches,
        StepCounter() as counter,
        Products(VOCABULARY) as products,
        MatrixProducts() as matrices,
    ):
        run.watch(counter)
        between = run.step()
    parameters = list(run.model.parameters())
    return {
        "graphs": graphs,
        "bytes of gradients between micro-batches": between,
        "searches": searches["count"],
        "waits of the host": counter.host_syncs,
        "all-gathers": counter.collectives["all_gather"],
        "reduce-scatters": counter.collectives["reduce_scatter"],
        "all-reduces": counter.collectives["all_reduce"],
        "all-to-alls": counter.collectives["all_to_all"],
        "all-gathers before the first layer": run.seen["gathered"],
        "attentions": counter.operations["aten::_scaled_dot_product_flash_attention_for_cpu"],
        "matrix products": counter.operations["aten::mm"],
        "products in float8": matrices.counts["_scaled_mm"],
        "other matrix products": matrices.counts["mm"],
        "rows of logits": products.rows,
        "products": _name(products.dtypes),
        "weights on": _name({parameter.device for parameter in parameters}),
        "gradients on": _name({parameter.grad.device for parameter in parameters}),
        "weights": _name({parameter.dtype for parameter in parameters}),
        "gathered weights": _name({run.seen["weight"]}),
        "residual stream": _name({run.seen["residual"]}),
        "logits": _name({run.seen["logits"]}),
        "gradients": _name({parameter.grad.dtype for parameter in parameters}),
    }


class _Run:
    """A model on a mesh, and what its last step showed."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.config = FSDP2Config(**{"mp_policy": MixedPrecisionPolicy(), **setting.flags})
        model = make_causal_lm(LLAMA)
        self.tail = trace_logits_tail(model) if setting.value == "chunked" else None
        mesh = create_device_mesh(self.config, **setting.sizes)
        self.model: Any = FSDP2Manager(self.config, mesh).parallelize(model)
        self.seen: dict[str, Any] = {}

    def watch(self, counter: StepCounter) -> None:
        layer = self.model.model.layers[0]

        def look(*_: Any) -> None:
            self.seen.setdefault("gathered", counter.collectives["all_gather"])
            self.seen["weight"] = layer.mlp.up_proj.weight.dtype

        layer.mlp.register_forward_pre_hook(look)
        layer.register_forward_hook(lambda module, args, output: self.seen.update(residual=output.dtype))

    def step(self) -> int:
        """Train on the micro-batches, and return the bytes of gradients that the first of several leaves."""
        self.model.zero_grad()
        left = 0
        for index in range(self.setting.micro_batches - 1):
            watches = LiveBytes(self.model) if index == 0 else nullcontext()
            with defer_grad_sync(self.model, reduce_scatter=not self.config.defer_fsdp_grad_sync), watches:
                self.compute_loss().backward()
            left = watches.count() if isinstance(watches, LiveBytes) else left
        self.compute_loss().backward()
        return left

    def compute_loss(self) -> Tensor:
        input_ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
        labels = shard_sequence(self.model, shift_left(input_ids))

        def compute_logits() -> Tensor:
            logits = self.model(input_ids=input_ids, use_cache=False).logits
            self.seen["logits"] = logits.dtype
            return logits

        if self.tail is None:
            return token_cross_entropy(compute_logits(), labels).sum()
        return compute_chunked_token_losses(self.model, compute_logits, labels, tail=self.tail, chunk_size=CHUNK).sum()


@contextmanager
def _count_searches() -> Iterator[Counter[str]]:
    count: Counter[str] = Counter()
    original = masking_utils.find_packed_sequence_indices

    def find(position_ids: Tensor) -> Tensor | None:
        count["count"] += 1
        return original(position_ids)

    with patch.object(masking_utils, "find_packed_sequence_indices", find):
        yield count


def _name(values: set[Any]) -> str:
    return ", ".join(sorted(str(value).removeprefix("torch.") for value in values))
