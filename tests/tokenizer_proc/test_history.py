"""Replies remembered by the text before them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenizer_proc.history import (
    BLOCK_CHARACTERS,
    MAX_REPLIES_OF_A_PROMPT,
    History,
    Reply,
    block_digests,
    mark_of,
)


def reply_to(prompt: str, text: str, ids: list[int] | None = None, scope: str = "") -> Reply:
    return Reply(mark_of(block_digests(scope, prompt), prompt, [1, 2]), text, ids or [7])


def found(history: History, text: str, scope: str = "") -> list[tuple[int, str]]:
    return [(reply.start, reply.text) for reply in history.find(block_digests(scope, text), text)]


PIECES = st.text("ab🐙\n", max_size=700)


@given(st.lists(st.tuples(PIECES, st.text("ab🐙\n", min_size=1, max_size=20)), max_size=8), PIECES)
def test_exactly_the_replies_that_stand_after_their_prompts_are_found(
    replies: list[tuple[str, str]], text: str
) -> None:
    history = History(10**9)
    for prompt, reply in replies:
        history.add(reply_to(prompt, reply))
        history.add(reply_to(text[: len(prompt)], reply))
    expected = {(len(prompt), reply) for prompt, reply in replies if text.startswith(prompt + reply)}
    expected |= {
        (len(text[: len(prompt)]), reply) for prompt, reply in replies if text.startswith(text[: len(prompt)] + reply)
    }
    assert sorted(found(history, text)) == sorted(expected)
    starts = [(start, -len(reply)) for start, reply in found(history, text)]
    assert starts == sorted(starts)


def test_prompts_around_a_block_border_are_told_apart() -> None:
    history = History(10**9)
    for length in range(BLOCK_CHARACTERS - 2, 2 * BLOCK_CHARACTERS + 3):
        history.add(reply_to("x" * length, "!"))
    for length in range(BLOCK_CHARACTERS - 2, 2 * BLOCK_CHARACTERS + 3):
        assert found(history, "x" * length + "! and more") == [(length, "!")]


def test_another_scope_finds_nothing() -> None:
    history = History(10**9)
    history.add(reply_to("a question" * 100, "an answer", scope="me"))
    assert found(history, "a question" * 100 + "an answer", "me")
    assert not found(history, "a question" * 100 + "an answer", "you")
    assert not found(history, "a question" * 100 + "an answer")


def test_of_equal_replies_the_last_counts_and_others_stay() -> None:
    history = History(10**9)
    for token in range(5):
        history.add(reply_to("prompt", "same", [token]))
    history.add(reply_to("prompt", "other", [9]))
    (reply,) = history.find(block_digests("", "prompt same"), "promptsame")
    assert reply.ids.tolist() == [4]
    assert len(history) == 2


def test_the_replies_of_one_prompt_are_bounded() -> None:
    history = History(10**9)
    for number in range(3 * MAX_REPLIES_OF_A_PROMPT):
        history.add(reply_to("prompt", f"{number:06}"))
        assert len(history) == min(number + 1, MAX_REPLIES_OF_A_PROMPT)
    last = 3 * MAX_REPLIES_OF_A_PROMPT - 1
    assert found(history, f"prompt{last:06}")
    assert not found(history, "prompt000000")


def test_memory_is_bounded_and_what_was_not_used_longest_goes() -> None:
    history = History(100_000)
    kept = reply_to("kept", "because it is used", [1] * 100)
    history.add(kept)
    for number in range(1000):
        history.add(reply_to(f"prompt {number}", "text" * 20, [1] * 50))
        history.touch(kept)
        assert history.bytes <= 100_000
    assert found(history, "keptbecause it is used")
    assert found(history, "prompt 999" + "text" * 20)
    assert not found(history, "prompt 0" + "text" * 20)
    assert 50 < len(history) < 1000


def test_a_reply_larger_than_the_memory_is_not_kept_and_harms_nothing() -> None:
    history = History(2000)
    history.add(reply_to("small", "reply"))
    history.add(reply_to("large", "reply", [1] * 10_000))
    assert (len(history), history.bytes) == (0, 0)
    history.add(reply_to("small", "reply"))
    assert found(history, "smallreply")
