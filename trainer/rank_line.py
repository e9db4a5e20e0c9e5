"""What rank 0 and another rank say to each other, over a pipe of their own.

    rank 0  ──▶ Start once, Calls in order, and Write beside them
    rank    ──▶ Ready once; Written for each Write; Failed before an error ends it

A pipe waits for days without a time-out, and each end hears at once that the other is gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from connectors.config import Config
from connectors.kafka.client import Cluster
from trainer.shares import Call


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """`config`: as JSON, its relative paths from `base_dir`; `store`: address and port of where the
    ranks meet; `cluster`: the log that the steps' records are in."""

    rank: int
    num_ranks: int
    store: tuple[str, int]
    config: str
    base_dir: str
    cluster: Cluster

    @property
    def parsed(self) -> Config:
        return Config.model_validate_json(self.config).model_copy(
            update={"base_dir": self.base_dir}
        )


class Write(msgspec.Struct, frozen=True, tag="write"):
    """The state of the last Capture, into this folder, while the Calls go on."""

    folder: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """It is about to meet the others."""


class Written(msgspec.Struct, frozen=True, tag="written"):
    """`error`: why it was not, None when it was."""

    folder: str
    error: str | None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: str


Told = Start | Write | Call
Said = Ready | Written | Failed

encode: Final = msgspec.msgpack.Encoder().encode
decode_told: Final = msgspec.msgpack.Decoder(Told).decode
decode_said: Final = msgspec.msgpack.Decoder(Said).decode
