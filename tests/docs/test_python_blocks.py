"""Every Python block of the documentation runs, as it stands, on models and data that are here.

What a block takes for granted (``model``, ``self``, a checkpoint in the folder) is prepared by its scene, which also
looks at what came of it. A block without a scene runs with the names of the package alone.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import peft
import pytest
import torch
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.documents import PAGES, Block, get_blocks, read_blocks
from helpers.families import make_family_model
from helpers.models import ENCODER, LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import QUIET, Batch, LossFunction, assert_equal_gradients, hf_loss, make_config, whole
from helpers.ranks import run_ranks
from helpers.vision import make_image_batch, make_vision_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

import lightning_fsdp2
from lightning_fsdp2 import (
    CausalLM,
    FSDP2Config,
    FSDP2Manager,
    FSDP2Strategy,
    create_device_mesh,
    export_hf,
    load_checkpoint,
    save_checkpoint,
)
from lightning_fsdp2.data import build_byte_tokenizer
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.modules.experts import get_optional_expert_mesh
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.tensor.plans import is_registered

Names = dict[str, Any]

TINY = {**LLAMA, "vocab_size": 257, "max_position_embeddings": 8192}
BERT = {"model_type": "bert", **ENCODER, "vocab_size": 257}
BART: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "d_model": 32,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    "dropout": 0.0,
    "init_std": 0.2,
}
STAND_INS = {
    'tokenizer="/models/llama-3-8b"': "tokenizer=None",
    "/models/llama-3-8b": "model",
    "/models/llama-3-70b": "model",
    "/models/bert-base": "bert",
    "/models/llava-7b": "llava",
    "/data/text": "text.txt",
    "sequence_length=4096": "sequence_length=16",
}
"""What is said of machines that have more, and what is here."""

BLOCKS = get_blocks("python")
FAST = "token_mean_loss(self, logits"


def do_nothing(names: Names) -> None: ...


def make_run() -> Names:
    strategy = FSDP2Strategy()
    return {"module": CausalLM(config=TINY), "trainer": pl.Trainer(strategy=strategy, precision="bf16-mixed")}


def check_plan(names: Names) -> None:
    assert names["plan"].world_size == 64
    assert names["plan"].verdict == "fits"


@dataclass(frozen=True)
class Scene:
    """Around one block, which is the only one with ``marker`` in it."""

    marker: str
    prepare: Callable[[], Names] = dict
    check: Callable[[Names], None] = do_nothing
    ranks: int = 2
    group: bool = True
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def make_model() -> Names:
    return {"model": make_causal_lm(TINY)}


def make_mixture() -> Names:
    return {"model": make_family_model("mixtral")}


def check_experts(names: Names) -> None:
    meshes = [mesh for module in names["model"].modules() if (mesh := get_optional_expert_mesh(module)) is not None]
    assert meshes
    assert {mesh.mesh_dim_names for mesh in meshes} == {("ep",)}


def make_sharded(*, cp_size: int = 1) -> nn.Module:
    config = FSDP2Config()
    return FSDP2Manager(config, create_device_mesh(config, cp_size=cp_size)).parallelize(make_causal_lm(TINY))


def make_model_and_optimizer() -> Names:
    model = make_sharded()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def make_micro_batches() -> Names:
    model, (first, second) = make_causal_lm(TINY), make_token_batches(2)
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "loss": lambda model, batch: model(**batch).loss,
        "first": first,
        "second": second,
    }


def make_step() -> Names:
    """What a module's step has under context parallelism."""
    batch = make_token_batches(1, length=16)[0]
    module = SimpleNamespace(model=make_sharded(cp_size=2))
    return {"self": module, "batch": batch, "shifted_labels": batch["labels"].roll(-1, dims=1)}


def make_classes() -> Names:
    return {name: type(name, (nn.Module,), {}) for name in ("MyModelForCausalLM", "BertModel")}


def save_run() -> Names:
    trainer, module = pl.Trainer(strategy=FSDP2Strategy()), CausalLM(config=TINY)
    trainer.fit(module, DataLoader(make_token_batches(2), batch_size=None))
    trainer.save_checkpoint("checkpoints/last.ckpt")
    return {"expected": whole(dict(module.named_parameters()))}


