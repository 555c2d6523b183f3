"""Read back what the wandb client has written: a log in LevelDB's format of protobuf records."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024

_HEADER = struct.Struct("<4sHB")
"""Of the file: identity, magic number, version."""

_CHUNK = struct.Struct("<IHB")
"""Of each chunk: CRC, length, kind."""

_FULL, _FIRST, _MIDDLE, _LAST = range(1, 5)


@dataclass
class WandbRun:
    """What one start of a process has written of a run."""

    id: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    step_metrics: dict[str, str] = field(default_factory=dict)
    """The axis of each metric that is defined, or of each glob."""

    artifacts: list[Any] = field(default_factory=list)
    """``ArtifactRecord``s."""

    def get_column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows if name in row]


def read_runs(folder: Path) -> list[WandbRun]:
    """The runs below a ``save_dir``, in the order in which they were started."""
    return [read_run(path) for path in sorted(folder.glob("wandb/*run-*/run-*.wandb"))]


def read_run(path: Path) -> WandbRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = WandbRun()
    for data in _read_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        _add(run, record)
    return run


def _add(run: WandbRun, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.id, run.project, run.tags = record.run.run_id, record.run.project, list(record.run.tags)
        run.config |= _read_items(record.run.config.update)
    elif kind == "config":
        run.config |= _read_items(record.config.update)
    elif kind == "history":
        run.rows.append(_read_items(record.history.item))
    elif kind == "metric":
        run.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    elif kind == "artifact":
        run.artifacts.append(record.artifact)
    elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
        run.artifacts.append(record.request.log_artifact.artifact)


def _read_items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _read_records(data: bytes) -> Iterator[bytes]:
    """Whole records; the last one of a process that was killed may be a part."""
    assert _HEADER.unpack_from(data) == (b":W&B", 0xBEE1, 0)
    position, parts = _HEADER.size, b""
    while position + _CHUNK.size <= len(data):
        if _BLOCK - position % _BLOCK < _CHUNK.size:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = _CHUNK.unpack_from(data, position)
        position += _CHUNK.size
        parts = (
            data[position : position + length]
            if kind in (_FULL, _FIRST)
            else parts + data[position : position + length]
        )
        position += length
        if kind in (_FULL, _LAST) and position <= len(data):
            yield parts
