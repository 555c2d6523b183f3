"""Plans of whole runs, each of its ranks in a process of its own."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import make_causal_lm
from helpers.planning import BATCH, LAYERS, LENGTH, LLAMA, WIDTH, make_batch, make_module, make_trainer
from helpers.user_modules import Normalized, UserModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader

from lightning_fsdp2 import (
    CausalLM,
    DDPConfig,
    DDPStrategy,
    Float8Config,
    FSDP2Config,
    FSDP2Strategy,
    TextDataModule,
)
from lightning_fsdp2.callbacks.model_flops import get_flops_per_token
from lightning_fsdp2.plan import Device, Plan, describe, get_device, plan_run
from lightning_fsdp2.plan.notes import _name_remedies
from lightning_fsdp2.plan.run import make_planner
from lightning_fsdp2.plan.simulation.blocks import Summary
from lightning_fsdp2.plan.simulation.reserved import Reserved

SMALL = replace(get_device("h100"), memory=40 * 2**20)
"""Too small for the Llama of the tests."""


def plan(strategy: Any = None, batch: Any = None, *, trainer: dict[str, Any] | None = None, **options: Any) -> Plan:
    made = make_trainer(FSDP2Strategy() if strategy is None else strategy, **(trainer or {}))
    if batch is None and "datamodule" not in options:
        batch = make_batch()
    return plan_run(made, options.pop("module", None) or make_module(), batch, **{"world_size": 4, **options})


@pytest.fixture(scope="module")
def usual() -> Plan:
    """The plan of FSDP2 on four ranks."""
    return plan()


def test_a_plan_says_what_is_run_and_what_it_takes(usual: Plan) -> None:
    assert usual.model == "CausalLM (LlamaForCausalLM)"
    assert usual.mesh == {"dp_replicate": 1, "dp_shard": 4, "context_parallel": 1, "tensor_parallel": 1}
    assert (usual.world_size, usual.nodes) == (4, 1)
    assert usual.batch.shapes == {"input_ids": (BATCH, LENGTH), "labels": (BATCH, LENGTH)}
    assert (usual.batch.samples, usual.batch.tokens) == (4 * BATCH, 4 * BATCH * LENGTH)
    assert sum(group["parameters"] for group in usual.placements) == usual.parameters
    assert [rank.rank for rank in usual.ranks] == [0]  # all hold as much
    assert usual.verdict == "fits"
    assert usual.changes == []
    assert 0 < usual.at_least < usual.estimate
    assert usual.peak_bytes < usual.reserved.least < usual.reserved.most
    used = usual.get_utilisation(usual.at_least)
    assert used is not None
    assert 0 < used < 1
    timeline = usual.ranks[0].timeline
    assert max(sum(moment.bytes.values()) for moment in timeline) == usual.peak_bytes


@pytest.mark.slow
def test_traffic_is_told_by_the_axis_of_the_mesh() -> None:
    planned = plan(FSDP2Strategy(tp_size=2, config=FSDP2Config(sequence_parallel=True)))
    assert planned.mesh == {"dp_replicate": 1, "dp_shard": 2, "context_parallel": 1, "tensor_parallel": 2}
    assert (planned.batch.samples, planned.batch.tokens) == (2 * BATCH, 2 * BATCH * LENGTH)
    axes = {(entry.kind, entry.axis) for entry in planned.ranks[0].traffic}
    assert {("all-gather", "dp_shard"), ("reduce-scatter", "tensor_parallel")} <= axes


def test_described_it_is_the_tables_of_the_command(usual: Plan) -> None:
    text = describe(usual)
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("model        CausalLM (LlamaForCausalLM)")
    assert "\nfits: " in text


def test_it_is_plain_values_for_json(usual: Plan) -> None:
    plain = json.loads(json.dumps(usual.to_dict()))
    assert plain["peak_bytes"] == sum(plain["ranks"][0]["peak"].values())
    assert plain["world_size"] == 4


@pytest.mark.slow
def test_the_users_own_trainer_and_module_stay_as_they_are() -> None:
    trainer, module = make_trainer(FSDP2Strategy(), accumulate_grad_batches=2), make_module()
    first = plan_run(trainer, module, make_batch(), world_size=2)
    assert module.model is None
    assert trainer.accumulate_grad_batches == 2
    assert plan_run(trainer, module, make_batch(), world_size=2) == first


@pytest.mark.slow
def test_ranks_that_are_asked_for() -> None:
    assert [rank.rank for rank in plan(ranks=[3, 1]).ranks] == [1, 3]
    uneven = plan(world_size=3)
    assert [rank.rank for rank in uneven.ranks] == [0, 2]


# ---------------------------------------------------------------------- float8


@pytest.mark.slow
def test_a_plan_says_whether_float8_pays() -> None:
    """At these sizes it does not: casts take longer than the products of small matrices."""
    config = FSDP2Config(float8=True)
    planned = plan(FSDP2Strategy(config=config), world_size=2)
    assert planned.float8 is not None
    assert len(planned.float8.converted) == 7 * LAYERS
    assert json.loads(json.dumps(planned.to_dict()))["float8"]["left_out"] == {"lm_head": "output head"}
    note = next(note for note in planned.notes if "float8" in note)
    assert note.startswith("14 linear layers multiply in float8 (rowwise_with_gw_hp), but not lm_head (output head).")
    assert "float8 does not pay. enable_compile=True fuses" in note
    assert "14 of these layers are too small to gain from float8 by torchao's rule" in note
    bfloat16 = planned.device.get_peak_flops(torch.bfloat16)
    assert bfloat16 < planned.peak_flops < 2 * bfloat16


@pytest.mark.slow
def test_float8_pays_for_large_matrices() -> None:
    wide = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 1, "num_attention_heads": 64}
    config = FSDP2Config(float8=Float8Config(recipe="tensorwise"), enable_compile=True)
    module = CausalLM(config=wide)
    planned = plan(FSDP2Strategy(config=config), make_batch(4, 2048), module=module, world_size=8)
    note = next(note for note in planned.notes if "float8" in note)
    assert re.search(r"makes it 1\.[1-9]\d times as fast\.$", note), note


@pytest.mark.guarantees("devices-of-float8")
def test_a_device_without_units_for_float8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^float8: A100 cannot multiply in float8, .*emulate=True"):
        plan(FSDP2Strategy(config=FSDP2Config(float8=True)), device="a100")


@pytest.mark.slow
def test_emulated_float8_is_planned_on_any_device_and_called_so() -> None:
    config = FSDP2Config(float8=Float8Config(emulate=True))
    note = next(note for note in plan(FSDP2Strategy(config=config), device="a100").notes if "float8" in note)
    assert note.startswith("14 linear layers emulate float8 in float32 (rowwise_with_gw_hp)")
    assert "float8 does not pay. emulate=False multiplies in float8." in note


@pytest.mark.slow
def test_this_machine_need_not_multiply_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("lightning_fsdp2.parallel.layers.float8._try_products", fail)
    assert plan(FSDP2Strategy(config=FSDP2Config(float8=True))).float8 is not None


# ---------------------------------------------------------------------- pipelines

STAGES = 4


def plan_pipeline(*, layers: int = STAGES, ranks: list[int] | None = None, **flags: Any) -> Plan:
    stages = STAGES * flags.get("pp_stages_per_rank", 1)
    flags = {"pp_layers_per_stage": [layers // stages] * stages, **flags}
    strategy = FSDP2Strategy(pp_size=STAGES, config=FSDP2Config(**flags))
    module = make_module(layers=layers)
    return plan(strategy, make_batch(16), module=module, world_size=2 * STAGES, ranks=ranks, suggest=False)


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    """The plan of four stages on two ranks each, with eight micro-batches of two rows."""
    return plan_pipeline()


@pytest.mark.slow
def test_a_pipeline_is_planned_by_the_stages_that_differ(pipeline: Plan) -> None:
    assert pipeline.world_size == 8
    assert [rank.rank for rank in pipeline.ranks] == [0, 2, 6]  # the first ranks of stages 0, 1 and 3
    assert pipeline.pipeline is not None
    assert (pipeline.pipeline.micro_batches, pipeline.pipeline.rows) == (8, 2)
    assert pipeline.pipeline.in_flight == [4, 3, 2, 1]
    assert pipeline.pipeline.bubble == pytest.approx(3 / (8 + 3))
    # the whole model counts, not only the first stage
    whole = make_causal_lm({**LLAMA, "num_hidden_layers": STAGES})
    assert pipeline.parameters == pipeline.trained_parameters == sum(p.numel() for p in whole.parameters())
    assert pipeline.model_flops == get_flops_per_token(whole, LENGTH) * LENGTH * 2 * 16


@pytest.mark.slow
def test_each_boundary_is_crossed_once_per_micro_batch_and_direction(pipeline: Plan) -> None:
    activation = 2 * 2 * LENGTH * WIDTH  # of two rows, in bfloat16
    for rank, neighbours in zip(pipeline.ranks, (1, 2, 1), strict=True):
        found = {entry.kind: entry for entry in rank.traffic}
        for kind in ("send", "receive"):
            assert found[kind].axis == "pipeline_parallel"
            assert (found[kind].calls, found[kind].bytes) == (8 * neighbours, 8 * neighbours * activation)
        # units are gathered and reduced once, whatever the number of micro-batches
        assert found["all-gather"].calls == found["reduce-scatter"].calls < 8
    first, middle, last = (rank.peak for rank in pipeline.ranks)
    assert first["logits and loss"] == middle["logits and loss"] == 0 < last["logits and loss"]


@pytest.mark.slow
def test_ranks_of_a_pipeline_wait_and_a_step_lasts_equally_long_for_all(pipeline: Plan) -> None:
    # the last rank, with the head and the loss, is the slowest one
    assert min(pipeline.ranks, key=lambda rank: rank.reached.waiting).rank == 6
    busy = [sum(8 * time.estimate for time in rank.actions) for rank in pipeline.ranks]
    waiting = [rank.reached.waiting for rank in pipeline.ranks]
    assert [b + w for b, w in zip(busy, waiting, strict=True)] == pytest.approx([busy[0] + waiting[0]] * 3)
    assert pipeline.estimate > busy[-1] + waiting[-1]  # and the optimizer


@pytest.mark.slow
def test_a_pipeline_is_told_in_the_tables(pipeline: Plan) -> None:
    text = describe(pipeline)
    assert max(map(len, text.splitlines())) <= 100
    assert "pipeline_parallel 4" in text
    assert "1f1b, 4 stages of" in text
    assert "8 micro-batches of 2 samples" in text
    assert "27.3% of" in text
    assert "micro-batches in flight" in text
    plain = json.loads(json.dumps(pipeline.to_dict()))
    assert plain["pipeline"]["in_flight"] == [4, 3, 2, 1]


@pytest.mark.slow
def test_of_a_pipeline_any_rank_can_be_planned(pipeline: Plan) -> None:
    (third,) = plan_pipeline(ranks=[4]).ranks
    first, middle, _ = pipeline.ranks
    assert third.peak_bytes < middle.peak_bytes < first.peak_bytes  # by the micro-batches in flight
    assert third.reached.waiting == pytest.approx(middle.reached.waiting)


@pytest.mark.slow
def test_gpipe_keeps_more_activations(pipeline: Plan) -> None:
    other = plan_pipeline(pp_schedule="gpipe", pp_microbatches=8)
    assert other.ranks[0].peak["activations"] > 1.2 * pipeline.ranks[0].peak["activations"]
    assert other.pipeline is not None
    assert other.pipeline.bubble == pytest.approx(3 / (8 + 3))
    assert [rank.rank for rank in other.ranks] == [0, 2, 6]


@pytest.mark.slow
def test_interleaved_stages_keep_more_activations(pipeline: Plan) -> None:
    other = plan_pipeline(
        layers=2 * STAGES, ranks=[0], pp_schedule="interleaved_1f1b", pp_stages_per_rank=2, pp_microbatches=8
    )
    # than stages of two layers, which keep twice as much as those of one
    assert other.ranks[0].peak["activations"] > 1.2 * 2 * pipeline.ranks[0].peak["activations"]
    assert other.pipeline is not None
    assert other.pipeline.bubble == pytest.approx(3 / (2 * 8 + 3))


# ---------------------------------------------------------------------- batches


def test_a_data_module_of_this_package_is_asked_for_shapes_and_reads_nothing() -> None:
    data = TextDataModule(dataset="nowhere", sequence_length=LENGTH, batch_size=BATCH, global_batch_size=4 * BATCH)
    planned = plan(datamodule=data, world_size=2)
    assert planned.batch.shapes["input_ids"] == (BATCH, LENGTH)
    assert (planned.batch.accumulation, planned.batch.samples) == (2, 4 * BATCH)


def test_shapes_of_batches_in_containers() -> None:
    class Nested(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["of"]["inputs"], batch["targets"]), batch_idx)

    batch = {"of": {"inputs": torch.zeros(8, 256)}, "targets": torch.zeros(8, 256)}
    planned = plan(batch=batch, module=Nested(), trainer={"precision": "32-true"})
    assert planned.batch.shapes == {"of.inputs": (8, 256), "targets": (8, 256)}
    assert planned.batch.tokens is None
    assert planned.get_utilisation(planned.at_least) is None


@pytest.mark.slow
def test_documents_that_are_kept_apart_take_memory_for_their_masks() -> None:
    options = {"dataset": "nowhere", "sequence_length": LENGTH, "batch_size": BATCH}
    together = plan(datamodule=TextDataModule(**options))
    apart = plan(datamodule=TextDataModule(**options, separate_documents=True))
    assert apart.peak_bytes - together.peak_bytes >= BATCH * LENGTH * LENGTH  # a mask of bools


@pytest.mark.slow
def test_documents_and_windows_under_context_parallelism_cost_what_is_seen() -> None:
    def count(positions: torch.Tensor | None) -> int:
        batch = make_batch()
        if positions is not None:
            batch["position_ids"] = positions.expand(BATCH, -1)
        strategy = FSDP2Strategy(cp_size=2, config=FSDP2Config(context_parallel_method="ulysses"))
        return plan(strategy, batch).ranks[0].flops

    halves = torch.arange(LENGTH) % (LENGTH // 2)
    # half of all pairs, as a causal kernel is counted, less those that are seen
    pairs = LENGTH * LENGTH // 2 - (LENGTH // 2) * (LENGTH // 2 + 1)
    heads, layers = LLAMA["num_attention_heads"] // 2, LLAMA["num_hidden_layers"]  # of a rank
    head_size = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    products = 2 + 5  # forward and backward
    assert count(None) - count(halves) == products * 2 * BATCH * heads * head_size * layers * pairs


class OwnData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader([{name: tensor[0] for name, tensor in make_batch(1).items()}] * 6, 3)


@pytest.mark.slow
def test_of_other_data_modules_the_first_batch_is_read() -> None:
    assert plan(datamodule=OwnData()).batch.shapes["labels"] == (3, LENGTH)


class Regressor(UserModule):
    make_optimizer = torch.optim.AdamW

    def build(self) -> None:
        with torch.device("meta"):
            self.layers = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(3)])

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return (inputs - targets).square().mean()


@pytest.mark.slow
def test_any_module() -> None:
    planned = plan(
        batch=(torch.zeros(8, 256), torch.zeros(8, 256)), module=Regressor(), trainer={"precision": "32-true"}
    )
    assert planned.parameters == 3 * (256 * 256 + 256)
    assert planned.batch.tokens is None
    assert planned.get_utilisation(planned.at_least) is None


class Hooked(Regressor):
    """Does what many modules do."""

    def setup(self, stage: str) -> None:
        self.scale = 2.0

    def on_train_start(self) -> None:
        self.offset = torch.ones(1)

    def train_dataloader(self) -> Any:
        return DataLoader([(torch.zeros(256), torch.zeros(256))] * 8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.scale * super().training_step(batch, batch_idx) + self.offset.sum()
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return {"loss": loss, "other": loss.detach()}


@pytest.mark.guarantees("same-code")
def test_a_module_with_hooks_a_log_and_data_of_its_own() -> None:
    planned = plan(module=Hooked(), datamodule=None, trainer={"precision": "32-true", "gradient_clip_val": None})
    assert planned.batch.shapes == {"0": (8, 256), "1": (8, 256)}
    assert [entry.bytes for entry in planned.ranks[0].traffic if entry.kind == "all-reduce"] == [4]  # of the log


class ByHand(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class OwnCallback(pl.Callback): ...


def test_what_is_not_planned_is_said() -> None:
    batch = (torch.zeros(8, 256), torch.zeros(8, 256))
    callbacks = [OwnCallback(), pl.callbacks.Timer(), StochasticWeightAveraging(0.1)]
    planned = plan(batch=batch, module=ByHand(), trainer={"gradient_clip_val": None, "callbacks": callbacks})
    notes = "\n".join(planned.notes)
    assert "optimizes by hand" in notes
    assert "Not taken into account:" in notes
    assert "OwnCallback" in notes
    assert "StochasticWeightAveraging" in notes
    assert "Timer" not in notes


MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_the_products_of_experts_count() -> None:
    (rank,) = plan(batch=make_batch(1, 256), module=CausalLM(config=MIXTRAL), world_size=1).ranks
    experts = 2 * 3 * 128 * 256  # of each token, in a layer
    layer = experts + 4 * 128 * 128 + 128 * 4
    attention = (2 + 5) * 2 * 256 * 256 * 128 // 2  # scores and values, and five in backward; half, being causal
    assert rank.flops == pytest.approx(6 * 256 * (2 * layer + 128 * 512) + 2 * attention, rel=0.01)


@pytest.mark.guarantees("uneven-routing")
@pytest.mark.slow
def test_a_rank_whose_experts_get_more_tokens_keeps_more_for_backward(usual: Plan) -> None:
    planned = plan(FSDP2Strategy(ep_size=4), make_batch(1, 256), module=CausalLM(config=MIXTRAL))
    assert planned.uneven is not None
    rows = 256 * 2  # a token has two experts, and a rank gets as many rows as it sends
    # of each further row, in bfloat16: itself, both projections, the activation of one, and their product
    kept = 2 * (128 + (2 + 1 + 1) * 256)
    layers = 2
    assert planned.uneven.peak_bytes - planned.peak_bytes == pytest.approx(layers * rows * kept, rel=0.01)
    assert planned.to_dict()["ranks"][0]["uneven"]["peak_bytes"] == planned.uneven.peak_bytes
    text = describe(planned)
    assert "allocated at 2 times the load" in text
    assert "Routing is assumed to be even" in text
    assert usual.uneven is None
    # all ranks are a group of experts and of shards
    axes = {(entry.kind, entry.axis) for entry in planned.ranks[0].traffic}
    assert {("all-to-all", "ep"), ("all-gather", "dp_shard")} <= axes


@pytest.mark.slow
def test_each_rank_has_its_own_memory_at_uneven_routing() -> None:
    def plan_ranks(*ranks: int, **flags: Any) -> list[Any]:
        # 511 rows of the embedding do not divide by four, so the shards differ
        module = CausalLM(config={**MIXTRAL, "vocab_size": 511})
        strategy = FSDP2Strategy(ep_size=2, config=FSDP2Config(**flags))
        planned = plan(strategy, make_batch(1, 256), module=module, ranks=list(ranks))
        return [rank.uneven for rank in planned.ranks]

    first, last = plan_ranks(0, 3)
    assert [first] == plan_ranks(0)
    assert [last] == plan_ranks(3)
    assert first.peak_bytes > last.peak_bytes
    (offloaded,) = plan_ranks(0, offload_policy=True)
    assert offloaded.peak_bytes < first.peak_bytes


# ---------------------------------------------------------------------- what does not fit


def with_memory(planned: Plan, memory: int) -> Plan:
    return replace(planned, device=replace(planned.device, memory=memory))


@pytest.mark.guarantees("verdicts")
def test_what_is_allocated_and_what_is_held_decide(usual: Plan) -> None:
    peak, most = usual.peak_bytes, usual.reserved.most
    verdicts = [with_memory(usual, memory).verdict for memory in (peak - 1, peak, most - 1, most)]
    assert verdicts == ["does not fit", "tight", "tight", "fits"]


@pytest.mark.guarantees("verdicts")
def test_each_verdict_is_said_with_what_is_missing(usual: Plan) -> None:
    text = describe(with_memory(usual, usual.peak_bytes + 2**20))
    assert "\ntight: " in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\ndoes not fit by 1.0 MiB: " in describe(with_memory(usual, usual.peak_bytes - 2**20))


@pytest.mark.parametrize(
    ("part", "config", "remedy"),
    [
        ("unsharded gradients", FSDP2Config(), "defer_fsdp_grad_sync=False shards them after every micro-batch"),
        ("unsharded gradients", FSDP2Config(defer_fsdp_grad_sync=False), None),
        ("activations", DDPConfig(), "activation_checkpointing recomputes them"),
        ("activations", FSDP2Config(activation_checkpointing="full"), None),
    ],
)
def test_the_flag_against_the_largest_part_of_the_memory_is_named(
    usual: Plan, part: str, config: Any, remedy: str | None
) -> None:
    (rank,) = usual.ranks
    large = with_memory(replace(usual, ranks=[replace(rank, peak={**rank.peak, part: 2**40})]), 2**30)
    expected = [] if remedy is None else [f"1024.0 GiB of the memory are {part}: {remedy}."]
    assert _name_remedies(large, config) == expected
    assert _name_remedies(usual, config) == []


@pytest.mark.guarantees("changes-that-help")
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(FSDP2Strategy, marks=pytest.mark.slow, id="fsdp2"),
        pytest.param(
            lambda: DDPStrategy(DDPConfig(activation_checkpointing=False)), marks=pytest.mark.release, id="ddp"
        ),
    ],
)
def test_each_change_that_is_named_gives_what_it_says(strategy: Any) -> None:
    planned = plan(strategy(), device=SMALL, datamodule=make_data(BATCH))
    assert planned.verdict == "does not fit"
    assert 1 <= len(planned.changes) <= 3
    for change in planned.changes:
        assert change.peak_bytes < planned.peak_bytes
        again = plan_with(strategy(), change.config, device=SMALL)
        assert (again.peak_bytes, again.reserved) == (change.peak_bytes, change.reserved)
        assert (again.at_least, again.estimate) == pytest.approx((change.at_least, change.estimate))


@pytest.mark.guarantees("changes-that-help")
def test_changes_are_combined_until_one_fits_with_other_layouts_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(run: Any, layouts: list[Any], **options: Any) -> Any:
        """Recomputation, reductions and tensor parallelism halve the memory, which has to become a quarter."""
        for layout in layouts:
            config = layout.config
            halvings = (config.activation_checkpointing == "full") + (not config.defer_fsdp_grad_sync) + layout.tp // 2
            size = 2**33 >> halvings
            yield layout, Summary([], {"forward": size - layout.tp // 2}, Reserved(size, size))

    monkeypatch.setattr("lightning_fsdp2.plan.remedies.simulate_all", simulate)
    planner = make_planner(
        make_trainer(FSDP2Strategy(), accumulate_grad_batches=2),
        make_module(),
        make_batch(),
        world_size=4,
        device=replace(get_device("h100"), memory=2**31),
    )
    large = SimpleNamespace(peak_bytes=2**33, verdict="does not fit")
    first, *_ = names = [change.name for change in planner.find_changes(cast(Plan, large))]
    assert first == "activation_checkpointing='full', defer_fsdp_grad_sync=False"
    assert [name for name in names if "tp_size" not in name] == [first]


def plan_with(strategy: Any, config: dict[str, Any], *, device: Device) -> Plan:
    """Set what a change's YAML says, by hand."""
    trainer = config.get("trainer", {})
    options = dict(trainer.get("strategy", {}).get("init_args", {}))
    flags = options.pop("config", {})
    made = type(strategy)(config=type(strategy.config)(**flags), **options)
    data = make_data(**{"batch_size": BATCH, **config.get("data", {}).get("init_args", {})})
    trainer_options = {name: value for name, value in trainer.items() if name != "strategy"}
    module = make_module(**config.get("model", {}).get("init_args", {}))
    return plan(made, datamodule=data, module=module, device=device, suggest=False, trainer=trainer_options)


