"""The native kernels give a token the same logits, bit for bit, whatever surrounds its computation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from srt.model.native import Kernels, NativeModel
from tests.model.families import SIZES, save_family
from tests.model.native_kernels import FORMATS, all_kernels, load_native_model
from tests.model.paged_driver import PagedDriver, Sequence

# Longer than a segment of attention (512 tokens), with many of its tiles.
TRUNK = 600
CASES = ["llama", "mistral-window", "gemma2", "gemma3"]


def ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(269), k=length)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {case: save_family(case, root / case) for case in CASES}


def alone_and_whole(model: NativeModel, tokens: list[int]) -> torch.Tensor:
    """All logits of a sequence computed in one step by itself."""
    return PagedDriver.with_pages(model, "ascending").step([(Sequence(tokens), len(tokens))])[0]


@dataclass
class Mixture:
    """Sequences that grow in random steps, some of them out of one another's prefixes; each logit is checked."""

    driver: PagedDriver
    expected: dict[tuple[int, ...], torch.Tensor]
    chooser: random.Random

    def advance(self, sequences: list[Sequence]) -> None:
        """One step over a random choice of the unfinished sequences."""
        unfinished = [s for s in sequences if s.computed < len(s.ids)]
        chosen = self.chooser.sample(unfinished, self.chooser.randint(1, len(unfinished)))
        work = []
        for sequence in chosen:
            count = self.chooser.choice([1, 1, 1, 2, 5, 9, 33, 170])
            work.append((sequence, min(count, len(sequence.ids) - sequence.computed)))
        starts = [sequence.computed for sequence, _ in work]
        for (sequence, count), start, found in zip(work, starts, self.driver.step(work), strict=True):
            want = self.expected[tuple(sequence.ids)][start : start + count]
            assert torch.equal(found, want), f"token {start} of a sequence of {len(sequence.ids)} differs"


def forked(driver: PagedDriver, chooser: random.Random) -> list[Sequence]:
    """A computed trunk, a branch of it, and sequences that share either up to places of every kind."""
    trunk = Sequence(ids(TRUNK, 1))
    driver.step([(trunk, TRUNK)])
    branch = driver.fork(trunk, 333, ids(200, 2))
    driver.step([(branch, 200)])
    sequences = [
        driver.fork(trunk, shared, ids(chooser.randint(1, 60), 10 + shared))
        for shared in (1, 15, 64, 255, 320, 511, 512, 513, 599)
    ]
    sequences += [driver.fork(branch, shared, ids(40, 900 + shared)) for shared in (334, 450, 512, 532)]
    return sequences + [Sequence(ids(chooser.randint(1, 300), 700 + i)) for i in range(3)]


def check_mixture(folder: Path, kernels: Kernels, page_size: int, threads: int, share: bool, seed: int) -> None:
    model = load_native_model(folder, kernels, 8192, page_size, threads, share)
    driver = PagedDriver.with_pages(model, "shuffled", seed)
    chooser = random.Random(seed)
    sequences = forked(driver, chooser)
    reference = load_native_model(folder, kernels, 1024, 16, 1, share_prefixes=False)
    expected = {tuple(sequence.ids): alone_and_whole(reference, sequence.ids) for sequence in sequences}
    mixture = Mixture(driver, expected, chooser)
    while any(sequence.computed < len(sequence.ids) for sequence in sequences):
        mixture.advance(sequences)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("page_size", "threads", "share"), [(16, 2, True), (1, 2, True), (64, 1, True), (24, 2, False), (8, 3, True)]
)
def test_random_mixed_batches_give_the_bits_of_a_lone_whole_prompt(
    folders: dict[str, Path], case: str, number_format: str, page_size: int, threads: int, share: bool
) -> None:
    for kernels in all_kernels(number_format)[:1]:
        check_mixture(folders[case], kernels, page_size, threads, share, seed=page_size)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("case", ["mistral-window", "gemma3"])
def test_every_other_variant_is_exact_too(folders: dict[str, Path], case: str, number_format: str) -> None:
    for number, kernels in enumerate(all_kernels(number_format)[1:]):
        check_mixture(folders[case], kernels, (1, 16, 64)[number], 2, True, seed=number)


@pytest.mark.parametrize("number_format", FORMATS)
def test_short_rows_of_many_heads_are_exact_too(tmp_path: Path, number_format: str) -> None:
    folder = save_family("llama-many-heads-to-one", tmp_path)
    tokens = ids(64, 9)
    for kernels in all_kernels(number_format):
        model = load_native_model(folder, kernels)
        whole = alone_and_whole(model, tokens)
        driver = PagedDriver.with_pages(model, "shuffled")
        sequence = Sequence(tokens)
        parts = [driver.step([(sequence, count)])[0] for count in (8, 8, 7, 6, 5, 8, 8, 8, 6)]
        assert torch.equal(torch.cat(parts), whole), kernels.variant.name


