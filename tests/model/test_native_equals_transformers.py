"""Logits of the native kernels against transformers: every family, head size and instruction set of this machine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from srt.model.native import Kernels
from tests.model.families import CASES, EVERY_FAMILY, HEAD_DIMS, SIZES, reference_logits, save_family
from tests.model.native_kernels import FORMATS, all_kernels, load_native_model
from tests.model.paged_driver import PagedDriver, Sequence

TOLERANCE = 1e-4
LENGTH = 300


def ids(length: int, seed: int = 1, vocab: int = 269) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def chunked(driver: PagedDriver, tokens: list[int], counts: tuple[int, ...]) -> torch.Tensor:
    sequence = Sequence(tokens)
    return torch.cat([driver.step([(sequence, count)])[0] for count in counts])


@pytest.mark.parametrize("case", CASES)
def test_every_family_gives_transformers_logits_on_every_variant(tmp_path: Path, case: str) -> None:
    folder = save_family(case, tmp_path)
    tokens = ids(LENGTH)
    expected = reference_logits(folder, tokens)
    for kernels in all_kernels("float32"):
        driver = PagedDriver.with_pages(load_native_model(folder, kernels), "shuffled")
        whole = driver.step([(Sequence(tokens), LENGTH)])[0]
        assert (whole - expected).abs().max() < TOLERANCE, kernels.variant.name
        assert torch.equal(chunked(driver, tokens, (100, 1, 1, 3, 155, 40)), whole), kernels.variant.name


@pytest.mark.parametrize("case", EVERY_FAMILY)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_family_with_every_head_size_gives_transformers_logits_on_every_variant(
    tmp_path: Path, case: str, head_dim: int
) -> None:
    folder = save_family(case, tmp_path, head_dim=head_dim)
    tokens = ids(LENGTH)
    expected = reference_logits(folder, tokens)
    for kernels in all_kernels("float32"):
        driver = PagedDriver.with_pages(load_native_model(folder, kernels), "shuffled")
        found = chunked(driver, tokens, (109, 1, 190))
        assert (found - expected).abs().max() < TOLERANCE, kernels.variant.name


@pytest.mark.parametrize("head_dim", [6, 16, 32, 64, 80, 96, 128, 256])
def test_every_head_size_and_uneven_sizes_of_everything_else_are_computed(tmp_path: Path, head_dim: int) -> None:
    torch.manual_seed(head_dim)
    sizes = {
        **SIZES,
        "hidden_size": 3 * 24,
        "intermediate_size": 56,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": head_dim,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    tokens = ids(LENGTH)
    expected = reference_logits(tmp_path, tokens)
    for kernels in all_kernels("float32"):
        driver = PagedDriver.with_pages(load_native_model(tmp_path, kernels), "shuffled")
        found = chunked(driver, tokens, (260, 1, 39))
        assert (found - expected).abs().max() < TOLERANCE, kernels.variant.name


@pytest.mark.parametrize(
    ("number_format", "share"),
    [("bfloat16", 0.02), ("int8", 0.06), ("int4", 0.4), ("kv8", 0.03), ("kv8-float32", 0.02)],
)
@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3"])
def test_fewer_bits_stay_near_float32_on_every_variant(
    tmp_path: Path, case: str, number_format: str, share: float
) -> None:
    folder = save_family(case, tmp_path)
    tokens = ids(LENGTH)
    expected = reference_logits(folder, tokens)
    for kernels in all_kernels(number_format):
        driver = PagedDriver.with_pages(load_native_model(folder, kernels), "shuffled")
        found = chunked(driver, tokens, (200, 1, 99))
        assert (found - expected).abs().mean() < share * expected.std(), kernels.variant.name


def test_hidden_states_projected_in_slices_give_the_logits_of_the_step(tmp_path: Path) -> None:
    folder = save_family("qwen2", tmp_path)
    tokens = ids(40)
    for number_format in FORMATS:
        for kernels in all_kernels(number_format):
            driver = PagedDriver.with_pages(load_native_model(folder, kernels), "ascending")
            logits = driver.step([(Sequence(tokens), 40)])[0]
            batch = driver.batch([(Sequence(tokens), 40)])
            hidden = driver.model.forward_hidden(batch, batch.positions)
            assert hidden.shape == (40, 64)
            slices = torch.cat([driver.model.project(part) for part in hidden.split(7)])
            assert torch.equal(slices, logits), kernels.variant.name


@pytest.mark.real
def test_real_models_in_float32_are_as_near_to_float64_as_a_float32_can_be(any_real_model: Path) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    # More than the 512 tokens of Gemma's window.
    tokens = AutoTokenizer.from_pretrained(any_real_model)(text)["input_ids"][:560]
    reference = AutoModelForCausalLM.from_pretrained(any_real_model, dtype=torch.float32).double().eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    for kernels in all_kernels("float32")[:1]:
        driver = PagedDriver.with_pages(load_native_model(any_real_model, kernels), "shuffled")
        found = chunked(driver, tokens, (len(tokens) - 2, 1, 1))
        assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("block", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1])
def test_weights_that_come_from_4_bit_blocks_of_gguf_lose_nothing_in_int4(
    tmp_path: Path, block: GGMLQuantizationType
) -> None:
    folder = save_family("llama", tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "layers" in name:
                packed = gguf_quants.quantize(parameter.numpy(), block)
                parameter.copy_(torch.from_numpy(gguf_quants.dequantize(packed, block)))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokens = ids(LENGTH)
    expected = reference_logits(folder, tokens)

    def distance(kernels: Kernels) -> float:
        driver = PagedDriver.with_pages(load_native_model(folder, kernels), "ascending")
        return float((driver.step([(Sequence(tokens), LENGTH)])[0] - expected).abs().mean())

    for in_8_bits, in_4_bits in zip(all_kernels("int8"), all_kernels("int4"), strict=True):
        assert distance(in_4_bits) < 1.2 * distance(in_8_bits), in_4_bits.variant.name
