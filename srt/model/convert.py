"""Convert a GGUF file to a Hugging Face folder: bfloat16 safetensors, tokenizer, configuration, chat template.

Run as a program of its own (`python -m srt.model.convert <file.gguf> <folder>`), since it loads the `transformers`
library, which nothing else of the runtime needs.  It ends with exit code 0, or with one line on standard error.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

# Vocabularies whose merges were learned with every digit on its own, by the name that GGUF files give the splitting.
SINGLE_DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r"})

# How Gemma writes a chat, for files of the family that come without a template (Gemma's documentation of its turns).
# There is no turn for the system: what it says stands before the first words of the user.
GEMMA_FAMILIES = ("gemma2", "gemma3")
GEMMA_TURN_END = "<end_of_turn>"
GEMMA_CHAT = """{{ bos_token }}
{%- set said = namespace(first='', next='user') -%}
{%- for message in messages -%}
    {%- if message.role in ('system', 'developer') and loop.first -%}
        {%- set said.first = message.content | trim + '\\n\\n' -%}
    {%- elif message.role != said.next -%}
        {{ raise_exception('after an optional system message, user and assistant must take turns, the user first') }}
    {%- elif message.role == 'user' -%}
        {{ '<start_of_turn>user\\n' + said.first + message.content | trim + '<end_of_turn>\\n' }}
        {%- set said.first = '' -%}
        {%- set said.next = 'assistant' -%}
    {%- else -%}
        {{ '<start_of_turn>model\\n' + message.content | trim + '<end_of_turn>\\n' }}
        {%- set said.next = 'user' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

# Texts on which tokenizers that are not quite the same differ: digits, runs of spaces, scripts, emoji, control tokens.
PROBES = (
    "The capital of France is",
    "In 2024, 3 of 17 trees (17.6 %) had more than 1,000,000 leaves;   x  =  42.5e-3",
    "\tif a[10:20] == 'zwölf':\n        return  {\"k\": 7}\r\n\n\n",
    "Привет, мир! 你好，世界。 こんにちは 🌳👩‍👩‍👧‍👦 ﷽ नमस्ते",
    "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<s>[INST] x [/INST]</s>",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "  leading and trailing  ",
    "",
)


class ConversionError(Exception):
    """A file cannot be converted; the message is one line for the user."""


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model of `source` into the folder `target`, and check that its tokenizer can be used alone.

    Weights that the file holds in a quantized form are expanded in float32 and rounded to bfloat16 once.
    Raises ConversionError when the file is not a model that can be converted.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = _open(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise ConversionError(f"{source.name} cannot be converted: {_first_line(error)}") from error
    _mend_splitting(tokenizer.backend_tokenizer, _field(reader, "tokenizer.ggml.pre"))
    _forget_quantization(model)
    _complete_stop_ids(model.generation_config, reader, _complete_chat(tokenizer, reader))
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    check_tokenizer(target)


def check_tokenizer(folder: Path) -> None:
    """Raises ConversionError unless tokenizer.json alone gives the ids that the `transformers` library gives."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    complete = AutoTokenizer.from_pretrained(folder)
    for text in PROBES:
        if alone.encode(text).ids != complete(text)["input_ids"]:
            raise ConversionError(f"the converted tokenizer.json does not stand alone: it differs on {text!r}")


def _open(source: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ConversionError(f"{source.name} is not a GGUF file that can be read: {_first_line(error)}") from error


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _mend_splitting(tokenizer: Tokenizer, splitting: str | None) -> None:
    """Split digits before words where the vocabulary was made so: the loader knows only some names of splittings."""
    from tokenizers import pre_tokenizers

    if splitting in SINGLE_DIGIT_SPLITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def _forget_quantization(model: Any) -> None:
    """The loader has expanded the weights, but would still save the model as a quantized one."""
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)


def _complete_chat(tokenizer: Any, reader: GGUFReader) -> list[int]:
    """Give Gemma its way of writing a chat where the file has none; returns the ids that end a turn of that."""
    family = str(_field(reader, "general.architecture"))
    if tokenizer.chat_template is not None or family not in GEMMA_FAMILIES:
        return []
    turn_end = tokenizer.get_vocab().get(GEMMA_TURN_END)
    if turn_end is None:
        return []
    tokenizer.chat_template = GEMMA_CHAT
    return [int(turn_end)]


def _complete_stop_ids(generation_config: Any, reader: GGUFReader, turn_ends: list[int]) -> None:
    """A chat model may end its turn with another token than its text: both end the output."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [int(value) for name in names if (value := _field(reader, name)) is not None] + turn_ends
    ids = list(dict.fromkeys(ids))
    if ids:
        generation_config.eos_token_id = ids if len(ids) > 1 else ids[0]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def main(arguments: list[str]) -> int:
    """Convert `arguments[0]` into the folder `arguments[1]`; the result is the exit code."""
    if len(arguments) != 2:
        print("usage: python -m srt.model.convert FILE.gguf FOLDER", file=sys.stderr)
        return 2
    # A local file is all that is needed; the library must not look elsewhere, nor talk about itself.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        convert_gguf(Path(arguments[0]), Path(arguments[1]))
    except ConversionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