def save_model() -> Names:
    model = make_sharded()
    save_checkpoint("checkpoints/step=100.ckpt", model)
    return {"module": model}


def check_two_steps(names: Names) -> None:
    assert names["trainer"].global_step == 2


def check_module(names: Names) -> None:
    trainer, module = pl.Trainer(strategy=FSDP2Strategy()), names["MyModule"]()
    trainer.fit(module, DataLoader(make_token_batches(4), batch_size=None))
    assert trainer.global_step == 2
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert 0 < trainer.strategy.token_mean.loss < 10


def check_saved(names: Names) -> None:
    load_checkpoint("step=100.ckpt", names["model"])


def check_loaded(names: Names) -> None:
    assert names["module"].training is False
    torch.testing.assert_close(dict(names["module"].named_parameters()), names["expected"])


def check_extra(names: Names) -> None:
    assert names["extra"] == {"step": 100}


def make_model_and_batch() -> Names:
    return {"model": make_causal_lm(TINY), "batch": make_token_batches(1, size=8)[0]}


def check_stages(names: Names) -> None:
    run = get_pipeline(names["model"])
    assert run.peak == 2 - run.group.rank()
    assert len(names["optimizer"].state) > 0


def check_step_over_stages(names: Names) -> None:
    def configure_model(self: Any) -> None:
        self.model = make_causal_lm(TINY)

    own = {"training_step": names["training_step"], "configure_model": configure_model}
    optimizers = {"configure_optimizers": lambda self: torch.optim.AdamW(self.parameters())}
    module = type("Module", (pl.LightningModule,), {**own, **optimizers})()
    trainer = pl.Trainer(strategy=FSDP2Strategy(pp_size=2))
    trainer.fit(module, DataLoader(make_token_batches(2, size=4), batch_size=None))
    assert trainer.global_step == 2
    assert trainer.callback_metrics["train/z_loss"] > 0


def check_configured(names: Names, part: str, *dtypes: torch.dtype) -> None:
    """What ``configure_model`` of a page makes is sharded, and read."""
    module = type("Module", (pl.LightningModule,), {"configure_model": names["configure_model"], "model": None})()
    module.configure_model()
    module.configure_model()  # Lightning calls it in each stage
    config = FSDP2Config()
    FSDP2Manager(config, create_device_mesh(config)).parallelize(module)
    parameters = dict(module.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {*dtypes}
    assert any(part in name for name in parameters)
    expected = AutoModelForCausalLM.from_pretrained("model").model.layers[0].mlp.up_proj.weight
    [read] = [weight for name, weight in parameters.items() if "layers.0.mlp.up_proj" in name and "lora" not in name]
    torch.testing.assert_close(read.full_tensor(), expected.to(read.dtype))


def check_classifier(names: Names) -> None:
    check_configured(names, "score", torch.float32)


def check_adapters(names: Names) -> None:
    check_configured(names, "lora", torch.float32)


def check_adapters_of_half_a_base(names: Names) -> None:
    check_configured(names, "lora", torch.float32, torch.bfloat16)


def check_exported(names: Names) -> None:
    for folder, dtype in (("my-model", torch.float32), ("my-half-model", torch.bfloat16)):
        assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == dtype


def check_positions(names: Names) -> None:
    assert names["logits"].shape == (2, 8, 257)
    assert names["labels"].shape == (2, 8)
    assert names["whole"].shape == (2, 16, 257)


def check_replicated(names: Names) -> None:
    assert isinstance(names["model"], nn.parallel.DistributedDataParallel)


def check_registered(names: Names) -> None:
    assert all(is_registered(names[name]()) for name in ("MyModelForCausalLM", "BertModel"))


def save_chat_model() -> Names:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}:"
    tokenizer.save_pretrained("my-model")
    AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16).save_pretrained("my-model")
    return {}


def check_answer(names: Names) -> None:
    assert names["model"].dtype == torch.bfloat16
    assert names["tokenizer"].decode(names["inputs"]["input_ids"][0]) == "1 + 1?:"
    assert isinstance(names["answer"], str)


