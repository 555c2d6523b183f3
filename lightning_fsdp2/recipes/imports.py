"""Imports of objects that users name by their import path: classes, tensor parallel plans and Megatron-FSDP units."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_fsdp2.parallel.tensor.plans import PlanOption

logger = logging.getLogger(__name__)


def import_class_from_path(name: str) -> Any:
    """Import a class (or any module-level object) from its dotted path, such as ``"torch.optim.AdamW"``.

    Raises:
        ValueError: When ``name`` is not a dotted path.
        ImportError: When its module does not exist.
        AttributeError: When the module has no such object.
    """
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute or name.startswith("."):
        raise ValueError(f"{name!r} is not a dotted import path; write it like 'torch.optim.AdamW'.")
    return getattr(importlib.import_module(module_name), attribute)


def import_classes_from_paths(class_paths: Sequence[str]) -> list[Any]:
    """Import all ``class_paths`` that can be imported, in order; skip the others with a warning."""
    classes = []
    for path in class_paths:
        try:
            classes.append(import_class_from_path(path))
        except (ValueError, ImportError, AttributeError) as error:
            logger.warning("Could not import %r: %s", path, error)
    return classes


def import_plan(plan: PlanOption) -> PlanOption:
    """Return ``plan``; if it is an import path, return the object at that path instead.

    Raises:
        TypeError: When the object at the path is neither a mapping nor a function.
        ValueError: When there is no object at the path.
    """
    if not isinstance(plan, str) or plan == "hf":
        return plan
    try:
        found = import_class_from_path(plan)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"tp_plan={plan!r} cannot be imported ({error}); use 'hf', or the path of a dict or a function, such as"
            " 'my_package.plans.my_plan'."
        ) from error
    if isinstance(found, type) or not (isinstance(found, Mapping) or callable(found)):
        raise TypeError(
            f"tp_plan={plan!r} is of type {type(found).__name__}; give the path of a dict, or of a function that"
            " returns a dict."
        )
    return found


def import_unit_classes(paths: Sequence[str]) -> list[type[nn.Module]]:
    """Import the classes of modules that become units of Megatron-FSDP.

    Raises:
        TypeError: When the object at a path is not a module class.
        ValueError: When there is no object at a path.
    """
    return [_import_unit_class(path) for path in paths]


def _import_unit_class(path: str) -> type[nn.Module]:
    try:
        found = import_class_from_path(path)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"megatron_fsdp_unit_modules: {path!r} cannot be imported ({error}); give import paths of module classes,"
            " such as 'transformers.models.llama.modeling_llama.LlamaDecoderLayer'."
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TypeError(f"megatron_fsdp_unit_modules: {path!r} is {found!r}; give the path of a subclass of nn.Module.")
    return found
