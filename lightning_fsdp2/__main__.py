"""``python -m lightning_fsdp2`` and, for several processes, ``torchrun -m lightning_fsdp2``."""

from lightning_fsdp2.cli import main

if __name__ == "__main__":
    main()
