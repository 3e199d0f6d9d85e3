"""The training data: the sources of the Python standard library, their tokenizer, and windows of tokens."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

EOT = "<|endoftext|>"  # ends every document
EOT_ID = 0
# `encodings` consists mostly of tables of code points, which would be 15 % of the tokens
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings"}
# Runs of newlines, and runs of two or more spaces, are tokens of their own. So a prompt may end after either.
SPLIT = r"\n+| {2,}| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"


def read_sources(root: Path) -> tuple[list[str], list[str]]:
    """Return the training texts, and 2 % held-out texts, which a hash of the relative path chooses."""
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        (held_out if int.from_bytes(digest[:4], "big") % 50 == 0 else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer. Encoding adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    """Return one tensor of ids per document, with EOT at its end."""
    return [torch.tensor([*e.ids, EOT_ID]) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


class Windows:
    """Yields shuffled windows over the concatenated documents without end. Order and offset change every epoch."""

    def __init__(self, docs: list[Tensor], seed: int) -> None:
        self.docs = docs
        self.rng = torch.Generator().manual_seed(seed)

    def batches(self, batch_size: int, seq_len: int) -> Iterator[Tensor]:
        """Yield batches of windows (batch_size, seq_len + 1): inputs and, shifted by one, targets."""
        while True:
            order = torch.randperm(len(self.docs), generator=self.rng).tolist()
            offset = int(torch.randint(seq_len, (1,), generator=self.rng))
            stream = torch.cat([self.docs[i] for i in order])[offset:]
            windows_NT = stream.unfold(0, seq_len + 1, seq_len)
            windows_NT = windows_NT[torch.randperm(len(windows_NT), generator=self.rng)]
            yield from (b for b in windows_NT.split(batch_size) if len(b) == batch_size)
