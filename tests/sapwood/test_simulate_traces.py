"""Traces: every format is read as it is meant, equal ids mean equal tokens, and faults name their line."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sapwood.simulate.readers import RecordedRow, read_trace, write_recording
from sapwood.simulate.trace import VOCABULARY, Piece, Space, Trace, TraceError, TraceRequest, key, plain, token_ids

LARGE = {
    "mooncake_conversation.jsonl.gz": 10_000,
    "mooncake_synthetic.jsonl.gz": 3_200,
    "agentic_coding.jsonl.gz": 2_163,
    "azure_2023_code.csv.gz": 6_000,
    "azure_2023_conv.csv.gz": 12_000,
}
SMALL = {"mooncake.jsonl": 24, "agentic.jsonl": 24, "azure.csv": 30}


def prompt(request: TraceRequest) -> list[int]:
    ids: list[int] = token_ids(request.prompt).tolist()
    return ids


def output(request: TraceRequest) -> list[int]:
    ids: list[int] = token_ids(request.output).tolist()
    return ids


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that both have."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differs[0]) if len(differs) else length


@pytest.fixture(params=[*SMALL, *LARGE])
def trace_file(request: pytest.FixtureRequest, test_data: Path, shared_data: Path | None) -> tuple[Path, int]:
    """A trace and how many requests it has.  The large ones are beside the repository, or else a small one is taken."""
    name: str = request.param
    if name in LARGE and shared_data is not None:
        return shared_data / "traces" / name, LARGE[name]
    small = name if name in SMALL else next(one for one in SMALL if one.split(".")[0] in name)
    return test_data / "traces" / small, SMALL[small]


# ---- tokens ------------------------------------------------------------------------------------------------------


def test_tokens_of_a_piece_are_the_same_however_it_is_cut() -> None:
    keys = np.array([key(Space.SHARED, number) for number in (5, 6, 9)], dtype=np.uint64)
    whole = token_ids((Piece(keys, 7, 0, 20),)).tolist()
    assert token_ids((Piece(keys, 7, 0, 6), Piece(keys, 7, 6, 11), Piece(keys, 7, 17, 3))).tolist() == whole
    assert token_ids((Piece(keys[1:2], 7, 0, 7),)).tolist() == whole[7:14]


def test_different_texts_share_no_more_than_chance() -> None:
    texts = [token_ids((plain(space, number, 4096),)) for space in Space for number in range(20)]
    equal = [int((a == b).sum()) for i, a in enumerate(texts) for b in texts[:i]]
    assert max(equal) <= 4
    assert min(int(text.min()) for text in texts) >= 0
    assert max(int(text.max()) for text in texts) < VOCABULARY


def test_no_tokens_are_no_tokens() -> None:
    assert token_ids(()).tolist() == []


# ---- every format ------------------------------------------------------------------------------------------------


def test_a_trace_is_read_whole_and_every_request_has_its_tokens(trace_file: tuple[Path, int]) -> None:
    path, count = trace_file
    trace = read_trace(path)
    assert len(trace.requests) == count
    for number, request in enumerate(trace.requests):
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        assert request.arrival >= 0.0
        assert request.after is None or request.after < number
    for request in trace.requests[:: max(1, count // 20)]:
        assert len(prompt(request)) == request.prompt_tokens
        assert len(output(request)) == request.output_tokens


def test_a_mooncake_row_shares_as_many_tokens_as_its_leading_blocks_say(test_data: Path) -> None:
    path = test_data / "traces" / "mooncake.jsonl"
    rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    requests = read_trace(path).requests
    assert [r.prompt_tokens for r in requests] == [row["input_length"] for row in rows]
    assert [r.output_tokens for r in requests] == [row["output_length"] for row in rows]
    assert [r.arrival for r in requests] == [row["timestamp"] / 1000 for row in rows]
    texts = [prompt(request) for request in requests]
    pairs = 0
    for i, one in enumerate(rows):
        for j in range(i):
            blocks = shared(one["hash_ids"], rows[j]["hash_ids"])
            expected = min(blocks * 512, len(texts[i]), len(texts[j]))
            assert expected <= shared(texts[i], texts[j]) <= expected + 1
            pairs += 0 < blocks < len(one["hash_ids"])
    assert pairs > 20


def test_an_azure_row_has_lengths_and_a_time_and_shares_nothing(test_data: Path) -> None:
    requests = read_trace(test_data / "traces" / "azure.csv").requests
    assert (requests[0].arrival, requests[0].prompt_tokens, requests[0].output_tokens) == (0.0, 4808, 10)
    # 18:17:03.9799600 and 18:17:04.0319600; the clock has microseconds.
    assert requests[1].arrival == pytest.approx(0.052)
    assert shared(prompt(requests[0]), prompt(requests[1])) <= 1


@pytest.mark.parametrize("large", [False, True])
def test_an_agent_goes_on_from_its_own_answer(large: bool, test_data: Path, shared_data: Path | None) -> None:
    path = test_data / "traces" / "agentic.jsonl"
    if large and shared_data is not None:
        path = shared_data / "traces" / "agentic_coding.jsonl.gz"
    requests = read_trace(path).requests[:60]
    turns = [(requests[r.after], r) for r in requests if r.after is not None]
    continued = [
        shared(prompt(before) + output(before), prompt(turn)) >= before.prompt_tokens + before.output_tokens
        for before, turn in turns
    ]
    # Now and then an agent shortens its context, or its next prompt is shorter than this one and its answer.
    assert sum(continued) >= 0.7 * len(turns) > 10


def test_sessions_share_their_head_and_nothing_behind_it(test_data: Path) -> None:
    path = test_data / "traces" / "agentic.jsonl"
    rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    heads = [(row["tool_tokens"] + row["system_tokens"]) // 64 * 64 for row in rows]
    requests = read_trace(path).requests
    one, other = requests[0], next(r for r in requests[1:] if r.after is None)
    expected = min(heads[0], heads[1], one.prompt_tokens, other.prompt_tokens)
    assert expected <= shared(prompt(one), prompt(other)) <= expected + 1
    assert (one.arrival, other.arrival) == (0.0, 60.0)


def test_the_pause_of_an_agent_is_what_it_thought_but_no_longer_than_the_requests_are_apart(tmp_path: Path) -> None:
    steps = [
        {"t": 0.0, "in": 100, "out": 5, "hash_runs": [[1, 1]], "think_time": 0.0, "api_time": 7.0},
        {"t": 16.0, "in": 200, "out": 5, "hash_runs": [[1, 3]], "think_time": 9.0, "api_time": None},
        {"t": 24.0, "in": 300, "out": 5, "hash_runs": [[1, 4]], "think_time": 17.0, "api_time": None},
        {"t": 30.0, "in": 300, "out": 5, "hash_runs": [[1, 4]], "think_time": None},
    ]
    path = tmp_path / "agent.jsonl"
    path.write_bytes(msgspec.json.encode({"session": "s", "block_size": 64, "requests": steps}))
    requests = read_trace(path).requests
    assert [(r.after, r.arrival) for r in requests] == [(None, 0.0), (0, 9.0), (1, 8.0), (2, 6.0)]
    # Blocks 1 to 4 are 256 tokens; what is behind them in either of the last two is known to nobody else.
    assert shared(prompt(requests[2]), prompt(requests[3])) in (256, 257)
    assert shared(prompt(requests[0]) + output(requests[0]), prompt(requests[1])) == 105


def test_a_recording_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        RecordedRow(0.5, [("head", 50), ("mine", 3)], 7, max_tokens=7, tenant="a", priority=2),
        RecordedRow(1.25, [("head", 50), ("mine", 3), ("output:0", 7), ("more", 4)], 2, after=0),
        RecordedRow(2.0, [("head", 20)], 1, max_tokens=9),
    ]
    path = tmp_path / "run.jsonl"
    write_recording(path, rows)
    one, two, three = read_trace(path).requests
    assert (one.arrival, one.max_new_tokens, one.tenant, one.priority, one.after) == (0.5, 7, "a", 2, None)
    assert (two.arrival, two.max_new_tokens, two.after) == (1.25, None, 0)
    assert prompt(two)[:60] == prompt(one) + output(one)
    assert prompt(three) == prompt(one)[:20]


def test_a_packed_trace_is_read_like_a_plain_one(test_data: Path, tmp_path: Path) -> None:
    packed = tmp_path / "m.jsonl.gz"
    packed.write_bytes(gzip.compress((test_data / "traces" / "mooncake.jsonl").read_bytes()))
    assert read_trace(packed).name == "m"
    assert len(read_trace(packed).requests) == SMALL["mooncake.jsonl"]


# ---- faults ------------------------------------------------------------------------------------------------------

HEAD = b'{"trace":"sapwood","version":1}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello\n", "neither a Mooncake"),
        (b"[1, 2]\n", "neither a Mooncake"),
        (b'{"hash_ids": [1], "timestamp": 0, "input_length": 5}\n', ":1: Object missing required field"),
        (b'{"hash_ids":[1],"timestamp":0,"input_length":5,"output_length":1}\n{"x"\n', ":2: "),
        (
            b'{"hash_ids":[1],"timestamp":0,"input_length":0,"output_length":1}\n',
            "at `$.input_length`",
        ),
        (b'{"hash_ids":[-1],"timestamp":0,"input_length":5,"output_length":1}\n', ":1: "),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5\n", ":2: "),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,5\n", ":2: 0 tokens in"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (b'{"block_size":4,"requests":[{"t":0,"in":9,"out":1,"hash_runs":[[1,99999999]]}]}\n', ":1: a run of 99999999"),
        (b'{"block_size":0,"requests":[]}\n', "at `$.block_size`"),
        (b'{"block_size":4,"requests":[{"t":0,"in":9,"out":1,"hash_runs":[[1,-2]]}]}\n', ":1: Expected `int` >= 0"),
        (b'{"trace":"sapwood","version":2}\n', "a recording of version 2"),
        (
            HEAD + b'{"arrival":0,"prompt":[["a",5]],"output_tokens":0}\n',
            "at `$.output_tokens`",
        ),
        (HEAD + b'{"arrival":0,"prompt":[["output:0",5]],"output_tokens":1}\n', ":2: 5 tokens of 'output:0'"),
        (HEAD + b'{"arrival":0,"prompt":[["a",5]],"output_tokens":1,"after":0}\n', ":2: comes after row 0"),
        (
            HEAD + b'{"arrival":0,"prompt":[["a",-5],["b",9]],"output_tokens":1}\n',
            "at `$.prompt[0][1]`",
        ),
        (HEAD + b'{"arrival":-1,"prompt":[["a",5]],"output_tokens":1}\n', ":2: "),
        (b"\x1f\x8b\x08\x00broken", "cannot be read"),
    ],
)
def test_a_fault_in_a_trace_is_told_in_one_line_that_says_where(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_a_trace_knows_its_name(test_data: Path) -> None:
    assert isinstance(read_trace(test_data / "traces" / "azure.csv"), Trace)
    assert read_trace(test_data / "traces" / "azure.csv").name == "azure"