def make_data(batch_size: int) -> TextDataModule:
    return TextDataModule(dataset="nowhere", sequence_length=LENGTH, batch_size=batch_size)


@pytest.mark.slow
def test_what_is_offloaded_is_not_counted(usual: Plan) -> None:
    offloaded = plan(FSDP2Strategy(config=FSDP2Config(offload_policy=True)))
    peak = offloaded.ranks[0].peak
    assert not any(peak[name] for name in ("weights", "gradients", "optimizer states"))
    assert usual.peak_bytes > offloaded.peak_bytes
    assert any("host memory" in note for note in offloaded.notes)


# ---------------------------------------------------------------------- bad input


class WithoutLoss(Normalized):
    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()

    def training_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "v100"}, "device='v100' is not known"),
        ({"processes": 0}, "processes=0 is less than 1; use >= 1"),
        ({"strategy": DDPStrategy(DDPConfig(find_unused_parameters=True))}, "find_unused_parameters=True: DDP reads"),
        ({"module": Normalized(), "batch": torch.zeros(2, 8)}, "Normalized: net.0.weight and 5 other parameters have"),
        ({"module": WithoutLoss(), "batch": torch.zeros(2, 4)}, "WithoutLoss: its step runs no backward"),
        ({"world_size": 0}, "world_size=0 is not a number of ranks"),
        ({"world_size": 12}, "world_size=12 is not a multiple of the 8 devices of a node; use 8"),
        ({"ranks": [4]}, "ranks=.4.: choose from 0 to 3"),
        ({"strategy": FSDP2Strategy(tp_size=3)}, "tp_size=3 = 3 does not divide the world size 4"),
        ({"strategy": FSDP2Strategy(tp_size=4)}, "tp_size=4 does not divide num_key_value_heads=2"),
        (
            {"batch": {"input_ids": torch.zeros(2, 8), "other": torch.zeros(3)}},
            "dim 0 of its tensors has the different sizes .2, 3.",
        ),
        ({"datamodule": None, "batch": None}, "A plan needs the shapes of a batch"),
        (
            {"datamodule": TextDataModule(dataset="nowhere", batch_size=3, global_batch_size=16)},
            "global_batch_size=16 is not a multiple of batch_size=3",
        ),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(options.pop("strategy", None), **options)
