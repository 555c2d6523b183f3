"""Flags that Megatron-FSDP is refused before a model is wrapped."""

import pytest
from helpers.strategies import STRATEGIES

from lightning_fsdp2 import MegatronFSDPConfig, create_device_mesh
from lightning_fsdp2.parallel.megatron.wrap import check_supported


def test_replicas_and_models_without_weights_need_shards() -> None:
    def run() -> None:
        meshes = [create_device_mesh(MegatronFSDPConfig(), dp_replicate_size=size) for size in (1, 2, 4)]
        shards, both, replicas = meshes
        for mesh, zero_dp_strategy, is_meta, message in (
            (replicas, 3, False, "dp_replicate_size=4 .* 1 rank.* to shard over"),
            (both, 0, False, "dp_replicate_size=2 .* zero_dp_strategy=0"),
            (shards, 0, True, "init_fsdp_with_meta_device=True .* zero_dp_strategy=0 shards nothing"),
            (both, 3, False, None),
            (shards, 0, False, None),
            (shards, 3, True, None),
        ):
            config = MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy, init_fsdp_with_meta_device=is_meta)
            if message is None:
                check_supported(mesh, config)
            else:
                with pytest.raises(ValueError, match=message):
                    check_supported(mesh, config)

    STRATEGIES["megatron_fsdp"].run(run, 4)
