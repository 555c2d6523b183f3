"""Weights that do not fit a model which is divided into stages."""

import copy
import re
from typing import Any

import torch
from helpers.models import make_causal_lm
from helpers.pipelines import CONFIGS
from helpers.ranks import raises_on_all_ranks, run_ranks

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.checkpoint.loading import load_model_state


def test_every_stage_names_what_does_not_fit_any() -> None:
    whole = make_causal_lm(CONFIGS["gpt2"])
    names = [f"transformer.h.{layer}.ln_1.weight" for layer in range(4)]

    def run(changes: dict[str, Any]) -> None:
        config = FSDP2Config(pp_schedule="1f1b")
        mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
        model = copy.deepcopy(whole)
        FSDP2Manager(config, mesh).parallelize(model)
        state = {**whole.state_dict(), **changes}
        load_model_state("a.ckpt", model, {name: value for name, value in state.items() if value is not None})

    misfit = re.escape(f"size mismatch for {names[0]}")
    missing = re.escape(f'Missing key(s) in state_dict: "{names[1]}", "{names[3]}".')
    unexpected = re.escape('Unexpected key(s) in state_dict: "extra".')
    changes = {names[0]: torch.ones(3), names[1]: None, names[3]: None, "extra": torch.ones(1)}
    with raises_on_all_ranks(ValueError, misfit):
        run_ranks(run, 2, changes)
    del changes[names[0]]
    with raises_on_all_ranks(ValueError, rf"(?s){missing}.*{unexpected}"):
        run_ranks(run, 2, changes)
    run_ranks(run, 2, {})
