"""Expert parallelism, which distributes a layer's experts over ranks and sends tokens to them; see ``apply.py``."""
