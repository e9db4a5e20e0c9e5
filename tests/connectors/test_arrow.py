import contextlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.arrow import CorruptRecord, checksum, decode_group, encode_group
from connectors.records import Group, Origin, Prompt, Segment, Trajectory

text = st.text(max_size=12)
floats = st.floats(width=32, allow_nan=False)


@st.composite
def trajectories(draw, group_id: str, index: int) -> Trajectory:
    n = draw(st.integers(0, 40))
    cuts = sorted(draw(st.sets(st.integers(0, n), max_size=4)))
    return Trajectory(
        trajectory_id=f"{group_id}/{index}",
        group_id=group_id,
        task=draw(text),
        tokens=np.array(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32
        ),
        loss_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), np.int8),
        logprobs=np.array(
            draw(st.lists(floats | st.just(float("nan")), min_size=n, max_size=n)), np.float32
        ),
        segments=tuple(
            Segment(a, b, draw(st.integers(0, 3)), draw(st.integers(0, 10**6)))
            for a, b in pairwise(cuts)
        ),
        origin=Origin(draw(text), draw(st.integers(0, 99)), draw(st.integers(0, 2**60))),
        source=draw(st.sampled_from(["rollout", "traffic", "import"])),
        behaviour=draw(st.sampled_from(["exact", "recomputed", "text"])),
        reward=draw(floats),
        rewards=tuple(draw(st.lists(st.tuples(st.integers(0, 40), floats, text), max_size=3))),
        reward_parts=draw(st.dictionaries(text, floats, max_size=3)),
        turns=draw(st.integers(1, 9)),
        finish_reason=draw(st.sampled_from(["stop", "length", "cancelled", "error"])),
        created_at=draw(st.floats(0, 2e9)),
        finished_at=draw(st.floats(0, 2e9)),
        metadata=draw(st.dictionaries(text, text, max_size=3)),
    )


@st.composite
def groups(draw) -> Group:
    rows = draw(st.integers(1, 5))
    return Group(
        group_id="t/0/7",
        prompt=Prompt(task=draw(text), prompt=draw(text), reward=draw(st.none() | text)),
        trajectories=tuple(draw(trajectories("t/0/7", i)) for i in range(rows)),
    )


def assert_same(a: Group, b: Group) -> None:
    assert (a.group_id, a.prompt) == (b.group_id, b.prompt)
    for x, y in zip(a.trajectories, b.trajectories, strict=True):
        for name in Trajectory.__slots__:
            left, right = getattr(x, name), getattr(y, name)
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype, name
                np.testing.assert_array_equal(left, right, err_msg=name)
            else:
                assert left == right, name


@settings(max_examples=60, deadline=None)
@given(groups())
def test_a_group_comes_back_as_it_went(group: Group) -> None:
    data = encode_group(group)
    assert_same(decode_group(data, checksum(data)), group)


@settings(max_examples=60, deadline=None)
@given(groups(), st.data())
def test_a_truncated_message_is_recognised(group: Group, data: st.DataObject) -> None:
    message = encode_group(group)
    # The last eight bytes are Arrow's end-of-stream mark; without them the batch is still whole.
    cut = data.draw(st.integers(0, len(message) - 9))
    with pytest.raises(CorruptRecord):
        decode_group(message[:cut], checksum(message))
    with contextlib.suppress(CorruptRecord):  # without a checksum: whole or refused
        assert_same(decode_group(message[:cut]), group)


@settings(max_examples=60, deadline=None)
@given(groups(), st.data())
def test_any_flipped_bit_is_recognised_by_the_checksum(group: Group, data: st.DataObject) -> None:
    message = bytearray(encode_group(group))
    crc = checksum(bytes(message))
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptRecord, match="checksum"):
        decode_group(bytes(message), crc)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"kind":"closed"}', b"\xff" * 64, b"\0" * 4096])
def test_what_is_no_group_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_group(data)


def test_decoded_arrays_are_views_of_the_message() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    row = Trajectory(
        trajectory_id="t/0/1/0", group_id="t/0/1", task="a", tokens=tokens,
        loss_mask=np.ones(1000, np.int8), logprobs=np.zeros(1000, np.float32), segments=(),
        origin=Origin("t", 0, 1),
    )  # fmt: skip
    message = encode_group(
        Group(group_id="t/0/1", prompt=Prompt(task="a", prompt="x"), trajectories=(row,))
    )
    read = decode_group(message).trajectories[0].tokens
    base = np.frombuffer(message, np.uint8)
    assert base.ctypes.data <= read.ctypes.data < base.ctypes.data + len(message)
    assert not read.flags.writeable


