"""The forward worker: steps in order, promised tokens, failures that stay where they happen, prompt logprobs."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import torch

from srt.child import Phases, StartError
from srt.config import SchedulerConfig
from srt.messages import SamplingParams
from srt.model import step as step_module
from srt.model.config import read_model_facts
from srt.model.interface import ForwardBatch
from srt.model.llama import TorchModel
from srt.model.sampler import NOT_FINITE
from srt.model.worker import ForwardWorker, build_executor
from srt.plan import Int32Array, StepResult
from tests.model.families import reference_logits
from tests.model.paged_driver import load_torch_model
from tests.model.plan_driver import PlanDriver, Request, commit

PAGE_SIZE = 8
VOCAB = 512


def make_worker(tiny_model: Path, overlap: bool = False) -> ForwardWorker:
    return ForwardWorker(load_torch_model(tiny_model, 256, PAGE_SIZE), overlap)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB), k=rng.randint(1, 40)) for _ in range(count)]


def make_requests(seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_p=0.9),
        SamplingParams(temperature=1.2, top_k=30, repetition_penalty=1.2, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, presence_penalty=1.5, min_new_tokens=4),
    ]
    return [
        Request(slot, prompt, kinds[slot % 4], seed=rng.randint(0, 2**63), stop_ids=(2,))
        for slot, prompt in enumerate(prompts(8, seed))
    ]


def generate(worker: ForwardWorker, requests: list[Request], new_tokens: int, ahead: bool) -> list[list[int]]:
    """Prefill all, then decode together; `ahead`: each step is launched before the one before it is waited for."""
    driver = PlanDriver(PAGE_SIZE)
    pending = []
    for step in range(new_tokens):
        work = [(request, request.total - request.computed) for request in requests]
        pending.append(worker.launch(driver.plan(work)))
        if ahead and step == 0:
            continue
        _commit_all(requests, pending.pop(0).wait())
    for handle in pending:
        _commit_all(requests, handle.wait())
    return [request.ids[len(request.prompt) :] for request in requests]


def _commit_all(requests: list[Request], result: StepResult) -> None:
    for request, token in zip(requests, result.token_ids.tolist(), strict=True):
        promised = request.promised
        commit(request, token)
        # In a run that is one step ahead another token is on its way already.
        request.promised = promised and request.computed >= len(request.ids)


def test_overlap_on_and_off_and_one_by_one_give_the_same_ids(tiny_model: Path) -> None:
    expected = generate(make_worker(tiny_model), make_requests(), 20, ahead=False)
    assert all(len(ids) == 20 for ids in expected)
    for overlap in (False, True):
        worker = make_worker(tiny_model, overlap)
        assert generate(worker, make_requests(), 20, ahead=True) == expected
        worker.close()
    for request, want in zip(make_requests(), expected, strict=True):
        assert generate(make_worker(tiny_model), [request], 20, ahead=False) == [want]


def test_a_request_resumed_in_another_slot_goes_on_as_before(tiny_model: Path) -> None:
    expected = generate(make_worker(tiny_model), make_requests(), 20, ahead=False)
    first = generate(make_worker(tiny_model), make_requests(), 7, ahead=False)
    resumed = make_requests()
    for request, outputs in zip(resumed, first, strict=True):
        request.slot += 90
        request.ids += outputs
    assert [a + b for a, b in zip(first, _only_new(tiny_model, resumed, 13), strict=True)] == expected


def _only_new(tiny_model: Path, requests: list[Request], count: int) -> list[list[int]]:
    before = [len(request.ids) for request in requests]
    generate(make_worker(tiny_model), requests, count, ahead=False)
    return [request.ids[length:] for request, length in zip(requests, before, strict=True)]


def test_greedy_ids_are_those_of_the_reference(tiny_model: Path) -> None:
    request = Request(0, prompts(1, seed=3)[0])
    generate(make_worker(tiny_model), [request], 12, ahead=False)
    logits = reference_logits(tiny_model, request.ids[:-1])
    assert request.ids[len(request.prompt) :] == logits[len(request.prompt) - 1 :].argmax(dim=-1).tolist()


def test_rows_that_do_not_sample_bring_no_token_and_no_logits(tiny_model: Path) -> None:
    model = CountingModel(load_torch_model(tiny_model, 64, PAGE_SIZE))
    worker = ForwardWorker(model, overlap=False)
    driver = PlanDriver(PAGE_SIZE)
    long, short = Request(0, list(range(30))), Request(1, [5, 6])
    result = worker.launch(driver.plan([(long, 20), (short, 2)])).wait()
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0
    assert model.asked == [1]
    worker.launch(driver.plan([(long, 5)])).wait()
    assert model.asked == [1, 0]


class CountingModel:
    """A model that remembers how many rows of logits it was asked for, and can be told to fail or to block."""

    def __init__(self, model: TorchModel) -> None:
        self.config = model.config
        self.kv = model.kv
        self.model = model
        self.asked: list[int] = []
        self.projected: list[int] = []
        self.failing = False
        self.poisoned_row: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, batch: ForwardBatch, logit_tokens: Int32Array, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self.gate.wait(timeout=60)
        if self.failing:
            raise RuntimeError("the step broke")
        self.asked.append(len(logit_tokens))
        logits = self.model.forward(batch, logit_tokens, out)
        if self.poisoned_row is not None:
            logits[self.poisoned_row] = float("nan")
        return logits

    def forward_hidden(self, batch: ForwardBatch, tokens: Int32Array) -> torch.Tensor:
        hidden = self.model.forward_hidden(batch, tokens)
        if self.poisoned_row is not None:
            hidden[self.poisoned_row] = float("nan")
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        self.projected.append(len(hidden))
        return self.model.project(hidden)


def test_launch_returns_while_the_step_runs_and_close_finishes_what_is_queued(tiny_model: Path) -> None:
    model = CountingModel(load_torch_model(tiny_model, 64, PAGE_SIZE))
    model.gate.clear()
    worker = ForwardWorker(model, overlap=True)
    driver = PlanDriver(PAGE_SIZE)
    request = Request(0, [4, 5, 6])
    handles = [worker.launch(driver.plan([(request, 3)])), worker.launch(driver.plan([(request, 1)]))]
    assert model.asked == []
    model.gate.set()
    worker.close()
    assert [len(handle.wait().token_ids) for handle in handles] == [1, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_raises_at_wait_and_later_steps_still_run(tiny_model: Path, overlap: bool) -> None:
    model = CountingModel(load_torch_model(tiny_model, 64, PAGE_SIZE))
    worker = ForwardWorker(model, overlap)
    driver = PlanDriver(PAGE_SIZE)
    lost, kept = Request(0, [4, 5, 6]), Request(1, [7, 8])
    model.failing = True
    handle = worker.launch(driver.plan([(lost, 3)]))
    with pytest.raises(RuntimeError, match="the step broke"):
        handle.wait()
    model.failing = False
    result = worker.launch(driver.plan([(kept, 2)], closed=(0,))).wait()
    assert result.token_ids.tolist() == [int(reference_logits(tiny_model, [7, 8])[-1].argmax())]
    worker.close()


def test_a_row_that_fails_leaves_its_neighbours_and_a_wasted_next_row_alone(tiny_model: Path) -> None:
    model = CountingModel(load_torch_model(tiny_model, 64, PAGE_SIZE))
    worker = ForwardWorker(model, overlap=True)
    driver = PlanDriver(PAGE_SIZE)
    broken, good = Request(0, [4, 5, 6]), Request(1, [7, 8])
    model.poisoned_row = 0
    first = worker.launch(driver.plan([(broken, 3), (good, 2)])).wait()
    model.poisoned_row = None
    second = worker.launch(driver.plan([(broken, 1), (good, 1)])).wait()
    assert sorted(first.errors) == [0]
    assert first.token_ids[0] == -1
    commit(good, int(first.token_ids[1]))
    assert second.token_ids[1] == int(reference_logits(tiny_model, good.ids)[-1].argmax())
    worker.close()


def test_a_token_beyond_the_vocabulary_fails_the_step_with_its_number(tiny_model: Path) -> None:
    handle = make_worker(tiny_model).launch(PlanDriver(PAGE_SIZE).plan([(Request(0, [1, VOCAB]), 2)]))
    with pytest.raises(ValueError, match=f"token id {VOCAB}"):
        handle.wait()


def test_a_plan_of_page_moves_alone_is_carried_out(tiny_model: Path) -> None:
    model = load_torch_model(tiny_model, 64, PAGE_SIZE)
    worker = ForwardWorker(model, overlap=False)
    driver = PlanDriver(PAGE_SIZE)
    worker.launch(driver.plan([(Request(0, list(range(8))), 8)])).wait()
    result = worker.launch(driver.plan([], copies=[(0, 40, 5)], closed=(0,))).wait()
    assert len(result.token_ids) == 0
    assert torch.equal(model.kv.k[:, 40, :5], model.kv.k[:, 0, :5])


def test_copies_are_done_before_the_step_reads(tiny_model: Path) -> None:
    worker = make_worker(tiny_model)
    driver = PlanDriver(PAGE_SIZE)
    source = Request(0, list(range(20, 32)))
    worker.launch(driver.plan([(source, 12)])).wait()
    reuser = Request(1, [*range(20, 30), 99], computed=10, pages=[source.pages[0], 100])
    result = worker.launch(driver.plan([(reuser, 1)], copies=[(source.pages[1], 100, 2)])).wait()
    assert result.token_ids.tolist() == [int(reference_logits(tiny_model, reuser.prompt)[-1].argmax())]


# Prompt logprobs


def prompt_logprobs(worker: ForwardWorker, request: Request, chunks: list[int]) -> tuple[list[float], list[list[int]]]:
    """Logprobs and likeliest ids of prompt tokens, gathered over the chunks."""
    driver = PlanDriver(PAGE_SIZE)
    numbers: list[float] = []
    tops: list[list[int]] = []
    neighbour = Request(9, [3, 4, 5] * 5)
    for count in chunks:
        result = worker.launch(driver.plan([(neighbour, 1), (request, count)])).wait()
        if 1 in result.prompt_logprobs:
            numbers += result.prompt_logprobs[1].logprobs.tolist()
            tops += result.prompt_logprobs[1].top_ids.tolist()
    return numbers, tops


@pytest.mark.parametrize("chunks", [[40], [13, 27], [1, 38, 1], [20, 1, 1, 1, 17]])
@pytest.mark.parametrize("start", [0, 1, 17, 39])
def test_prompt_logprobs_are_those_of_the_reference_however_the_prompt_is_cut(
    tiny_model: Path, chunks: list[int], start: int
) -> None:
    prompt = random.Random(8).choices(range(VOCAB), k=40)
    found, tops = prompt_logprobs(
        make_worker(tiny_model), Request(0, prompt, logprobs=3, prompt_logprobs_from=start), chunks
    )
    expected = reference_logits(tiny_model, prompt).log_softmax(dim=-1)
    first = max(start, 1)
    want = [expected[position - 1, prompt[position]].item() for position in range(first, 40)]
    assert found == pytest.approx(want, abs=1e-4)
    assert tops == expected[first - 1 : 39].topk(3).indices.tolist()


def test_prompt_logprobs_of_a_resumed_request_end_with_its_prompt(tiny_model: Path) -> None:
    prompt = random.Random(8).choices(range(VOCAB), k=10)
    request = Request(0, prompt, ids=[*prompt, 5, 6, 7], logprobs=0, prompt_logprobs_from=0)
    found, _ = prompt_logprobs(make_worker(tiny_model), request, [13])
    assert len(found) == 9


def test_logits_for_prompt_logprobs_are_made_in_slices(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random.Random(8).choices(range(VOCAB), k=40)
    whole = prompt_logprobs(make_worker(tiny_model), Request(0, prompt, logprobs=2, prompt_logprobs_from=0), [40])
    monkeypatch.setattr(step_module, "LOGIT_SLICE_BYTES", 7 * 4 * VOCAB)
    model = CountingModel(load_torch_model(tiny_model, 64, PAGE_SIZE))
    request = Request(0, prompt, logprobs=2, prompt_logprobs_from=0)
    sliced = prompt_logprobs(ForwardWorker(model, overlap=False), request, [40])
    assert max(model.projected) == 7
    assert sliced[1] == whole[1]
    assert sliced[0] == pytest.approx(whole[0], abs=1e-5)


def test_prompt_logprobs_that_are_not_finite_fail_their_own_row(tiny_model: Path) -> None:
    model = CountingModel(load_torch_model(tiny_model, 64, PAGE_SIZE))
    model.poisoned_row = 3
    worker = ForwardWorker(model, overlap=False)
    requests = [Request(slot, [5, 6, 7, 8], logprobs=0, prompt_logprobs_from=0) for slot in range(2)]
    result = worker.launch(PlanDriver(PAGE_SIZE).plan([(request, 3) for request in requests])).wait()
    assert result.errors == {1: NOT_FINITE}
    assert sorted(result.prompt_logprobs) == [0]


# Building


def scheduler_config(tiny_model: Path, **changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "run_dir": "",
        "model": read_model_facts(tiny_model, "tiny"),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "attention_backend": "torch",
        "page_size": PAGE_SIZE,
        "num_pages": 64,
        "disable_radix_cache": False,
        "schedule_policy": "lpm",
        "max_step_tokens": 512,
        "max_running_requests": 8,
        "max_queued_requests": None,
        "overlap": True,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_the_executor_that_a_configuration_asks_for_computes_the_reference(tiny_model: Path, backend: str) -> None:
    phases = Phases()
    worker = build_executor(scheduler_config(tiny_model, attention_backend=backend), phases)
    plan = PlanDriver(PAGE_SIZE).plan([(Request(0, [4, 5, 6]), 3)])
    assert worker.launch(plan).wait().token_ids.tolist() == [int(reference_logits(tiny_model, [4, 5, 6])[-1].argmax())]
    worker.close()
    assert "weights" in [name for name, _ in phases.taken]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "cuda"}, "--device cuda"),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"kv_dtype": "int4"}, "--kv-cache-dtype int4: choose one of auto, bfloat16, int8"),
        ({"quantization": "int2"}, "--quantization int2: choose int8 or int4"),
        ({"quantization": "int4"}, "--quantization int4: only the native kernels"),
        ({"quantization": "int8"}, "--quantization int8: only the native kernels"),
        ({"pin_threads": True}, "--pin-threads: only the native kernels"),
        (
            {"pin_threads": True, "threads": 1000, "attention_backend": "native"},
            "--pin-threads: 1000 threads cannot have a core each",
        ),
    ],
)
def test_what_cannot_be_built_is_a_start_error_that_names_the_flag(
    tiny_model: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(StartError, match=named):
        build_executor(scheduler_config(tiny_model, **changes), Phases())


def test_pinned_threads_have_a_core_each_and_the_same_tokens(tiny_model: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    before = set(os.listdir("/proc/self/task"))
    config = scheduler_config(tiny_model, attention_backend="native", pin_threads=True, threads=len(cores))
    worker = build_executor(config, Phases())
    plan = PlanDriver(PAGE_SIZE).plan([(Request(0, [4, 5, 6]), 3)])
    assert worker.launch(plan).wait().token_ids.tolist() == [int(reference_logits(tiny_model, [4, 5, 6])[-1].argmax())]
    started = set(os.listdir("/proc/self/task")) - before
    held = [os.sched_getaffinity(int(thread)) for thread in started]
    assert sorted(core for mask in held if len(mask) == 1 for core in mask) == cores
    worker.close()
    assert sorted(os.sched_getaffinity(0))[:2] == cores, "the caller runs where it did"


def test_a_folder_without_weights_is_a_start_error_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    config = scheduler_config(tiny_model, model=read_model_facts(tmp_path, "tiny"))
    with pytest.raises(StartError, match="neither model") as caught:
        build_executor(config, Phases())
    assert "\n" not in str(caught.value)
