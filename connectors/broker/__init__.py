"""The embedded broker: the Kafka protocol over TCP from one data directory, for runs without a
Kafka.

    python -m connectors.broker --data-dir D

    server.py     the process: lock, port, connections; one request at a time a connection
    security.py   TLS, and who a connection is; users.py: their file
    protocol.py   frames, request headers, what an API is
    api/          the table of APIs; one function each, by area
    topics.py     topics and their configuration, as folders
    configs.py    which configs a topic has, and what they may be
    partition.py  the asyncio side of a log: appends in turn, waking of long polls
    log.py        one partition: segments, start offset, trimming, retention
    segment.py    one file of record batches and the index of their positions
    batch.py      the header of a record batch
    producers.py  what idempotent producers have written, for refusing repeats and gaps
    groups.py     all consumer groups, and what they commit
    group.py      one consumer group: a state machine without I/O
    members.py    one member of it
    offsets.py    committed offsets, as a log

One node, no replication and no transactions. It promises that an acknowledged record, or committed
offset, survives `kill -9` (and power loss with fsync `always`), that a torn tail is repaired, and
that damage before intact records is reported and never repaired by dropping them.
"""
