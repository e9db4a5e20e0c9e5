"""A real S3 API server on the loopback, and what an S3 client needs to reach it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class S3:
    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """For `checkpoint.options`."""
        return {"endpoint_url": self.endpoint, "key": "test", "secret": "test"}

    @property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Every object's size by its key."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in found}

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)


@contextmanager
def s3_server(port: int = 0) -> Iterator[S3]:
    """Serves from a thread, with an empty bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        host, at = server.get_host_and_port()
        s3 = S3(f"http://{host}:{at}")
        s3.client.create_bucket(Bucket=BUCKET)
        yield s3
    finally:
        server.stop()
