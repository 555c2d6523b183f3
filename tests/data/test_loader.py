import itertools
import warnings
from functools import partial

import pytest
import torch
from datasets import IterableDataset
from helpers import user_modules
from helpers.user_modules import RowRecorder
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DistributedSampler

from lightning_fsdp2.data.loader import (
    ResumableDataLoader,
    ResumableSampler,
    ResumableStreamLoader,
    SequenceStream,
    collate_sequences,
    fill_up,
)

SAMPLES = 11


def build_loader(ranks=1, rank=0, batch_size=2, num_workers=0, samples=SAMPLES, shuffle=True, seed=0):
    dataset = [{"input_ids": torch.tensor([sample])} for sample in range(samples)]
    return ResumableDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=ResumableSampler(dataset, ranks, rank, shuffle=shuffle, seed=seed, drop_last=True),
        drop_last=True,
        num_workers=num_workers,
        collate_fn=collate_sequences,
    )


def ids(batch):
    return batch["input_ids"].flatten().tolist()


def read_epoch(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return [ids(batch) for batch in loader]


def test_batch_is_input_ids_and_a_copy_as_labels():
    batch = collate_sequences([{"input_ids": torch.tensor([1, 2, 3])}, {"input_ids": torch.tensor([4, 5, 6])}])
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    batch["labels"][0, 0] = -100
    assert batch["input_ids"][0, 0] == 1


def test_batch_is_padded_at_the_end_without_labels():
    sequences = [{"input_ids": torch.tensor([1, 2, 3, 4, 5])}, {"input_ids": torch.tensor([6, 7, 8, 9, 1])}]
    batch = collate_sequences(sequences, pad_to_multiple_of=4, pad_token_id=99)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 99, 99, 99], [6, 7, 8, 9, 1, 99, 99, 99]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5, -100, -100, -100], [6, 7, 8, 9, 1, -100, -100, -100]]
    for multiple in (1, 5, None):
        assert collate_sequences(sequences, pad_to_multiple_of=multiple)["labels"].shape == (2, 5)


def test_first_tokens_of_documents_have_no_label_and_padding_belongs_to_none():
    sequence = {"input_ids": torch.tensor([1, 2, 3, 4, 5]), "position_ids": torch.tensor([0, 1, 2, 0, 1])}
    batch = collate_sequences([sequence], pad_to_multiple_of=4)
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert sequence["input_ids"].tolist() == [1, 2, 3, 4, 5]


def test_shorter_sequences_are_padded_to_the_longest():
    sequences = [
        {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([-100, 2, 3])},
        {"input_ids": torch.tensor([4]), "labels": torch.tensor([4])},
    ]
    batch = collate_sequences(sequences, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]
    assert collate_sequences(sequences, pad_to_multiple_of=4)["labels"].tolist() == [
        [-100, 2, 3, -100],
        [4, -100, -100, -100],
    ]


@pytest.mark.parametrize(("samples", "ranks"), [(1, 1), (6, 2), (7, 2), (7, 4), (1, 3), (9, 8)])
def test_what_fills_up_the_ranks_has_no_labels_and_comes_first(samples, ranks):
    dataset = [{"input_ids": torch.tensor([sample])} for sample in range(samples)]
    filled = fill_up(dataset, ranks)
    assert len(filled) % ranks == 0
    missing = len(filled) - samples
    assert 0 <= missing < ranks
    labels = [collate_sequences([filled[index]])["labels"].item() for index in range(len(filled))]
    assert labels == [-100] * missing + list(range(samples))


