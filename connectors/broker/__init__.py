"""The embedded broker: the Kafka protocol over TCP from one data directory, for runs without a
Kafka.

    python -m connectors.broker --data-dir D

    server.py     the process: lock, port, connections; one request at a time a connection
    protocol.py   frames, request headers, what an API is
    api/          the table of APIs; one function each, by area
    topics.py     topics and their configuration, as folders
    partition.py  the asyncio side of a log: appends in turn, waking of long polls
    log.py        one partition: segments, start offset, trimming
    segment.py    one file of record batches and the index of their positions
    batch.py      the header of a record batch
    producers.py  what idempotent producers have written, for refusing repeats and gaps

One node, no replication, no transactions and no consumer groups. It promises that an acknowledged
record survives `kill -9` (and power loss with fsync `always`), that a torn tail is repaired, and
that damage before intact records is reported and never repaired by dropping them.
"""
