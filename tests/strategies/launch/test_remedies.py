"""Advice is given for the errors that need it, and for no others."""

from collections.abc import Callable

import pytest
from lightning.pytorch.utilities import grad_norm

from lightning_fsdp2.strategies.launch import remedies
from lightning_fsdp2.strategies.launch.remedies import add_remedy, get_optional_remedy, is_raised_in

FREED = "setStorage: sizes [8], strides [1], and itemsize 4 are out of bounds for storage of size {}"


def catch(function: Callable[[], None]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error")


def fail_in_grad_norm() -> None:
    grad_norm(None, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("exception", "hosts", "remedy"),
    [
        (RuntimeError("aten.mm.default: got mixed torch.Tensor and DTensor"), [], "unshard_fsdp2_model"),
        (RuntimeError(FREED.format(0)), [], "no second-order gradients"),
        (RuntimeError(FREED.format(16)), [], None),
        (RuntimeError("the storage of size 0 is empty"), [], None),
        (RuntimeError("Connection closed by peer [10.0.0.1]:3"), ["a", "b"], "no longer answers. Only b of 2 does."),
        (RuntimeError("Timed out waiting 1800000ms"), ["a", "b"], "Another rank has ended"),
        (RuntimeError("Connection closed by peer [10.0.0.1]:3"), ["a"], None),
        (ValueError("Connection closed by peer [10.0.0.1]:3"), ["a", "b"], None),
        (catch(fail_in_grad_norm), [], "callbacks.GradientNorm"),
        (AttributeError("'NoneType' object has no attribute 'named_parameters'"), ["a", "b"], None),
    ],
)
def test_errors_and_their_remedies(
    exception: BaseException, hosts: list[str], remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "say_who_answers", lambda hosts: f"Only b of {len(hosts)} does.")
    message = str(exception)
    found = get_optional_remedy(exception, hosts)
    add_remedy(exception, hosts)
    if remedy is None:
        assert found is None
        assert str(exception) == message
    else:
        assert remedy in found
        assert str(exception) == f"{message}\n{found}"


def test_an_error_comes_from_the_function_that_raises_it() -> None:
    def fail() -> None:
        raise KeyError

    def call() -> None:
        fail()

    error = catch(call)
    assert is_raised_in(fail.__code__, error)
    assert not is_raised_in(call.__code__, error)
    assert not is_raised_in(fail.__code__, KeyError())
