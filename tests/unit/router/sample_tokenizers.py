"""Small tokenizers of every kind that models have, and texts to try them on."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tests.unit.router.fake_node import STORY, byte_level_tokenizer

TEXTS = (
    STORY,
    "Hello, world!  It's   fine: 3.14 [ok] a . b\n\n\tend ",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 🇩🇪🇯🇵, 👍🏽!",
    "日本語のテキスト、汉字和漢字。한국어도",
    "السَّلامُ عَلَيْكُم مرحبا",
    "क्षत्रिय नमस्ते दुनिया",
    "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 ﬁ ǆ ß İ",
    "བོད་ཡིག ᚠᛇᚻ 𝔘𝔫𝔦 𓀀",
    "\ufffd\ufeff\u200b\x00\x7f",
)
SPECIAL = "<|eos|>"
_LLAMA3_WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


def gpt2() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<|tool call|>", "naïve☃"])
    return tokenizer


def llama3() -> Tokenizer:
    """Split by a pattern, bytes afterwards; as Qwen's and Llama 3's."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|bos|>", SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tokenizer


def llama2(*, strip: bool = True) -> Tokenizer:
    """Sentencepiece BPE: words with ▁, and a token for each byte of what has none. Gemma's decoder does not strip."""
    pieces = ["<unk>", "<s>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁T", "▁Th", "▁The", "T", "h", "e", "s", ",", ".", "ü", "日", "本", "é", "▁s", "�"]
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e"), ("▁", "s")]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's and XLM-R's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's: continuations begin with ##, and spaces before punctuation go."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    return tokenizer


def nested_bytes() -> Tokenizer:
    """Byte-level, with more steps after it."""
    tokenizer = gpt2()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def no_decoder() -> Tokenizer:
    """Tokens with spaces between."""
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


_BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "llama2": llama2,
    "gemma": lambda: llama2(strip=False),
    "unigram": unigram,
    "word_piece": word_piece,
    "nested_bytes": nested_bytes,
    "no_decoder": no_decoder,
}
KINDS = tuple(_BUILDERS)
BYTE_LEVEL = ("gpt2", "llama3")
BYTE_FALLBACK = ("llama2", "gemma")


@functools.cache
def sample(kind: str) -> Tokenizer:
    """One of KINDS."""
    return _BUILDERS[kind]()
