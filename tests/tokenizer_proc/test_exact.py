"""Histories get the ids that were generated, and never others than the prompt says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from srt.messages import Remember, pack_ids
from tests.small_tokenizers import FAMILIES, byte_level_with_start
from tests.tiny_model import EOS_ID, make_tokenizer
from tokenizer_proc.encode import Encoder
from tokenizer_proc.exact import ExactHistory, scope_of

TINY = make_tokenizer()
ENCODER = Encoder(TINY.to_str().encode())
# Ids whose tokens are whole characters, so that any run of them is a text.
WHOLE = [i for i in range(3, 512) if "\ufffd" not in TINY.decode([i])]


def ask(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def exact_history(max_bytes: int = 10**6) -> ExactHistory:
    return ExactHistory(ENCODER, max_bytes)


def say(exact: ExactHistory, prompt: str, ids: list[int], text: str | None = None, scope: tuple[str, str] = ("", "")):
    """One turn: tokenize a prompt and remember what was said after it.  The ids of both together."""
    tenant, namespace = scope
    prompt_ids, mark = exact.encode(scope_of(*scope), prompt, ENCODER.encode_chat)
    shown = TINY.decode(ids) if text is None else text
    exact.remember(Remember(mark, shown, pack_ids(ids), namespace, tenant))
    return prompt_ids + ids


def encode(exact: ExactHistory, text: str, scope: tuple[str, str] = ("", "")) -> list[int]:
    return exact.encode(scope_of(*scope), text, ENCODER.encode_chat)[0]


def unusual(seed: int, length: int = 12) -> list[int]:
    """Ids that the tokenizer would not choose for their text."""
    chooser = random.Random(seed)
    while True:
        ids = [chooser.choice(WHOLE) for _ in range(length)]
        if TINY.encode(TINY.decode(ids)).ids != ids:
            return ids


def test_a_conversation_keeps_the_ids_of_every_reply() -> None:
    exact = exact_history()
    text, ids = ask("How are you?"), []
    for turn in range(6):
        reply = unusual(turn)
        assert encode(exact, text)[: len(ids)] == ids, f"turn {turn}"
        ids = say(exact, text, [*reply, EOS_ID], TINY.decode(reply))
        text += TINY.decode(reply) + "<|im_end|>\n" + ask(f"And then, for the {turn}. time? 🐙")
    whole = encode(exact, text)
    assert TINY.decode(whole, skip_special_tokens=False) == text
    assert whole != ENCODER.encode_chat(text)


@given(st.lists(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_ids_always_spell_the_prompt_and_begin_with_what_was_computed(
    replies: list[list[int]], data: st.DataObject
) -> None:
    exact = exact_history()
    text, ids = ask("Hello"), ENCODER.encode_chat(ask("Hello"))
    for reply in replies:
        ids = say(exact, text, reply)
        said = TINY.decode(reply)
        behind = data.draw(st.sampled_from(["<|im_end|>\n" + ask("go on"), "", " and", "nd", "\n\n", "🐙"]))
        text += said + behind
        now = encode(exact, text)
        assert TINY.decode(now, skip_special_tokens=False) == text
        if behind in ("", "<|im_end|>\n" + ask("go on")):
            assert now[: len(ids)] == ids
        ids = now


def test_text_that_goes_on_gets_the_ids_only_where_the_rest_stays_as_it_was() -> None:
    exact = exact_history()
    reply = unusual(3)
    ids = say(exact, "The tree", reply)
    text = "The tree" + TINY.decode(reply)
    assert encode(exact, text) == ids
    for more in (" and the river", " ", "\n", "s", "<|im_end|>", " 5", "🐙"):
        now = encode(exact, text + more)
        plain = ENCODER.encode_chat(text + more)
        rest = ENCODER.encode_chat(more)
        assert now == (ids + rest if more == "<|im_end|>" or plain[-len(rest) :] == rest else plain)
    assert encode(exact, text + " and the river")[: len(ids)] == ids


def test_a_reply_that_comes_back_cut_off_or_stripped_keeps_its_ids_as_far_as_it_goes() -> None:
    exact = exact_history()
    reply = [*unusual(21), *TINY.encode(" tree.\n\n").ids]
    ids = say(exact, ask("Cut"), [*reply, EOS_ID], TINY.decode(reply))
    prompt = len(ids) - len(reply) - 1
    for kept in range(1, len(reply)):
        text = ask("Cut") + TINY.decode(reply[:kept]) + "<|im_end|>\n"
        assert encode(exact, text)[: prompt + kept] == ids[: prompt + kept]
    stripped = ask("Cut") + TINY.decode(reply).rstrip() + "<|im_end|>\n"
    now = encode(exact, stripped)
    assert now[: prompt + 12] == ids[: prompt + 12]
    assert TINY.decode(now, skip_special_tokens=False) == stripped
    # In the middle of a token: whole tokens, and the rest as it is tokenized in the whole.
    word = TINY.encode(" question").ids
    ids = say(exact, ask("Middle"), [*unusual(22), *word])
    middle = ask("Middle") + TINY.decode(unusual(22)) + " ques<|im_end|>"
    now = encode(exact, middle)
    assert TINY.decode(now, skip_special_tokens=False) == middle


@given(st.lists(st.integers(3, 511), min_size=1, max_size=40), st.data())
def test_any_reply_cut_off_where_it_was_shown_keeps_all_its_ids(reply: list[int], data: st.DataObject) -> None:
    exact = exact_history()
    text = TINY.decode(reply)
    ids = say(exact, ask("Cut"), reply, text)
    prompt = len(ids) - len(reply)
    kept = data.draw(st.integers(1, len(reply)))
    shown = TINY.decode(reply[:kept])
    if not text.startswith(shown):
        # The cut is inside a character, where nobody is shown anything.
        return
    now = encode(exact, ask("Cut") + shown + "<|im_end|>\n")
    assert TINY.decode(now, skip_special_tokens=False) == ask("Cut") + shown + "<|im_end|>\n"
    if not shown.endswith("\ufffd"):
        assert now[: prompt + kept] == ids[: prompt + kept]


def test_other_tenants_and_namespaces_get_the_plain_ids() -> None:
    exact = exact_history()
    reply = unusual(4)
    ids = say(exact, ask("Hi"), reply, scope=("me", "me\x1fsalt:a"))
    text = ask("Hi") + TINY.decode(reply)
    assert encode(exact, text, ("me", "me\x1fsalt:a")) == ids
    for scope in (("", ""), ("me", "me"), ("you", "me\x1fsalt:a"), ("", "me\x1fsalt:a"), ("me", "me\x1fsalt:b")):
        assert encode(exact, text, scope) == ENCODER.encode_chat(text)


def test_an_edited_history_is_tokenized_plainly_from_the_edit_on() -> None:
    exact = exact_history()
    first, second = unusual(5), unusual(6)
    say(exact, ask("One"), first)
    text = ask("One") + TINY.decode(first) + "<|im_end|>\n" + ask("Two")
    ids = say(exact, text, second)
    text += TINY.decode(second) + "<|im_end|>\n" + ask("Three")
    assert encode(exact, text)[: len(ids)] == ids
    edited = text.replace("One", "Won")
    assert encode(exact, edited) == ENCODER.encode_chat(edited)
    edited = text.replace("Two", "Too")
    kept = len(ENCODER.encode_chat(ask("One"))) + len(first)
    assert encode(exact, edited)[:kept] == ids[:kept]
    assert TINY.decode(encode(exact, edited), skip_special_tokens=False) == edited


def test_a_reply_whose_prompt_had_other_ids_is_not_put_in() -> None:
    exact, other = exact_history(), exact_history()
    first, second = unusual(7), unusual(8)
    say(other, ask("One"), first)
    text = ask("One") + TINY.decode(first) + "<|im_end|>\n" + ask("Two")
    # `exact` knows the second reply, which followed ids that it cannot make.
    _, mark = other.encode(scope_of("", ""), text, ENCODER.encode_chat)
    exact.remember(Remember(mark, TINY.decode(second), pack_ids(second)))
    assert exact.num_replies == 1
    history = text + TINY.decode(second)
    assert encode(exact, history) == ENCODER.encode_chat(history)


def test_what_a_stop_string_or_a_special_token_cut_off_is_not_remembered() -> None:
    exact = exact_history()
    words = [TINY.encode(f" {word}").ids for word in ("the", "tree", "grows", "slowly")]
    ids = [token for word in words for token in word]
    whole = [*words[0], *words[1]]
    # The stop string " gro" began inside what is " grows" here.
    prompt_ids = encode(exact, ask("Stop"))
    say(exact, ask("Stop"), ids, " the tree gro")
    text = ask("Stop") + " the tree gro" + "<|im_end|>"
    now = encode(exact, text)
    assert now[: len(prompt_ids) + len(whole)] == prompt_ids + whole
    assert TINY.decode(now, skip_special_tokens=False) == text
    # A start token in the middle was not shown, and the history does not have it.
    say(exact, ask("Special"), [*whole, 1, *words[2]], " the tree grows")
    text = ask("Special") + " the tree grows<|im_end|>"
    now = encode(exact, text)
    assert 1 not in now[len(encode(exact, ask("Special"))) :]
    assert TINY.decode(now, skip_special_tokens=False) == text


def test_a_broken_character_is_what_it_was_shown_as_and_is_completed_by_nothing() -> None:
    exact = exact_history()
    octopus = TINY.encode("🐙").ids
    assert len(octopus) > 1
    half = [*TINY.encode(" the").ids, *octopus[:1]]
    ids = say(exact, ask("Half"), half, " the\ufffd")
    text = ask("Half") + " the\ufffd"
    assert encode(exact, text + "<|im_end|>") == [*ids, EOS_ID]
    for more in ("\ufffd", "🐙", " tree"):
        now = encode(exact, text + more)
        assert TINY.decode(now, skip_special_tokens=False) == text + more


def test_of_several_replies_with_the_same_beginning_the_one_that_came_back_is_used() -> None:
    exact = exact_history()
    short, long = unusual(9, 4), unusual(9, 4) + unusual(10, 4)
    say(exact, ask("Hi"), long)
    ids_short = say(exact, ask("Hi"), short)
    ids_long = say(exact, ask("Hi"), long)
    for ids, said in ((ids_short, short), (ids_long, long)):
        text = ask("Hi") + TINY.decode(said) + "<|im_end|>"
        assert encode(exact, text) == [*ids, EOS_ID]


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_in_every_family_the_ids_are_the_plain_ones_or_spell_the_prompt(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    encoder = Encoder(tokenizer.to_str().encode())
    exact = ExactHistory(encoder, 10**6)
    chooser = random.Random(1)
    size = tokenizer.get_vocab_size()
    for _ in range(40):
        prompt = chooser.choice(["The tree", "Seven apples", "a"])
        _, mark = exact.encode("", prompt, encoder.encode_text)
        reply = [chooser.randrange(size) for _ in range(chooser.randint(1, 6))]
        said = tokenizer.decode(reply)
        exact.remember(Remember(mark, said, pack_ids(reply)))
        for more in ("", " and more", "<|im_end|>", "x"):
            text = prompt + said + more
            if not text:
                continue
            now, _ = exact.encode("", text, encoder.encode_text)
            plain = encoder.encode_text(text)
            head = len(encoder.special_head)
            assert now == plain or text in (encoder.decode(now), encoder.decode(now[head:]))


def test_with_a_start_token_a_text_prompt_keeps_it_once() -> None:
    encoder = Encoder(byte_level_with_start().to_str().encode())
    exact = ExactHistory(encoder, 10**6)
    ids, mark = exact.encode("", "The tree", encoder.encode_text)
    reply = unusual(11)
    exact.remember(Remember(mark, TINY.decode(reply), pack_ids(reply)))
    now, _ = exact.encode("", "The tree" + TINY.decode(reply), encoder.encode_text)
    assert now == ids + reply
    assert now[0] == 0
    assert now.count(0) == 1


def test_a_long_conversation_is_not_tokenized_again_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(TINY.to_str().encode())
    exact = ExactHistory(encoder, 10**6)
    sizes: list[int] = []
    plain = encoder.encode_chat

    def counted(text: str) -> list[int]:
        sizes.append(len(text))
        return plain(text)

    monkeypatch.setattr(encoder, "encode_chat", counted)
    text = ask("First")
    for turn in range(30):
        sizes.clear()
        ids, mark = exact.encode("", text, encoder.encode_chat)
        assert TINY.decode(ids, skip_special_tokens=False) == text
        assert turn < 3 or sum(sizes) < 400, f"turn {turn}: {sizes}"
        reply = unusual(turn, 30)
        exact.remember(Remember(mark, TINY.decode(reply), pack_ids(reply)))
        text += TINY.decode(reply) + "<|im_end|>\n" + ask(f"Go on with number {turn}")
    assert len(text) > 3000
    # A branch off the middle still finds its ids.
    middle = text[: text.index("number 15")] + "number what?"
    assert TINY.decode(exact.encode("", middle, encoder.encode_chat)[0], skip_special_tokens=False) == middle


def test_memory_that_is_full_falls_back_to_plain_ids() -> None:
    exact = exact_history(max_bytes=3000)
    reply = unusual(12)
    say(exact, ask("First"), reply)
    for number in range(50):
        say(exact, ask(f"Number {number}"), unusual(number))
    text = ask("First") + TINY.decode(reply) + "<|im_end|>"
    assert encode(exact, text) == ENCODER.encode_chat(text)
    assert exact.num_replies < 50


def test_the_encoder_tells_tokens_from_characters(tmp_path: Path) -> None:
    text = "The 🐙 tree<|im_end|>\nörtlich  ok"
    ids = ENCODER.encode_chat(text)
    pieces = [TINY.decode(ids[:count], skip_special_tokens=False) for count in range(len(ids) + 1)]
    places = range(len(text) + 1)
    found = ENCODER.tokens_at(text, ids, places)
    assert found is not None
    assert found[-1] == len(ids)
    for place, token in zip(places, found, strict=True):
        before = pieces[token].rstrip("\ufffd")
        assert len(before) <= place
    assert ENCODER.tokens_at(text, ids[:-1], [0]) is None


def test_the_encoder_tells_tokens_from_characters_around_broken_ones() -> None:
    octopus = TINY.encode("🐙").ids
    ids = [*TINY.encode(" the").ids, *octopus[:2], *TINY.encode(" tree<|im_end|>").ids, octopus[0]]
    text = TINY.decode(ids, skip_special_tokens=False)
    assert text.count("\ufffd") == 2
    # The token that ends a broken character is the one that shows it to be broken.
    places = [0, text.index(" tree"), text.index("<|im_end|>"), len(text) - 1, len(text)]
    assert ENCODER.tokens_at(text, ids, places) == [0, 3, 4, 5, 6]
