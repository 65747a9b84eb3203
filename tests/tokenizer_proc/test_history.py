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
    return [(reply.start, reply.text) for reply, _ in history.find(block_digests(scope, text), text, lambda _: False)]


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


def test_the_beginning_of_a_reply_counts_where_it_may_end() -> None:
    history = History(10**9)
    history.add(reply_to("prompt", "a long reply"))
    history.add(reply_to("prompt", "a longer reply"))
    text = "prompta long.and more"
    digests = block_digests("", text)
    assert history.find(digests, text, lambda place: text[place] != ".") == []
    hits = history.find(digests, text, lambda place: text[place] == ".")
    assert [(hit.reply.text, hit.kept, hit.end) for hit in hits] == [
        ("a long reply", 6, 12),
        ("a longer reply", 6, 12),
    ]
    assert history.find(block_digests("", "promptnothing"), "promptnothing", lambda _: True) == []


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
    (hit,) = history.find(block_digests("", "promptsame"), "promptsame", lambda _: False)
    assert hit.reply.ids.tolist() == [4]
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


def test_kept_prompts_count_as_memory() -> None:
    history = History(10_000)
    first, second = reply_to("first", "reply"), reply_to("second", "reply")
    history.add(first)
    history.add(second)
    used = history.bytes
    history.keep_before(second, [1] * 500)
    assert history.bytes == used + 2000
    history.keep_before(second, [1] * 100)
    assert history.bytes == used + 400
    history.keep_before(second, None)
    assert history.bytes == used
    history.touch(second)
    history.keep_before(second, [1] * 2200)
    assert not found(history, "firstreply")
    assert found(history, "secondreply")
    assert history.bytes <= 10_000


def test_a_reply_larger_than_the_memory_is_not_kept_and_harms_nothing() -> None:
    history = History(2000)
    history.add(reply_to("small", "reply"))
    history.add(reply_to("large", "reply", [1] * 10_000))
    assert (len(history), history.bytes) == (0, 0)
    history.add(reply_to("small", "reply"))
    assert found(history, "smallreply")