def make_fine_tuning() -> Names:
    """The names of the page's first block."""
    names: Names = {}
    exec(read_blocks("docs/multimodal.md")[0].text, names)
    return names


class Recorder(pl.Callback):
    """Has the weights and the gradients of the last step."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        named = dict(module.model.named_parameters())
        self.weights, self.gradients = whole(named), whole({name: p.grad for name, p in named.items()})


def check_gradients(module: Any, model: nn.Module, batches: list[Batch], loss: LossFunction, **strategy: Any) -> None:
    """Those of a page's module on two ranks are those of one process on all batches."""
    recorder, strategy_ = Recorder(), FSDP2Strategy(**strategy)
    trainer = pl.Trainer(strategy=strategy_, max_steps=1, callbacks=[recorder])
    shares = {rank: batches[rank :: 2 // strategy.get("tp_size", 1)] for rank in range(2)}
    module.train_dataloader = lambda: DataLoader(shares[strategy_.data_parallel_rank], batch_size=None)
    trainer.fit(module)
    model.load_state_dict(recorder.weights, strict=False)
    sums, counts = zip(*(loss(model.train(), batch) for batch in batches), strict=True)
    (sum(sums) / sum(counts)).backward()
    assert_equal_gradients(recorder.gradients, {name: p.grad for name, p in model.named_parameters()})


def check_fine_tuning(names: Names) -> None:
    batches = [{"input_ids": batch["input_ids"], "labels": torch.tensor([0, 2])} for batch in make_token_batches(2)]
    model = AutoModelForSequenceClassification.from_pretrained("bert", num_labels=3)
    check_gradients(names["module"], model, batches, hf_loss)
    names["module"].trainer.save_checkpoint("classifier.ckpt")
    export_hf("classifier.ckpt", "classifier")
    exported = AutoModelForSequenceClassification.from_pretrained("classifier").state_dict()
    torch.testing.assert_close(exported, whole(names["module"].model.state_dict()))


def make_translation() -> tuple[Any, nn.Module]:
    module = make_fine_tuning()["FineTuning"]("bart", auto_class="AutoModelForSeq2SeqLM")
    return module, AutoModelForSeq2SeqLM.from_pretrained("bart")


def check_each_label_counts_once(names: Names) -> None:
    def sum_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        count = int((batch["labels"] != -100).sum())
        return model(**batch).loss * count, count

    module, model = make_translation()
    type(module).training_step = names["training_step"]
    batches = make_token_batches(2)
    batches[1]["labels"][:, :5] = -100
    check_gradients(module, model, batches, sum_loss)


def check_plan_of_bart(names: Names) -> None:
    for changes in ({}, {"sequence_parallel": True}):
        config = FSDP2Config(tp_plan=names["plan"], **changes)
        check_gradients(*make_translation(), make_token_batches(1, ragged=False), hf_loss, tp_size=2, config=config)


def check_frozen_tower(names: Names) -> None:
    module, trainer = names["module"], pl.Trainer(strategy=FSDP2Strategy())
    trainer.fit(module, DataLoader([make_image_batch("llava", seed) for seed in range(2)], batch_size=None))
    before = AutoModelForImageTextToText.from_pretrained("llava").state_dict()
    same = {name for name, value in whole(module.model.state_dict()).items() if torch.equal(value, before[name])}
    assert same == {name for name in before if "vision_tower" in name}


SCENES = [
    Scene("config=FSDP2Config(sequence_parallel=True)),\n    precision=", check=check_two_steps),
    Scene("trainer = pl.Trainer(strategy=FSDP2Strategy(tp_size=2), precision=", check=check_two_steps),
    Scene(FAST, check=check_module),
    Scene("create_device_mesh(config, dp_replicate_size=2)).parallelize(model)", make_model, check_saved),
    Scene("mesh = create_device_mesh(config, ep_size=4)", make_mixture, check_experts, ranks=4),
    Scene('mesh_dim_names=("ep_shard", "ep")', make_mixture, check_experts, ranks=4),
    Scene("create_device_mesh(config, pp_size=2)", make_model_and_batch, check_stages),
    Scene('self.log("train/z_loss", z_loss)', check=check_step_over_stages, group=False),
    Scene("load_from_checkpoint(CausalLM,", save_run, check_loaded, ranks=1),
    Scene('extra = load_checkpoint("step=100.ckpt", model, optimizer)', make_model_and_optimizer, check_extra),
    Scene('allow_missing="score.*"', check=check_classifier),
    Scene("class FineTuning(", check=check_fine_tuning, group=False),
    Scene("shift=False)", check=check_each_label_counts_once, group=False),
    Scene("tokenizer.apply_chat_template", save_chat_model, check_answer, ranks=1),
    Scene("class FrozenTower(", make_fine_tuning, check_frozen_tower, group=False),
    Scene("self_attn.out_proj", check=check_plan_of_bart, group=False),
    Scene(
        '"/models/llama-3-8b")\n        self.model = get_peft',
        check=check_adapters,
    ),
    Scene(
        '"/models/llama-3-70b", dtype',
        check=check_adapters_of_half_a_base,
    ),
    Scene('export_hf("checkpoints/step=100.ckpt", "my-model")', save_model, check_exported),
    Scene("whole = gather_sequence(self.model, logits)", make_step, check_positions),
    Scene("wrapper, optimizer = MegatronFSDPManager", make_micro_batches, context=cuda_on_cpu),
    Scene("model = DDPManager(", make_model, check_replicated),
    Scene("plan_run(trainer, module", make_run, check_plan, ranks=1, group=False),
    Scene("register_tp_plan(MyModelForCausalLM", make_classes, check_registered, ranks=1),
]


# ---------------------------------------------------------------------- tests


def get_scene(block: Block) -> Scene:
    found = [scene for scene in SCENES if scene.marker in block.text]
    assert len(found) <= 1, f"several scenes have their marker in {block}"
    return found[0] if found else Scene("", ranks=1)


def run(block: Block, folder: Path) -> None:
    scene, text = get_scene(block), block.text
    for there, here in STAND_INS.items():
        text = text.replace(there, here)
    options = {**QUIET, "accelerator": "cpu", "devices": scene.ranks, "max_steps": 2, "use_distributed_sampler": False}

    def run_rank() -> None:
        os.chdir(folder)
        own = {name: getattr(lightning_fsdp2, name) for name in lightning_fsdp2.__all__}
        libraries = {"torch": torch, "pl": pl, "from_pretrained": from_pretrained, **vars(peft)}
        with scene.context(), patch("lightning.pytorch.Trainer", partial(pl.Trainer, **options)):
            names = {**libraries, **own, **scene.prepare()}
            exec(compile(text, str(block), "exec"), names)
            scene.check(names)

    run_ranks(run_rank, scene.ranks, group=scene.group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the machines of the documentation have, in small."""
    make_causal_lm(TINY).save_pretrained(tmp_path / "model")
    AutoModelForMaskedLM.from_config(make_config(BERT)).save_pretrained(tmp_path / "bert")
    AutoModelForSeq2SeqLM.from_config(make_config(BART)).save_pretrained(tmp_path / "bart")
    make_vision_model("llava").save_pretrained(tmp_path / "llava")
    (tmp_path / "text.txt").write_text("a few words of it\n" * 80)
    return tmp_path


@pytest.mark.guarantees("module-of-the-quickstart")
@pytest.mark.parametrize("block", [block for block in BLOCKS if FAST in block.text], ids=str)
def test_the_module_of_the_quickstart_trains(block: Block, folder: Path) -> None:
    run(block, folder)


@pytest.mark.guarantees("pages-are-measured")
@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if FAST not in block.text], ids=str)
def test_python_runs(block: Block, folder: Path) -> None:
    run(block, folder)


def test_every_scene_has_a_block() -> None:
    assert len(BLOCKS) > 12
    loose = [scene.marker for scene in SCENES if not any(scene.marker in block.text for block in BLOCKS)]
    assert loose == []


def test_every_language_is_looked_at() -> None:
    """Blocks in these are run, parsed, or compared with what they quote; ``console`` is for people."""
    languages = {block.language for page in PAGES for block in read_blocks(page)}
    assert languages == {"python", "yaml", "json", "bash", "text", "console", ""}
