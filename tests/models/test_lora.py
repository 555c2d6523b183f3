"""LoRA of a CausalLM: the adapters' gradients are those of peft in one process, the base stays as it was."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.cover import Matrix
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.lora import (
    FAMILIES,
    LORA,
    assert_equal_tensors,
    fit,
    get_logits,
    get_weights,
    make_module,
    make_plain,
    save_base,
)
from helpers.mesh_runs import Case, check_parity, train_alone, train_on_mesh
from helpers.models import LLAMA, make_token_batches
from helpers.oracle import assert_equal_runs, token_sum_loss
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import WithModel
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import (
    CausalLM,
    CheckpointConfig,
    DDPConfig,
    DDPStrategy,
    FSDP2Config,
    FSDP2Strategy,
    MegatronFSDPStrategy,
    export_hf,
)
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.models.lora import build_lora_config, to_mapping

SP = FSDP2Config(sequence_parallel=True)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp_size": 2}),
    "dp2-tp2-sp": (4, {"tp_size": 2, "config": SP}),
}
CELLS = {f"{family}-{mesh}": (family, mesh) for family in FAMILIES for mesh in MESHES}


def describe(family: str, mesh: str) -> dict[str, Any]:
    """Return the features of a cell. Data parallelism is none: it shards adapters like all weights, on every mesh."""
    _, options = MESHES[mesh]
    return {
        "family": family,
        "tp_size": options.get("tp_size", 1),
        "sequence_parallel": options.get("config", FSDP2Config()).sequence_parallel,
    }


MATRIX = Matrix(
    "adapters of families",
    {name: describe(*cell) for name, cell in CELLS.items()},
    always=("gpt2-tp2",),
    costs={name: MESHES[mesh][0] for name, (_, mesh) in CELLS.items()},
)


# ---------------------------------------------------------------------- parity


@pytest.mark.guarantees("lora-gradients-and-exports", "adapters-of-three-families")
@pytest.mark.parametrize(("family", "mesh"), MATRIX.list_parameters(CELLS))
def test_gradients_and_the_merged_export_are_those_of_one_process(family: str, mesh: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", family)
    ranks, strategy = MESHES[mesh]

    def run() -> None:
        modules: list[CausalLM] = []

        def make() -> CausalLM:
            modules.append(make_module(base, family))
            return modules[0]

        case = Case(
            make_module=make,
            make_model=lambda: make_plain(base, family),
            loss=token_sum_loss,
            batches=make_token_batches(8),
            strategy=strategy,
            steps=2,
            accumulate=2,
            clip=0.5,
        )
        actual = train_on_mesh(case)
        assert all(isinstance(parameter, DTensor) for parameter in modules[0].parameters())
        export_hf(modules[0], tmp_path / "merged", merge=True)
        if dist.get_rank() == 0:
            expected = train_alone(case, actual.initial, ranks // strategy.get("tp_size", 1))
            assert all("lora_" in name for name in expected.gradients[0])
            assert_equal_runs(actual, expected)
            model: Any = make_plain(base, family)
            model.load_state_dict(expected.weights, strict=False)
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
            assert_equal_tensors(merged.state_dict(), model.merge_and_unload().state_dict(), atol=5e-5)

    run_ranks(run, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDP2Strategy, DDPStrategy], ids=["fsdp2", "ddp"])
def test_bfloat16_is_as_close_as_that_of_one_process(strategy: Any, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")

    def run() -> None:
        case = Case(
            make_module=lambda: make_module(base),
            make_model=lambda: make_plain(base),
            loss=token_sum_loss,
            batches=make_token_batches(12, ragged=False),
            precision="bf16-mixed",
            strategy_class=strategy,
        )
        check_parity(case)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- with everything else

AC = FSDP2Config(activation_checkpointing=True)
WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "dp": lambda: {"strategy": FSDP2Strategy()},
    "hsdp": lambda: {"strategy": FSDP2Strategy(dp_replicate_size=2)},
    "ddp": lambda: {"strategy": DDPStrategy()},
    "ddp-checkpointing": lambda: {"strategy": DDPStrategy(config=DDPConfig(activation_checkpointing=True))},
    "lightnings-ddp": lambda: {"strategy": LightningDDPStrategy()},
    "megatron": lambda: {"strategy": MegatronFSDPStrategy()},
    "megatron-meta": lambda: {
        "strategy": MegatronFSDPStrategy(config=STRATEGIES["megatron_fsdp"].config(init_fsdp_with_meta_device=True))
    },
    "offload": lambda: {"strategy": FSDP2Strategy(config=FSDP2Config(offload_policy=True))},
    "checkpointing": lambda: {"strategy": FSDP2Strategy(config=AC)},
    "selective-sp": lambda: {
        "strategy": FSDP2Strategy(
            tp_size=2, config=FSDP2Config(activation_checkpointing="selective", sequence_parallel=True)
        )
    },
    "sp-loss-chunked": lambda: {
        "strategy": FSDP2Strategy(tp_size=2, config=FSDP2Config(sequence_parallel=True, loss_parallel=True)),
        "loss": "chunked",
    },
    "chunked": lambda: {"strategy": FSDP2Strategy(), "loss": "chunked"},
    "cp-allgather": lambda: {"strategy": FSDP2Strategy(cp_size=2)},
    "cp-ulysses": lambda: {
        "strategy": FSDP2Strategy(cp_size=2, config=FSDP2Config(context_parallel_method="ulysses")),
        "loss": "chunked",
    },
    "compiled": lambda: {"strategy": FSDP2Strategy(config=FSDP2Config(enable_compile=True))},
    "deferred": lambda: {"strategy": FSDP2Strategy(config=FSDP2Config(defer_fsdp_grad_sync=True))},
}

ALIKE = {"selective-sp", "sp-loss-chunked", "cp-allgather", "cp-ulysses"}
"""Both ranks have the same batches there: they are one data parallel rank."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A base, and an adapter of it that all ways begin with."""
    folder = tmp_path_factory.mktemp("begun")
    base = save_base(folder / "base")
    save_adapter(folder, base)
    return base, folder / "adapter"


