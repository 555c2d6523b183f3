import itertools
import json
from functools import partial
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from helpers import user_modules
from helpers.models import LLAMA
from helpers.ranks import run_ranks
from helpers.user_modules import RowRecorder
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_fsdp2 import CausalLM, ChatDataModule, DDPStrategy, FSDP2Strategy, TextDataModule


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text file of 40 sequences of 16 tokens."""
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("0123456789abcdef" * 40)
    return str(file)


class Module(RowRecorder):
    """Asks for the number of steps, as schedules do."""

    def configure_optimizers(self):
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


make_trainer = partial(user_modules.make_trainer, strategy="auto", num_sanity_val_steps=0)


def make_data(corpus, cache, **settings):
    return TextDataModule(
        path=corpus, cache_dir=cache, sequence_length=16, validation_fraction=0, **({"batch_size": 2} | settings)
    )


def fit(corpus, cache, trainer, **settings):
    module = Module()
    trainer.fit(module, make_data(corpus, cache, **settings))
    return trainer.accumulate_grad_batches, module.steps, trainer.global_step


@pytest.mark.guarantees("global-batch-size")
@pytest.mark.filterwarnings("ignore")
def test_global_batch_size_sets_the_accumulation_before_the_schedule_is_made(corpus, cache):
    trainer = make_trainer(max_epochs=1)
    assert fit(corpus, cache, trainer, global_batch_size=8) == (4, 5, 5)
    trainer.fit_loop.max_epochs = 2
    assert fit(corpus, cache, trainer, global_batch_size=8)[0] == 4  # the Trainer's own number, from before
    assert fit(corpus, cache, make_trainer(max_epochs=1, accumulate_grad_batches=3), global_batch_size=6)[0] == 3
    assert fit(corpus, cache, make_trainer(max_epochs=1), global_batch_size=2)[0] == 1
    assert fit(corpus, cache, make_trainer(max_epochs=1, accumulate_grad_batches=3))[0] == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        pytest.param(FSDP2Strategy, 2, marks=pytest.mark.slow),
        (lambda: FSDP2Strategy(tp_size=2), 4),
        pytest.param(DDPStrategy, 2, marks=pytest.mark.slow),
        pytest.param(lambda: "ddp", 2, marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "tp2", "ddp", "lightning-ddp"],
)
def test_global_batch_size_goes_by_the_data_parallel_ranks(corpus, cache, strategy, expected):
    def run():
        trainer = make_trainer(strategy=strategy(), max_steps=1)
        trainer.fit(CausalLM(config={**LLAMA, "vocab_size": 257}), make_data(corpus, cache, global_batch_size=8))
        return trainer.accumulate_grad_batches

    assert run_ranks(run, 2, group=False) == [expected] * 2


@pytest.mark.guarantees("global-batch-size")
@pytest.mark.parametrize(
    ("size", "batch_size", "ranks", "message"),
    [
        (100, 8, 4, r"= 32; use global_batch_size=96 or global_batch_size=128 or batch_size=1 or batch_size=5\.$"),
        (3, 2, 2, r"= 4; use global_batch_size=4\.$"),
        (6, 4, 2, r"= 8; use global_batch_size=8 or batch_size=1 or batch_size=3\.$"),
    ],
)
def test_global_batch_size_that_does_not_divide_names_those_that_do(corpus, cache, size, batch_size, ranks, message):
    data = make_data(corpus, cache, batch_size=batch_size, global_batch_size=size)
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": 0})
    start = rf"global_batch_size={size} is not a multiple of batch_size={batch_size} x {ranks} data parallel rank\(s\) "
    with pytest.raises(ValueError, match=start + message):
        data.setup("fit")


@pytest.mark.guarantees("same-samples")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("streaming", [False, True])
def test_epochs_have_the_same_whole_steps_on_any_number_of_ranks(corpus, cache, streaming):
    settings = {"global_batch_size": 12, "shuffle": False, "streaming": streaming}

    def read(ranks):
        shares = []
        for rank in range(ranks):
            data = make_data(corpus, cache, **settings)
            data.setup("fit")
            data.trainer = SimpleNamespace(
                distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank},
                strategy=SimpleNamespace(root_device=torch.device("cpu")),
                current_epoch=0,
            )
            shares.append([tuple(row) for batch in data.train_dataloader() for row in batch["input_ids"].tolist()])
        assert {len(share) * ranks % 12 for share in shares} == {0}
        return list(itertools.chain(*zip(*shares, strict=True)))

    assert read(1) == read(2) == read(3)
    assert len(read(1)) >= 24


def test_what_else_sets_the_accumulation_is_refused(corpus, cache):
    def refuse(message, trainer, module=None):
        with pytest.raises(ValueError, match=message):
            trainer.fit(module or Module(), make_data(corpus, cache, global_batch_size=8))

    refuse(
        "accumulate_grad_batches=3 contradicts global_batch_size=8, which needs 4 micro-batches of batch_size=2 on",
        make_trainer(accumulate_grad_batches=3),
    )
    refuse("GradientAccumulationScheduler both set", make_trainer(callbacks=[GradientAccumulationScheduler({0: 2})]))
    manual = Module()
    manual.automatic_optimization = False
    refuse(
        "needs 4 micro-batches per step, but a module with manual optimization accumulates them", make_trainer(), manual
    )


def test_global_batch_size_is_at_least_one(corpus, cache):
    with pytest.raises(ValueError, match="global_batch_size=0 is less than 1"):
        make_data(corpus, cache, global_batch_size=0)


@pytest.mark.guarantees("unreadable-data")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", ["row", "one-rank"])
def test_data_that_fails_on_one_rank_fails_on_all(cache, tmp_path, fails):
    rows = [{"prompt": "a", "completion": "b"}] * 9 + [{"prompt": "a"}] * (fails == "row")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    class Data(ChatDataModule):
        def _load_splits(self):
            if fails == "one-rank" and self.trainer.global_rank == 1:
                raise OSError("no space left on device")
            return super()._load_splits()

    def run():
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        data = Data(path=str(tmp_path / "a.jsonl"), chat_template=template, cache_dir=cache, validation_fraction=0)
        with pytest.raises((ValueError, OSError)) as raised:
            make_trainer(strategy=FSDP2Strategy(), max_epochs=1).fit(Module(), data)
        return str(raised.value)

    messages = run_ranks(run, 2, group=False)
    if fails == "row":
        assert "a.jsonl, line 10: the row needs either 'messages', or" in messages[0]
        assert messages[1] == f"Rank 0 could not read the data (this is rank 1): {messages[0]}"
    else:
        assert messages[1] == "no space left on device"
        assert messages[0] == f"Rank 1 could not read the data (this is rank 0): {messages[1]}"


@pytest.mark.filterwarnings("ignore")
def test_bars_are_shown_on_rank_zero_only(corpus, cache):
    def run():
        datasets.enable_progress_bars()
        shown = []

        class Data(TextDataModule):
            def _load_splits(self):
                shown.append(not datasets.are_progress_bars_disabled())
                return super()._load_splits()

        data = Data(path=corpus, cache_dir=cache, sequence_length=16, batch_size=2, validation_fraction=0)
        make_trainer(strategy=FSDP2Strategy(), max_steps=1).fit(Module(), data)
        assert not datasets.are_progress_bars_disabled()
        return shown

    assert run_ranks(run, 2, group=False) == [[True, True], [False]]  # and rank 0 in `prepare_data`


def test_nodes_that_share_a_cache_prepare_in_turn(corpus, tmp_path):
    events = tmp_path / "events"

    def note(event):
        with open(events, "a") as file:
            file.write(f"{event} ")

    class Data(TextDataModule):
        def _load_splits(self):
            note("begins")
            splits = super()._load_splits()
            note("ends")
            return splits

    def run():
        data = Data(path=corpus, cache_dir=str(tmp_path), sequence_length=16, batch_size=2, validation_fraction=0)
        dist.barrier()
        data.prepare_data()

    run_ranks(run, 2)
    assert events.read_text() == "begins ends begins ends "


def test_a_name_that_the_hub_does_not_give_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data = ChatDataModule(dataset="no/such", chat_template=template, cache_dir=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"^dataset='no/such' is not a directory on this machine, and the Hub cannot be"
    ):
        data.prepare_data()
    data = ChatDataModule(path=__file__, tokenizer="no/such", cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"^tokenizer='no/such' is not a directory with a tokenizer") as raised:
        data.prepare_data()
    assert "\n" not in str(raised.value)
