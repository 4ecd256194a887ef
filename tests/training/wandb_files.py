"""Reader of wandb's offline files: LevelDB log records, each with a message of wandb's protocol."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


def records(file: Path) -> Iterator[Any]:
    """Return the messages of a ``run-*.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of the block is padding
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a full record, or the last part of a record
            message = wandb_internal_pb2.Record()
            message.ParseFromString(parts)
            parts = b""
            yield message


def offline_run(folder: Path) -> dict[str, Any]:
    """Return the only offline run below `folder`: its ``run`` message, history, summary and defined metrics."""
    (file,) = folder.rglob("offline-run-*/run-*.wandb")
    for _ in range(300):  # wandb's process writes the last records after `finish` returns
        if any(message.WhichOneof("record_type") == "exit" for message in records(file)):
            break
        time.sleep(0.1)
    found: dict[str, Any] = {"history": [], "summary": {}, "metrics": {}}
    for message in records(file):
        kind = message.WhichOneof("record_type")
        if kind == "run":
            found["run"] = message.run
        elif kind == "history":
            found["history"].append({_key(item): json.loads(item.value_json) for item in message.history.item})
        elif kind == "summary":
            found["summary"].update({_key(item): json.loads(item.value_json) for item in message.summary.update})
        elif kind == "metric":
            found["metrics"][message.metric.name or message.metric.glob_name] = message.metric.summary
    return found


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)
