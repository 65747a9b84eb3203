"""Keys and files of blocks: the same run has the same keys, and no damage goes unseen."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.disk import (
    CHECKSUM_BYTES,
    Block,
    BlockChain,
    Head,
    UnusableFile,
    blocks_beginning_with,
    checksum,
    decode_head,
    encode_head,
    next_key,
    root_key,
    verify,
)

IDENTITY = b"weights, layout"
PAYLOAD = bytes(range(200))


def packed(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def block(identity: bytes = IDENTITY, namespace: str = "tenant", first: int = 1, depth: int = 1) -> Block:
    chain = BlockChain(identity, namespace, 2)
    return chain.block(packed(first, 2, 3, 4, 5, 6), depth)


def file_of(block: Block, identity: bytes = IDENTITY, payload: bytes = PAYLOAD) -> bytes:
    head = encode_head(identity, block, len(payload))
    return head + checksum(head, payload) + payload


def check(found: bytes, wanted: Block, identity: bytes = IDENTITY) -> None:
    """Read a file as it is read from disk, and raise UnusableFile when it is not the one wanted."""
    expected = encode_head(identity, wanted, len(PAYLOAD))
    end = len(expected)
    verify(expected, found[:end], found[end : end + CHECKSUM_BYTES], found[end + CHECKSUM_BYTES :])


def test_what_was_written_is_what_is_read() -> None:
    check(file_of(block()), block())


def test_every_flipped_bit_and_every_cut_is_seen() -> None:
    whole = file_of(block())
    for place in range(len(whole)):
        for bit in (1, 128):
            with pytest.raises(UnusableFile):
                check(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :], block())
        with pytest.raises(UnusableFile):
            check(whole[:place], block())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (b"", "no file of pages"),
        (b"something else, and long enough to be one" * 9, "no file of pages"),
        (file_of(block(b"other weights"), b"other weights"), "another model"),
        (file_of(block(), payload=PAYLOAD[:-8]), "another size"),
        (file_of(block(namespace="nobody")), "another namespace"),
        (file_of(block(first=9)), "other tokens"),
        (file_of(block(depth=2)), "other tokens"),
    ],
)
def test_the_reason_is_named(found: bytes, words: str) -> None:
    with pytest.raises(UnusableFile, match=words):
        check(found, block())


def test_a_file_of_another_format_is_named_so() -> None:
    whole = bytearray(file_of(block()))
    whole[8] += 1
    with pytest.raises(UnusableFile, match="written in format 2"):
        check(bytes(whole), block())


def test_the_key_of_a_block_is_a_digest_of_all_before_it() -> None:
    tokens = packed(1, 2, 3, 4)
    chain = BlockChain(IDENTITY, "tenant", 2)
    first = next_key(root_key(IDENTITY, "tenant"), tokens[:8])
    assert chain.key(tokens, 1) == next_key(first, tokens[8:])
    assert chain.block(tokens, 0) == Block("tenant", root_key(IDENTITY, "tenant"), first, tokens[:8], 0)
    assert chain.block(tokens, 1).previous == first


runs = st.lists(st.integers(0, 3), min_size=4, max_size=4)
names = st.sampled_from(["", "a", "b", "ab"])


@given(one=runs, other=runs, namespace=names, other_namespace=names, identity=st.sampled_from([b"x", b"xa"]))
def test_keys_are_equal_exactly_when_everything_up_to_there_is(
    one: list[int], other: list[int], namespace: str, other_namespace: str, identity: bytes
) -> None:
    a, b = BlockChain(identity, namespace, 2), BlockChain(b"x", other_namespace, 2)
    for depth in range(2):
        same = (one[: 2 * depth + 2], namespace, identity) == (other[: 2 * depth + 2], other_namespace, b"x")
        assert (a.key(packed(*one), depth) == b.key(packed(*other), depth)) == same


def test_a_chain_goes_on_where_a_run_grows() -> None:
    grown, whole = BlockChain(IDENTITY, "", 2), BlockChain(IDENTITY, "", 2)
    tokens = packed(*range(20))
    for end in range(8, 81, 8):
        assert grown.key(tokens[:end], end // 8 - 1) == whole.key(tokens, end // 8 - 1)


def heads_of(*runs: tuple[int, ...], namespace: str = "tenant") -> dict[bytes, Head]:
    """The heads of all blocks of these runs, two tokens each, as they are read from files."""
    found = {}
    for run in runs:
        chain = BlockChain(IDENTITY, namespace, 2)
        for depth in range(len(run) // 2):
            head = decode_head(file_of(chain.block(packed(*run), depth)), IDENTITY)
            assert head is not None
            found[head.key] = head
    return found


def forgotten(heads: dict[bytes, Head], *tokens: int) -> list[list[int]]:
    """The tokens of the blocks that a prefix takes along."""
    doomed = blocks_beginning_with(heads.values(), root_key(IDENTITY, "tenant"), packed(*tokens))
    return sorted(list(array("i", heads[key].tokens)) for key in doomed)


def test_a_head_is_read_as_it_was_written() -> None:
    one = block()
    head = decode_head(file_of(one), IDENTITY)
    assert head == Head(one.namespace, one.previous, one.key, one.tokens)
    assert decode_head(file_of(one), b"weights, layouts") is None
    assert decode_head(file_of(one)[: len(encode_head(IDENTITY, one, 0)) - 1], IDENTITY) is None
    assert decode_head(b"", IDENTITY) is None
    assert decode_head(b"x" + file_of(one)[1:], IDENTITY) is None


def test_the_blocks_of_a_prefix_are_found_with_all_that_follows_them() -> None:
    heads = heads_of((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8), (1, 2, 9, 9), (3, 4, 5, 6))
    assert forgotten(heads, 1, 2, 3, 4) == [[3, 4], [5, 6], [7, 8]]
    assert forgotten(heads, 1, 2, 3) == [[3, 4], [5, 6], [7, 8]]
    assert forgotten(heads, 1, 2, 3, 4, 7) == [[7, 8]]
    assert forgotten(heads, 1) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 9]]
    # What nothing else goes on from goes along.
    assert forgotten(heads, 3, 4, 5, 6) == [[3, 4], [5, 6]]
    assert forgotten(heads, 8) == []
    assert len(forgotten(heads)) == len(heads) == 7


def test_blocks_that_nobody_can_load_are_forgotten_along() -> None:
    heads = heads_of((1, 2, 3, 4, 5, 6), (7, 8))
    first = next(key for key, head in heads.items() if head.tokens == packed(1, 2))
    del heads[first]
    assert forgotten(heads, 9) == [[3, 4], [5, 6]]
