"""Pipeline parallelism, which splits a model's layers over ranks and a batch into micro-batches; see ``apply.py``."""