def test_a_reader_ignores_columns_it_does_not_know_and_takes_defaults_for_those_it_misses() -> None:
    import pyarrow as pa

    row = Trajectory(
        trajectory_id="t/0/1/0", group_id="t/0/1", task="a", tokens=np.arange(3, dtype=np.int32),
        loss_mask=np.ones(3, np.int8), logprobs=np.zeros(3, np.float32), segments=(),
        origin=Origin("t", 0, 1), turns=4,
    )  # fmt: skip
    group = Group(group_id="t/0/1", prompt=Prompt(task="a", prompt="x"), trajectories=(row,))
    with pa.ipc.open_stream(encode_group(group)) as reader:
        batch, schema = reader.read_next_batch(), reader.schema
    newer = batch.drop_columns(["turns"]).append_column("later", pa.array([1]))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, newer.schema.with_metadata(schema.metadata)) as writer:
        writer.write_batch(newer)
    read = decode_group(bytes(sink.getvalue()))
    assert read.trajectories[0].turns == 1
    assert read.prompt == group.prompt


def test_arrays_of_different_lengths_make_no_trajectory() -> None:
    with pytest.raises(ValueError, match="differ in length: 3, 2, 3"):
        Trajectory(
            trajectory_id="x", group_id="g", task="a", tokens=np.zeros(3, np.int32),
            loss_mask=np.zeros(2, np.int8), logprobs=np.zeros(3, np.float32), segments=(),
            origin=Origin("t", 0, 0),
        )  # fmt: skip


NULLS: list[tuple[str, object]] = [
    ("tokens", [[1, None, 3]]),
    ("tokens", [None]),
    ("loss_mask", [[1, None, 1]]),
    ("loss_mask", [None]),
    ("logprobs", [[0.0, None, 0.0]]),
    ("logprobs", [None]),
    ("segments", [[None]]),
    ("segments", [[{"start": 0, "end": None, "incarnation": 0, "number": 0}]]),
    ("rewards", [[None]]),
    ("rewards", [[{"token": 1, "value": None, "name": "turn"}]]),
    ("rewards", [[{"token": None, "value": 1.0, "name": "turn"}]]),
    ("rewards", [[{"token": 1, "value": 1.0, "name": None}]]),
    ("reward_parts", [[("length", None)]]),
    ("metadata", [[("a", None)]]),
    ("origin", [{"topic": "t", "partition": None, "offset": 1}]),
    ("origin", [None]),
]


def plain_group() -> Group:
    """One row of three tokens."""
    row = Trajectory(
        trajectory_id="t/0/1/0", group_id="t/0/1", task="a", tokens=np.arange(3, dtype=np.int32),
        loss_mask=np.ones(3, np.int8), logprobs=np.zeros(3, np.float32), segments=(),
        origin=Origin("t", 0, 1),
    )  # fmt: skip
    return Group(group_id="t/0/1", prompt=Prompt(task="a", prompt="x"), trajectories=(row,))


@pytest.mark.parametrize(("name", "given"), NULLS, ids=str)
def test_a_null_where_it_is_no_value_makes_no_group(name: str, given: object) -> None:
    import pyarrow as pa

    with pa.ipc.open_stream(encode_group(plain_group())) as reader:
        batch, schema = reader.read_next_batch(), reader.schema
    at = batch.schema.get_field_index(name)
    other = batch.set_column(at, name, pa.array(given, batch.schema.field(name).type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, other.schema.with_metadata(schema.metadata)) as writer:
        writer.write_batch(other)
    with pytest.raises(CorruptRecord):
        decode_group(bytes(sink.getvalue()))


def test_columns_of_another_type_make_no_group() -> None:
    import pyarrow as pa

    with pa.ipc.open_stream(encode_group(plain_group())) as reader:
        batch, schema = reader.read_next_batch(), reader.schema
    for name, wrong in (
        ("reward", pa.array(["high"])),
        ("trajectory_id", pa.array([7], pa.int32())),
        ("tokens", pa.array([3], pa.int32())),
    ):
        at = batch.schema.get_field_index(name)
        other = batch.set_column(at, name, wrong)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, other.schema.with_metadata(schema.metadata)) as writer:
            writer.write_batch(other)
        with pytest.raises(CorruptRecord, match=name):
            decode_group(bytes(sink.getvalue()))