@pytest.fixture(scope="module")
def weights_alone(begun: tuple[str, Path]) -> Callable[[int], dict[str, Any]]:
    """The weights that one process leaves, whose steps have as many batches as there are data parallel ranks."""
    base, adapter = begun

    def run(dp_size: int) -> dict[str, Any]:
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
        case = Case(
            make_module=lambda: None,  # type: ignore[arg-type, return-value]
            make_model=lambda: plain,
            loss=token_sum_loss,
            batches=make_token_batches(8, size=4),
        )
        return train_alone(case, {}, dp_size).weights

    return cache(lambda dp_size: run_ranks(run, 1, dp_size, group=False)[0])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("selective-sp", "ddp") else pytest.mark.slow) for way in WAYS]
)
def test_every_way_to_train_leaves_the_same_adapters_and_the_base_as_it_was(
    way: str,
    begun: tuple[str, Path],
    weights_alone: Callable[[int], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "compiled":
        original = torch.nn.Module.compile
        monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: original(self, backend="aot_eager"))
    # the test shim of Megatron-FSDP adds up in another order
    assert_equal_tensors(train(way, 2, *begun), weights_alone(1 if way in ALIKE else 2), atol=5e-5)


def save_adapter(folder: Path, base: str) -> None:
    torch.manual_seed(3)
    make_plain(base).save_pretrained(folder / "adapter")


def train(way: str, ranks: int, base: str, adapter: Path) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        options = WAYS[way]()
        strategy = options.pop("strategy")
        module = make_module(base, lora=str(adapter), **options)
        kept: dict[str, Any] = {}
        keep = pl.callbacks.LambdaCallback(on_train_end=lambda *_: kept.update(get_weights(module)))
        fit(module, strategy, steps=3, callbacks=[keep], apart=True)
        names = [name for name, _ in module.model.named_parameters()]
        return {name: kept[name] for name in names}

    if "megatron" not in way:
        return run_ranks(run, ranks)[0]

    def run_megatron() -> dict[str, Any]:
        with cuda_on_cpu():
            return run()

    return run_ranks(run_megatron, ranks)[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_all_parameters_have_the_dtype_of_the_precision(precision: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")

    def run() -> set[torch.dtype]:
        module = make_module(base)
        fit(module, FSDP2Strategy(tp_size=2, config=SP), precision=precision)
        return {parameter.dtype for parameter in module.parameters()}

    assert run_ranks(run, 2)[0] == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


class CallsPeft(WithModel):
    make_optimizer = staticmethod(partial(torch.optim.AdamW, lr=1e-2))

    def __init__(self, make_base: Callable[[], Any]) -> None:
        super().__init__(lambda: get_peft_model(make_base(), LoraConfig(**LORA, **FAMILIES["llama"])))


@pytest.mark.slow
@pytest.mark.parametrize("on_meta", [True, False])
def test_a_module_that_calls_peft_itself(on_meta: bool, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")

    def run() -> None:
        module = CallsPeft(partial(from_pretrained, base, on_meta=on_meta))
        fit(module, FSDP2Strategy(tp_size=2, config=SP))
        assert [*module.model.peft_config] == ["default"]
        plain = make_plain(base).state_dict()
        weights = get_weights(module)
        changed = {name for name in plain if "lora_" not in name and not torch.equal(weights[name], plain[name])}
        assert not changed
        export_hf(module, tmp_path / "merged", merge=True)

    run_ranks(run, 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    difference = get_logits(model) - get_logits(AutoModelForCausalLM.from_pretrained(base))
    assert difference.abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states")  # of another mesh
def test_a_base_in_bfloat16_changes_no_bit_of_adapters_in_float32(tmp_path: Path) -> None:
    save_base(tmp_path / "float32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "float32").bfloat16().save_pretrained(tmp_path / "base")

    def run(dtype: torch.dtype) -> dict[str, Any]:
        torch.manual_seed(0)
        make_base = partial(from_pretrained, tmp_path / "base", dtype=dtype)
        path, options = tmp_path / f"{dtype}.ckpt", {"precision": "bf16-mixed", "alike": True}
        checkpoint = CheckpointConfig(frozen_parameters=False)
        first = FSDP2Strategy(tp_size=2, config=SP, checkpoint=checkpoint)
        fit(CallsPeft(make_base), first, **options).save_checkpoint(path)
        module = CallsPeft(make_base)
        fit(module, FSDP2Strategy(config=AC), steps=4, ckpt_path=path, **options)
        dtypes = {"lora_" in name: parameter.dtype for name, parameter in module.model.named_parameters()}
        assert dtypes == {False: dtype, True: torch.float32}
        return get_weights(module)

    runs = [run_ranks(run, 2, dtype)[0] for dtype in (torch.float32, torch.bfloat16)]
    assert_equal_tensors(*runs)


# ---------------------------------------------------------------------- how it begins


@pytest.mark.guarantees("no-whole-model", "lora-base", "lora-around-shards")
def test_new_adapters_are_those_of_peft_and_the_same_on_every_mesh_and_no_rank_holds_a_whole_base(
    tmp_path: Path,
) -> None:
    base = save_base(tmp_path / "base")
    fields = {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    was_on_meta: list[bool] = []

    class Watched(CausalLM):
        def configure_model(self) -> None:
            super().configure_model()
            was_on_meta.append(all(parameter.is_meta for parameter in self.parameters()))

    def begin(**strategy: Any) -> dict[str, Any]:
        torch.manual_seed(dist.get_rank())
        module = Watched(pretrained=base, lora=fields)
        fit(module, FSDP2Strategy(**strategy), limit_train_batches=0)
        assert was_on_meta.pop(0)
        held = sum(parameter.to_local().numel() for parameter in module.parameters())
        assert held < 0.55 * sum(parameter.numel() for parameter in module.parameters())
        return get_weights(module)

    runs = run_ranks(lambda: [begin(), begin(tp_size=2, config=SP)], 2)[0]
    assert_equal_tensors(*runs)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**fields))
    for name, tensor in plain.state_dict().items():
        if "lora_A" not in name:  # zeros in lora_B; the head that is trained begins as the one it replaces
            torch.testing.assert_close(runs[0][name], tensor, rtol=0, atol=0, msg=name)
        else:
            bound = tensor.shape[1] ** -0.5  # of kaiming_uniform_ with a=sqrt(5)
            assert 0.8 * bound < runs[0][name].abs().max() <= bound


def test_training_goes_on_from_an_adapter_of_pefts(begun: tuple[str, Path]) -> None:
    base, adapter = begun

    def run() -> None:
        module = make_module(base, lora=str(adapter))
        first: dict[str, Any] = {}
        look = pl.callbacks.LambdaCallback(on_train_start=lambda *_: first.update(get_weights(module)))
        fit(module, FSDP2Strategy(tp_size=2, config=SP), callbacks=[look])
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        assert_equal_tensors(first, plain.state_dict())
        changed = {name for name, tensor in get_weights(module).items() if not torch.equal(tensor, first[name])}
        assert changed == {name for name in first if "lora_" in name}

    run_ranks(run, 2)


@pytest.mark.slow
def test_a_new_model_has_adapters_too() -> None:
    def run() -> None:
        module = CausalLM(config=LLAMA, lora={"r": 2})
        fit(module, FSDP2Strategy())
        weights = get_weights(module)
        assert {name for name, p in module.model.named_parameters() if p.requires_grad} == {
            name for name in weights if "lora_" in name
        }
        assert all(weights[name].abs().sum() > 0 for name in weights if "lora_B" in name)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what is said of wrong input


def test_defaults_and_what_a_checkpoint_keeps() -> None:
    config = build_lora_config({})
    assert (config.r, config.lora_alpha, config.target_modules) == (16, 32, "all-linear")
    assert build_lora_config({"r": 4}).lora_alpha == 8
    assert build_lora_config({"r": 4, "lora_alpha": 8.0}).lora_alpha == 8
    fields = {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj", "q_proj"], "bias": "all", "lora_dropout": 0.1}
    assert to_mapping(build_lora_config(fields)) == fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alhpa": 3}, r"LoraConfig has no 'lora_alhpa'; did you mean 'lora_alpha'\?$"),
        ({"zzz": 3}, r"LoraConfig has no 'zzz'; it has r, lora_alpha, "),
        ({"use_dora": True}, r"use_dora=True is not supported here"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights='pissa' needs the unsharded weights of the base model"),
        (
            {"target_modules": ["q_porj"]},
            r"target_modules has 'q_porj', which LlamaForCausalLM lacks; did you mean 'q_p",
        ),
        ({"target_modules": "none_such"}, r"none_such"),
        ({"r": 4.0}, r"r=4.0 must be a whole number, and at least 0\.$"),
        ({"lora_alpha": "8"}, r"lora_alpha='8' must be a number, and at least 0\.$"),
        ({"r": 0}, r"`r` should be a positive integer"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(config=LLAMA, lora=fields).configure_model()


def test_peft_is_asked_for_by_name_and_only_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    CausalLM(config=LLAMA)
    with pytest.raises(ImportError, match=r"needs peft; install it with pip install 'lightning-fsdp2\[lora\]'"):
        CausalLM(config=LLAMA, lora={})


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))


def narrow(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: tensor[..., :3].contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )


def drop_one(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(max(tensors))
    save_file(tensors, folder / "adapter_model.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no-weights": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        FileNotFoundError,
        r"there is no .*adapter_model\.safetensors; give a directory",
    ),
    "damaged": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        ValueError,
        r"adapter_config\.json is damaged",
    ),
    "other-kind": (
        lambda folder: change_config(folder, peft_type="IA3"),
        ValueError,
        r"adapter_config\.json: peft_type='IA3' is not supported; only 'LORA' is",
    ),
    "other-modules": (
        lambda folder: change_config(folder, target_modules=["c_attn"]),
        ValueError,
        r"adapter_config\.json is an adapter for a different base model: target_modules has 'c_attn', which",
    ),
    "other-shapes": (
        narrow,
        ValueError,
        r"safetensors is an adapter for another base model .*: base_model\S+ is \[\d+, 3\], here \[\d+, \d+\]",
    ),
    "other-tensors": (drop_one, ValueError, r"is an adapter for another base model .*: it lacks base_model\S+\. Set"),
    "other-task": (
        lambda folder: change_config(folder, task_type="SEQ_CLS"),
        ValueError,
        r"adapter_config\.json: task_type='SEQ_CLS' is not the task of CausalLM; leave it out",
    ),
    "unknown-option": (
        lambda folder: change_config(folder, use_dora=True),
        ValueError,
        r"adapter_config\.json: use_dora=True is not supported",
    ),
}


@pytest.mark.guarantees("adapters-that-do-not-fit")
@pytest.mark.parametrize("case", BROKEN)
def test_an_adapter_that_does_not_fit_is_refused_before_the_first_step(case: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    save_adapter(tmp_path, base)
    damage, error, message = BROKEN[case]
    damage(tmp_path / "adapter")
    with pytest.raises(error, match=message) as raised:
        make_module(base, lora=str(tmp_path / "adapter")).configure_model()
    assert "\n" not in str(raised.value)


def test_an_adapter_names_its_base_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    module = make_module("base", lora={"r": 2})
    module.configure_model()
    assert module.model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


def test_an_adapter_of_another_base_of_the_same_shapes(tmp_path: Path) -> None:
    base, other = save_base(tmp_path / "base"), save_base(tmp_path / "other", seed=1)
    save_adapter(tmp_path, other)
    adapter = str(tmp_path / "adapter")

    message = r"adapter_config\.json: base_model_name_or_path='\S+other' and pretrained='\S+base' are different models"
    with pytest.raises(ValueError, match=message):
        make_module(base, lora=adapter).configure_model()
    # the same tensors in other files, at another place
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "moved")
    make_module(str(tmp_path / "moved"), lora=adapter_of(base, tmp_path)).configure_model()
    shutil.rmtree(other)
    with pytest.warns(UserWarning, match=r"is an adapter of '\S+other'; training continues with '\S+base'"):
        make_module(base, lora=adapter).configure_model()


def adapter_of(base: str, folder: Path) -> str:
    make_plain(base).save_pretrained(folder / "own")
    return str(folder / "own")
