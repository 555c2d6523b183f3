"""Constructor arguments that all strategies have in common."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar, get_args

T = TypeVar("T")

RandomNumbers: TypeAlias = Literal["per_data_rank", "shared"]
"""Which ranks draw the same random numbers in training: only those that read the same data, or all ranks."""


def read_options(strategy: str, option: str, value: Any, kind: type[T]) -> T:
    """Return a strategy's argument as an instance of ``kind``.

    Args:
        strategy: Name of the strategy, for error messages.
        option: Name of the argument, for error messages.
        value: An instance of ``kind``, a mapping of its fields as in YAML, or None for the defaults.
        kind: Class of the options.

    Raises:
        TypeError: When ``value`` is something else, or has a field that ``kind`` lacks.
    """
    if isinstance(value, Mapping):
        return kind(**value)
    value = kind() if value is None else value
    if not isinstance(value, kind):
        raise TypeError(
            f"{strategy}({option}={value!r}) must be a {kind.__name__} or a mapping of its fields; pass"
            f" {kind.__name__}(...)."
        )
    return value


def check_timeouts(strategy: str, **timeouts: Any) -> None:
    """Refuse timeouts of the wrong type, or that are not positive. Only ``steady_timeout`` may be None.

    Raises:
        TypeError: When a timeout is no timedelta.
        ValueError: When a timeout is not positive.
    """
    for name, value in timeouts.items():
        if not isinstance(value, timedelta) and not (value is None and name == "steady_timeout"):
            raise TypeError(f"{strategy}({name}={value!r}) must be a timedelta; pass timedelta(...).")
        if value is not None and value <= timedelta(0):
            raise ValueError(f"{strategy}({name}={str(value)!r}) must be longer than 0.")


def shares_random_numbers(strategy: str, value: object) -> bool:
    """Return whether the argument ``random_numbers`` says that all ranks draw the same random numbers.

    Raises:
        ValueError: When ``value`` is not a word of :data:`RandomNumbers`.
    """
    if value not in get_args(RandomNumbers):
        raise ValueError(f"{strategy}(random_numbers={value!r}) must be 'per_data_rank' or 'shared'.")
    return value == "shared"
