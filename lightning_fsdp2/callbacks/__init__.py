"""Lightning callbacks; they work under any strategy."""

from lightning_fsdp2.callbacks.hugging_face_export import HuggingFaceExport
from lightning_fsdp2.callbacks.run_report import RunReport

__all__ = ["HuggingFaceExport", "RunReport"]
