"""What keeps a broker from starting, the refusals it gives to clients, and Kafka's error codes."""

from __future__ import annotations

from enum import IntEnum


class BrokerError(RuntimeError):
    """The broker cannot run. The message is one line for the person who started it."""


class DirectoryLocked(BrokerError):
    """Another broker serves this data directory."""


class DirectoryUnusable(BrokerError):
    """The data directory cannot be created, read or written."""


class PortTaken(BrokerError):
    """Another process listens on the port."""


class CannotListen(BrokerError):
    """The address is none of this machine's, or may not be bound."""


class CorruptLog(BrokerError):
    """Stored records are damaged or missing; names the file and the position."""


class CertificateUnusable(BrokerError):
    """The certificate or its key cannot be read, or they do not belong together."""


class UsersUnusable(BrokerError):
    """The file of users cannot be read, written or trusted, or a user is none."""


class ErrorCode(IntEnum):
    """Kafka's error codes, as far as this broker gives them."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC = 17
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    MEMBER_ID_REQUIRED = 79
    FENCED_INSTANCE_ID = 82
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87


class Refused(Exception):
    """A request, or one partition of it, that is answered with an error code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