@pytest.mark.parametrize("number_format", FORMATS)
def test_sums_and_batches_that_are_cut_into_many_blocks_are_exact_too(tmp_path: Path, number_format: str) -> None:
    sizes = {**SIZES, "hidden_size": 264, "intermediate_size": 2104, "num_hidden_layers": 2, "head_dim": 64}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    tokens = ids(700, 8)
    for kernels in all_kernels(number_format):
        whole = alone_and_whole(load_native_model(tmp_path, kernels), tokens)
        driver = PagedDriver.with_pages(load_native_model(tmp_path, kernels, threads=1), "ascending")
        sequence = Sequence(tokens)
        parts = [driver.step([(sequence, count)])[0] for count in (1, 13, 2, 584, 99, 1)]
        assert torch.equal(torch.cat(parts), whole), kernels.variant.name


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_cache_hit_at_every_offset_gives_the_bits_of_a_cold_run(folders: dict[str, Path], number_format: str) -> None:
    tokens = ids(290, 4)
    for kernels in all_kernels(number_format)[:1]:
        expected = alone_and_whole(load_native_model(folders["llama"], kernels), tokens)
        driver = PagedDriver.with_pages(load_native_model(folders["llama"], kernels, 290 * 16), "ascending")
        trunk = Sequence(tokens)
        driver.step([(trunk, len(tokens))])
        for hit in range(1, len(tokens)):
            free = list(driver.free)
            fork = driver.fork(trunk, hit, tokens[hit:])
            assert torch.equal(driver.step([(fork, len(tokens) - hit)])[0], expected[hit:]), hit
            driver.free = free


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("case", ["llama", "mistral-window"])
def test_three_segments_and_more_are_exact_too(folders: dict[str, Path], case: str, number_format: str) -> None:
    tokens = ids(1700, 3)
    kernels = all_kernels(number_format)[0]
    model = load_native_model(folders[case], kernels, 4096)
    driver = PagedDriver.with_pages(model, "shuffled")
    trunk = Sequence(tokens)
    parts = [driver.step([(trunk, count)])[0] for count in (900, 1, 400, 1, 398)]
    whole = alone_and_whole(load_native_model(folders[case], kernels, 4096), tokens)
    assert torch.equal(torch.cat(parts), whole)
    forks = [driver.fork(trunk, shared, tokens[shared:]) for shared in (1698, 1695, 1600, 1024)]
    for found in driver.step([(fork, len(tokens) - fork.computed) for fork in forks]):
        assert torch.equal(found, whole[len(tokens) - len(found) :]), len(found)


def test_logits_do_not_depend_on_which_tokens_are_asked_for(folders: dict[str, Path]) -> None:
    tokens = ids(300, 5)
    for kernels in all_kernels("bfloat16"):
        model = load_native_model(folders["llama"], kernels)
        expected = alone_and_whole(model, tokens)
        driver = PagedDriver.with_pages(model, "ascending")
        batch = driver.batch([(Sequence(tokens), 300)])
        for wanted in ([], [299], [7, 7, 250, 0], list(range(0, 300, 3))):
            chosen = batch.positions[wanted]
            assert torch.equal(model.forward(batch, chosen), expected[wanted])
            room = torch.full((len(wanted), model.config.vocab_size), 7.0)
            assert model.forward(batch, chosen, room) is room
            assert torch.equal(room, expected[wanted])
            assert torch.equal(model.project(model.forward_hidden(batch, chosen)), expected[wanted])


def test_a_request_whose_numbers_are_broken_does_not_disturb_its_neighbours(folders: dict[str, Path]) -> None:
    tokens = ids(100, 6)
    for number_format in FORMATS:
        for kernels in all_kernels(number_format):
            model = load_native_model(folders["llama"], kernels)
            expected = alone_and_whole(model, tokens)
            driver = PagedDriver.with_pages(model, "ascending")
            good = Sequence(tokens)
            driver.step([(good, 99)])
            broken = Sequence(ids(100, 7))
            driver.step([(broken, 99)])
            model.kv.write_page(broken.pages[0], b"\xff" * model.kv.page_bytes)
            bad, well = driver.step([(broken, 1), (good, 1)])
            assert torch.equal(well, expected[99:])
            assert bad.isnan().all()
