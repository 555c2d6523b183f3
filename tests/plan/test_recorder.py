import torch
import torch.nn.functional as F

from lightning_fsdp2.plan.recorder import ACTIVATIONS, COMMUNICATION_BUFFERS, LOGITS, TEMPORARIES, StepRecorder


def test_what_is_resized_and_what_is_freed_is_seen() -> None:
    with StepRecorder({}) as recorder:
        recorder.begin("forward")
        first = torch.empty(256)
        first.untyped_storage().resize_(0)
        second = torch.empty(128)
        view = second[:64]
        del second
        third = torch.empty(64)
        del view, third
    assert [change for _, _, change in recorder.get_recording().changes] == [1024, -1024, 512, 256, -512, -256]


def test_what_forward_leaves_is_activations_and_what_is_as_wide_as_the_vocabulary_is_logits() -> None:
    weight = torch.ones(7, 4, requires_grad=True)
    with StepRecorder({}, vocabulary=[7]) as recorder:
        recorder.begin("forward")
        hidden = torch.ones(5, 4).exp()
        logits = F.linear(hidden, weight)
        recorder.label_rest(ACTIVATIONS, phase="forward")
        recorder.begin("backward")
        temporary = torch.ones(3)
        del temporary
    sizes = [(category, change) for _, category, change in recorder.get_recording().changes if change > 0]
    assert (ACTIVATIONS, hidden.nbytes) in sizes
    assert (LOGITS, logits.nbytes) in sizes
    assert sizes[-1] == (TEMPORARIES, 12)
    assert [name for _, name in recorder.get_recording().phases] == ["forward", "backward"]


def test_what_is_known_is_no_logits_whatever_its_size() -> None:
    with StepRecorder({}, vocabulary=[7]) as recorder:
        recorder.begin("forward")
        buffers = torch.ones(2, 7)
        recorder.label([buffers], COMMUNICATION_BUFFERS)
    assert [category for _, category, _ in recorder.get_recording().changes] == [COMMUNICATION_BUFFERS]


def test_operations_by_their_products_and_their_bytes() -> None:
    first, second = torch.ones(8, 16), torch.ones(16, 4, dtype=torch.float32)
    table, ids = torch.ones(1000, 4), torch.zeros(6, dtype=torch.int64)
    with StepRecorder({}) as recorder:
        recorder.begin("forward")
        product = first @ second
        product.view(-1)
        product + product
        F.embedding(ids, table)
    matmul, add, lookup = recorder.get_recording().operations
    assert (matmul.flops, matmul.bytes) == (2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4))
    assert (add.flops, add.bytes) == (0, 3 * product.nbytes)
    assert lookup.bytes == 2 * 4 * 6 * 4 + ids.nbytes  # the rows it looks up, not the table
    assert recorder.get_recording().flops == matmul.flops


def test_causal_attention_has_half_of_the_products() -> None:
    query = torch.ones(1, 2, 64, 16)

    def count(is_causal: bool) -> int:
        with StepRecorder({}) as recorder:
            recorder.begin("forward")
            F.scaled_dot_product_attention(query, query, query, is_causal=is_causal)
        return recorder.get_recording().flops

    assert count(False) == 2 * count(True) == 2 * 2 * 2 * 64 * 64 * 16
