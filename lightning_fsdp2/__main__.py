"""Entry point of ``python -m lightning_fsdp2`` and ``torchrun -m lightning_fsdp2``."""

from lightning_fsdp2.cli import main

if __name__ == "__main__":
    main()
