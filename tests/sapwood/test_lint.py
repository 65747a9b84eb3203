"""`sapwood lint`: what breaks prefixes in a file of requests, and what moving it would give."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood.bodies import bodies_in
from sapwood.breaks import find_break
from sapwood.cli import main
from sapwood.lint import Lint, examine, rate, report
from sapwood.offline import OfflineTokenizer
from sapwood.prefixes import infinite_cache
from tests.system.served import serving

RULES = "You answer questions about trees, rivers and numbers, in short and friendly sentences. " * 4


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Iterator[OfflineTokenizer]:
    with OfflineTokenizer(tiny_model) as offline:
        yield offline


def chat(system: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, **fields}


def look(tokenizer: OfflineTokenizer, requests: list[dict[str, Any]]) -> Lint:
    bodies = [body for number, fields in enumerate(requests, 1) for body in bodies_in(fields, "test", str(number))]
    return examine(bodies, tokenizer)


def kinds(found: Lint) -> set[tuple[str, str]]:
    return {(one.what.kind, one.what.where) for one in found.found}


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12))
def test_the_infinite_cache_finds_the_longest_of_all_earlier_prompts(prompts: list[list[int]]) -> None:
    def common(one: list[int], other: list[int]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )

    for index, reuse in enumerate(infinite_cache(prompts)):
        shared = max((common(prompts[index], earlier) for earlier in prompts[:index]), default=0)
        assert reuse.shared == shared
        assert reuse.reused == min(shared, len(prompts[index]) - 1)
        assert (reuse.earlier is None) == (shared == 0)
        if reuse.earlier is not None:
            assert reuse.earlier < index
            assert common(prompts[index], prompts[reuse.earlier]) == shared


TIMES = ("2025-03-01 10:00:07", "2025-03-01T10:01:22Z", "2025-03-02 11:15:00", "2025-03-02 23:59:59")
IDS = (
    "3f2504e0-4f89-41d3-9a0c-0305e82c3301",
    "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
    "f47ac10b-58cc-4372-a567-0e02b2c3d479",
    "9b2d5a1e-0c3f-4a77-8d44-5f1e2d3c4b5a",
)


@pytest.mark.parametrize(("kind", "values"), [("date or time", TIMES), ("id", IDS)])
def test_what_varies_at_the_head_is_named_and_pays_when_it_is_moved(
    tokenizer: OfflineTokenizer, kind: str, values: tuple[str, ...]
) -> None:
    requests = [chat(f"Now: {value}.\n{RULES}", f"Question {n}?") for n, value in enumerate(values)]
    found = look(tokenizer, requests)
    assert (kind, "messages[0] (system)") in kinds(found)
    (first,) = [one for one in found.found if one.request == "2"]
    assert (first.earlier, first.what.earlier_text, first.what.text) == ("1", values[0], values[1])
    assert rate(found.reuses) < 0.2
    assert rate(found.best) > 0.5
    text = "\n".join(report(found))
    assert f"{kind} in messages[0] (system): 3 requests" in text
    assert values[0] in text
    assert values[1] in text
    assert f"achievable hit rate: {rate(found.reuses):.1%}" in text
    assert f"moved to the end (or made uniform): {rate(found.best):.1%}" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Monday, 3 March 2025", "Tuesday, 4 March 2025"),
        ("March 3, 2025", "March 14, 2025"),
        ("03/03/2025", "04/03/2025"),
        ("10:15 AM", "11:20 PM"),
        ("2025-03-03T10:15:00.123+01:00", "2025-03-03T10:15:09.456+01:00"),
    ],
)
def test_dates_and_times_are_known_in_many_forms(old: str, new: str) -> None:
    found = find_break(chat(f"Today is {old}. Be brief.", "x"), chat(f"Today is {new}. Be brief.", "x"))
    assert found is not None
    assert (found.kind, found.message) == ("date or time", 0)
    assert found.earlier_text in old
    assert found.text in new


def test_two_kinds_one_behind_the_other_are_both_found_and_moved(tokenizer: OfflineTokenizer) -> None:
    requests = [chat(f"Trace {IDS[n]}.\n{RULES}\nIt is {TIMES[n]}. {RULES}", f"Question {n}?") for n in range(4)]
    found = look(tokenizer, requests)
    assert found.moved == ["date or time in messages[0] (system)", "id in messages[0] (system)"]
    assert rate(found.best) > 0.6 > rate(found.reuses)


def test_a_difference_that_hides_right_behind_another_does_not_end_the_search(tokenizer: OfflineTokenizer) -> None:
    requests = [chat(f"Current date: {TIMES[n]}\nrequest {IDS[n]}\n{RULES}", f"Question {n}?") for n in range(4)]
    found = look(tokenizer, requests)
    assert found.moved == ["date or time in messages[0] (system)", "id in messages[0] (system)"]
    assert rate(found.best) > 0.4 > rate(found.reuses)
    assert {(one.what.kind, one.what.where) for one in found.hidden} == {("id", "messages[0] (system)")}
    assert IDS[1] in "\n".join(report(found))


def test_white_space_and_the_order_of_tools_are_told(tokenizer: OfflineTokenizer) -> None:
    found = look(tokenizer, [chat(RULES, "a?"), chat(RULES.replace("rivers and", "rivers  and"), "b?")])
    assert kinds(found) == {("whitespace", "messages[0] (system)")}
    assert rate(found.best) > rate(found.reuses)
    tools = [{"type": "function", "function": {"name": name, "description": RULES}} for name in ("add", "sub")]
    with_tools = "{{ tools | tojson }}" + "{% for m in messages %}{{ m.content }}{% endfor %}"
    swapped = tools[::-1]
    with OfflineTokenizer(Path(tokenizer._folder), with_tools) as other:
        found = look(other, [chat(RULES, "a?", tools=tools), chat(RULES, "b?", tools=swapped)])
        assert kinds(found) == {("tool order", "tools")}
        assert "'sub, add' where it was 'add, sub'" in "\n".join(report(found))
        assert rate(found.best) > 0.4 > rate(found.reuses)
        found = look(other, [chat(RULES, "a?", tools=tools), chat(RULES, "b?", tools=tools[1:])])
        assert kinds(found) == {("tools", "tools")}


def test_conversations_that_only_grow_break_nothing(tokenizer: OfflineTokenizer) -> None:
    talk = [{"role": "system", "content": RULES}, {"role": "user", "content": "Hello"}]
    requests = []
    for turn in range(4):
        requests.append({"messages": list(talk)})
        talk += [{"role": "assistant", "content": f"Reply {turn}"}, {"role": "user", "content": f"Next {turn}"}]
    found = look(tokenizer, requests)
    assert found.found == []
    assert "nothing breaks prefixes" in list(report(found))
    assert rate(found.best) == rate(found.reuses) > 0.7


def test_a_question_that_differs_is_told_but_not_moved(tokenizer: OfflineTokenizer) -> None:
    found = look(tokenizer, [chat(RULES, "Which tree?"), chat(RULES, "What river?"), chat("Other rules.", "Why?")])
    assert ("other text", "messages[1] (user)") in kinds(found)
    assert ("other text", "messages[0] (system)") in kinds(found)
    assert found.moved == []


def test_changed_roles_and_switches_of_the_template_are_told() -> None:
    one = chat(RULES, "x")
    found = find_break(one, {"messages": [{**one["messages"][0], "role": "user"}, one["messages"][1]]})
    assert found is not None
    assert (found.kind, found.earlier_text, found.text) == ("role", "system", "user")
    found = find_break(one, {**one, "chat_template_kwargs": {"thinking": True}})
    assert found is not None
    assert (found.kind, found.where) == ("template variables", "chat_template_kwargs")
    assert find_break(one, {**one, "temperature": 0.5}) is None


def test_text_prompts_are_looked_at_too(tokenizer: OfflineTokenizer) -> None:
    found = look(tokenizer, [{"prompt": f"[{time}] {RULES} Question {n}"} for n, time in enumerate(TIMES)])
    assert kinds(found) == {("date or time", "prompt")}
    assert rate(found.best) > 0.6 > rate(found.reuses)
    ids = [{"prompt": [[1, 2, 3, number], [1, 2, 4]]} for number in range(3)]
    assert [body.name for body in look(tokenizer, ids).bodies][:3] == ["1[0]", "1[1]", "2[0]"]


def test_random_requests_never_get_worse_by_moving(tokenizer: OfflineTokenizer) -> None:
    chooser = random.Random(3)
    for _ in range(5):
        parts = ["", RULES, *TIMES, *IDS, "  ", "\n", "Be brief."]
        requests = [
            chat(" ".join(chooser.choices(parts, k=3)), " ".join(chooser.choices(parts, k=2)) + "?") for _ in range(12)
        ]
        found = look(tokenizer, requests)
        assert rate(found.best) >= rate(found.reuses)
        assert len(list(report(found))) >= 3


def test_what_a_server_recorded_is_what_lint_reads(
    tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    flags = ("--dtype", "float32", "--record", str(path), "--api-key", "hidden")
    reused = total = 0
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *flags) as server:
        for number, time in enumerate(TIMES):
            body = {**chat(f"It is {time}. {RULES}", f"Question {number}?"), "max_tokens": 1}
            headers = {"Authorization": "Bearer hidden"}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
            reused += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            total += reply["usage"]["prompt_tokens"]
    assert main(["lint", str(path), "--model", str(tiny_model)]) == 0
    text = capsys.readouterr().out
    # The server's cache had room for everything, so it did what was achievable.
    assert f"4 prompts, {total} tokens" in text
    assert f"achievable hit rate: {reused / total:.1%} ({reused} tokens" in text
    assert "date or time in messages[0] (system): 3 requests" in text
    assert "hidden" not in path.read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nonsense", "line 2: is not JSON"),
        ("5", "line 2: is no request body"),
        (json.dumps({"messages": [{"role": 5}]}), "request 2: messages[0].role"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + line + "\n")
    assert main(["lint", str(path), "--model", str(tiny_model)]) == 1
    assert words in capsys.readouterr().err
    path.write_text("")
    assert main(["lint", str(path), "--model", str(tiny_model)]) == 1
    assert "has no requests" in capsys.readouterr().err
