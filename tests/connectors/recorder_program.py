"""A process that records until it is killed: says each record's id once it is written.

recorder_program.py BOOTSTRAP NAMESPACE FOLDER NAME
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from connectors.gateway.recorder import Outbound, Recorder
from connectors.kafka.client import Cluster

PARTITIONS = 2

if __name__ == "__main__":
    bootstrap, namespace, folder, name = sys.argv[1:]
    cluster = Cluster(bootstrap_servers=bootstrap, namespace=namespace)
    recorder = Recorder(lambda: cluster, Path(folder), writer="gateway")
    for index in range(1 << 30):
        record = Outbound(
            topic="agent-traffic",
            partition=index % PARTITIONS,
            key="session",
            id=f"{name}-{index}",
            value=b"%d" % index * 40,
        )
        recorder.write(record)
        print(record.id, flush=True)
        time.sleep(0.0005)