def test_epochs_are_other_orders_of_all_full_batches_and_the_seed_decides_them():
    first, second = (read_epoch(build_loader(), epoch) for epoch in (0, 1))
    assert [len(batch) for batch in first] == [2] * (SAMPLES // 2)
    assert len(set(itertools.chain(*first))) == SAMPLES // 2 * 2
    assert first != second
    assert first == read_epoch(build_loader(), 0)
    assert first != read_epoch(build_loader(seed=1), 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_out_the_batches_of_one(ranks):
    of_one = read_epoch(build_loader(batch_size=4, samples=31), 3)
    of_ranks = [read_epoch(build_loader(ranks, rank, 4 // ranks, samples=31), 3) for rank in range(ranks)]
    together = [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]
    assert together == [sorted(batch) for batch in of_one]
    assert len(set(itertools.chain(*together))) == 28


@pytest.mark.parametrize(
    ("batches", "num_workers", "resumed_workers"),
    [(0, 0, 0), (2, 0, 0), (5, 0, 0), (2, 1, 1), (5, 1, 1), (2, 0, 1), (2, 1, 0)],
)
def test_resumed_loader_goes_on_at_the_next_sample(batches, num_workers, resumed_workers):
    whole = [read_epoch(build_loader(), epoch) for epoch in range(3)]

    stopped = build_loader(num_workers=num_workers)
    read_epoch(stopped, 0)
    stopped.sampler.set_epoch(1)
    read = [ids(batch) for batch in itertools.islice(stopped, batches)]
    assert read == whole[1][:batches]

    resumed = build_loader(num_workers=resumed_workers)
    if batches:
        resumed.load_state_dict(stopped.state_dict())
    assert read_epoch(resumed, 1) == whole[1][batches:]
    assert read_epoch(resumed, 1) == whole[1]  # the position counts once
    assert read_epoch(resumed, 2) == whole[2]


def test_position_counts_in_its_own_epoch_only():
    stopped = build_loader()
    next(iter(stopped))
    resumed = build_loader()
    resumed.load_state_dict(stopped.state_dict())
    assert read_epoch(resumed, 1) == read_epoch(build_loader(), 1)
    assert read_epoch(resumed, 0) == read_epoch(build_loader(), 0)


@pytest.mark.parametrize("change", ["fewer", "more", "content", "nothing", "settings"])
def test_position_in_other_data_is_told(change):
    stopped = build_loader()
    list(itertools.islice(stopped, 2))
    position = stopped.state_dict()
    if change == "settings":
        resumed = build_loader(ranks=2, batch_size=4, num_workers=1, seed=1)
    else:
        resumed = build_loader(samples=SAMPLES + {"fewer": -1, "more": 1}.get(change, 0))
    if change == "content":
        resumed.dataset[-1]["input_ids"] += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load_state_dict(position)
    is_other = change in ("fewer", "more", "content")
    assert [str(each.message).startswith("The checkpoint was saved after 4 samples of other") for each in caught] == (
        [True] * is_other
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict({"epoch": 0, "samples": 4})  # of an earlier version


def test_epoch_is_restored_for_a_loop_that_does_not_set_it():
    stopped = build_loader()
    stopped.sampler.set_epoch(4)
    next(iter(stopped))
    resumed = build_loader()
    resumed.load_state_dict(stopped.state_dict())
    assert [ids(batch) for batch in resumed] == read_epoch(build_loader(), 4)[1:]


def test_state_is_small_the_same_on_every_rank_and_survives_until_the_first_batch():
    states = []
    for rank in range(2):
        loader = build_loader(2, rank)
        list(itertools.islice(loader, 2))
        states.append(loader.state_dict())
    assert states == [{"epoch": 0, "samples": 8, "data": states[0]["data"]}] * 2
    resumed = build_loader()
    resumed.load_state_dict(states[0])
    assert resumed.state_dict() == states[0]


@pytest.mark.guarantees("next-sample")
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 8), (4, 2), (2, 2), (8, 1)])
def test_resume_on_another_number_of_ranks(ranks, batch_size):
    stopped = build_loader(2, 0, batch_size=4, samples=40)
    stopped.sampler.set_epoch(1)
    list(itertools.islice(stopped, 2))

    rest = []
    for rank in range(ranks):
        resumed = build_loader(ranks, rank, batch_size, samples=40)
        resumed.load_state_dict(stopped.state_dict())
        rest += itertools.chain(*read_epoch(resumed, 1))
    order = itertools.chain(*read_epoch(build_loader(samples=40), 1))
    assert sorted(rest) == sorted(itertools.islice(order, 16, None))


def count(number):
    yield from ({"input_ids": [sample]} for sample in range(number))


def build_stream_loader(ranks=1, rank=0, batch_size=2, num_workers=0, samples=SAMPLES):
    rows = IterableDataset.from_generator(count, gen_kwargs={"number": samples}).shuffle(seed=3, buffer_size=5)
    return ResumableStreamLoader(
        SequenceStream(rows).share(ranks, rank),
        batch_size=batch_size,
        drop_last=True,
        num_workers=num_workers,
        collate_fn=collate_sequences,
    )


def test_ranks_share_out_the_stream_of_one():
    of_one = [ids(batch) for batch in build_stream_loader(batch_size=4, samples=31)]
    first, second = ([ids(batch) for batch in build_stream_loader(2, rank, samples=31)] for rank in (0, 1))
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(batch) for batch in of_one]
    assert len(set(itertools.chain(*of_one))) == 28


@pytest.mark.parametrize(("ranks", "batch_size", "num_workers"), [(1, 2, 0), (2, 1, 0), (1, 4, 1)])
def test_resumed_stream_goes_on_behind_the_batch_before_the_last(ranks, batch_size, num_workers):
    whole = build_stream_loader(samples=40)
    epochs = [list(itertools.chain(*map(ids, whole))) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3

    stopped = build_stream_loader(samples=40)
    assert stopped.state_dict() == {"epoch": 0, "samples": 0}
    list(stopped)
    assert stopped.state_dict() == {"epoch": 1, "samples": 0}
    list(itertools.islice(stopped, 7))
    assert stopped.state_dict() == {"epoch": 1, "samples": 12}

    rests = []
    for rank in range(ranks):
        resumed = build_stream_loader(ranks, rank, batch_size, num_workers, samples=40)
        assert resumed.get_optional_restored_batches() is None
        resumed.load_state_dict(stopped.state_dict())
        assert resumed.state_dict() == stopped.state_dict()
        batches = iter(resumed)
        rests.append(ids(next(batches)))
        assert resumed.get_optional_restored_batches() == 12 // (batch_size * ranks)
        rests[-1] += itertools.chain(*map(ids, batches))
        rests[-1] += itertools.chain(*map(ids, resumed))  # the next epoch
    assert [sample for each in zip(*rests, strict=True) for sample in each] == epochs[1][12:] + epochs[2]


make_trainer = partial(user_modules.make_trainer, strategy="auto", use_distributed_sampler=True)


def fit(num_workers=0, validate=False, ckpt_path=None, build=build_loader, **settings):
    module = RowRecorder()
    validation = build_loader(shuffle=False) if validate else None
    make_trainer(**settings).fit(module, build(num_workers=num_workers), validation, ckpt_path=ckpt_path)
    return module.trained


EVERY_STEP = {"every_n_train_steps": 1}
EPOCH_END = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
VALIDATION_END = {"every_n_epochs": 1, "save_on_train_epoch_end": False}


@pytest.mark.guarantees("next-sample")
@pytest.mark.parametrize(
    ("saves", "num_workers", "settings"),
    [
        (EVERY_STEP, 0, {}),
        (EVERY_STEP, 0, {"accumulate_grad_batches": 2}),
        (EVERY_STEP, 0, {"limit_train_batches": 3}),
        (EPOCH_END, 0, {}),
        (VALIDATION_END, 0, {"validate": True}),
        (VALIDATION_END, 0, {"validate": True, "val_check_interval": 2}),
        ({"every_n_train_steps": 5}, 1, {}),
        ({"every_n_train_steps": 7}, 1, {}),
    ],
    ids=["every-step", "accumulate", "limit", "epoch-end", "validation-end", "mid-epoch-validation", "last", "workers"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_resumed_fit_trains_on_what_was_left(tmp_path, saves, num_workers, settings):
    save = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **saves)
    whole = fit(num_workers, max_epochs=3, callbacks=[save], enable_checkpointing=True, **settings)
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) >= 2
    for path in checkpoints:
        progress = torch.load(path, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        rest = whole[progress["total"]["ready"] :]
        assert fit(num_workers, max_epochs=3, ckpt_path=path, **settings) == rest, path.name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_resumed_fit_on_a_stream_trains_on_what_was_left(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **EVERY_STEP)
    stream = {"build": build_stream_loader, "max_epochs": 3}
    whole = fit(callbacks=[save], enable_checkpointing=True, **stream)
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) >= 2
    for path in checkpoints:
        step = torch.load(path, weights_only=False)["global_step"]
        assert fit(ckpt_path=path, **stream) == whole[step:], path.name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_overfit_batches_repeats_the_first_samples():
    assert fit(max_epochs=2, overfit_batches=2) == [[(0,), (1,)], [(2,), (3,)]] * 2


def test_lightning_leaves_the_sampler_in_place():
    trainer = make_trainer(strategy="ddp", devices=2)
    prepare = trainer._data_connector._prepare_dataloader
    loader = build_loader(2, 1)
    assert prepare(loader, shuffle=True, mode=RunningStage.TRAINING) is loader
    # ... which it would not with another kind of sampler:
    plain = torch.utils.data.DataLoader(range(4), shuffle=True)
    assert isinstance(prepare(plain, shuffle=True, mode=RunningStage.TRAINING).sampler, DistributedSampler)
