"""Small tokenizers of the families that differ in how text and tokens go together, made in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tiny_model import CORPUS, make_tokenizer

WORD_START = "\u2581"


def byte_level() -> Tokenizer:
    """GPT-2's family, without a start token (SmolLM2, Qwen)."""
    return make_tokenizer()


def byte_level_with_start() -> Tokenizer:
    """Llama 3's family: byte-level, and the post-processor puts a start token in front."""
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def byte_level_with_added_tokens() -> Tokenizer:
    """Added tokens beside those of the byte alphabet: shown ones, with characters that do or do not stand for bytes."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<a b>", "<🌳>", "é", "▁"])
    tokenizer.add_special_tokens([AddedToken("<é ß>", special=True)])
    return tokenizer


def byte_level_in_sequence() -> Tokenizer:
    """A byte-level tokenizer whose decoder has a second step, so that its text is not the tokens' bytes alone."""
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("tree", "oak")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's family: words begin with a mark, unknown characters are spelled in byte tokens, a start token."""
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"])
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Replace(" ", WORD_START)
    learned.train_from_iterator(CORPUS, trainer)
    model = json.loads(learned.to_str())["model"]
    words = [token for token in sorted(model["vocab"], key=model["vocab"].__getitem__) if token != "<unk>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), normalizers.Replace(" ", WORD_START)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's family: a unigram model over words that begin with a mark; unknown characters become one token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's family: pieces are joined by the decoder, which also cares for the spaces before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["[UNK]", "[SEP]"])
    )
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level with start": byte_level_with_start,
    "byte level with added tokens": byte_level_with_added_tokens,
    "byte level in a sequence": byte_level_in_sequence,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "word piece": word_piece,
}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """A folder with the tokenizer's two files, as model folders have them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config})
    )
    return folder
