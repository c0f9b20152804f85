"""Tokens to train on: text as bytes, or a file of uint16 tokens; which batch belongs to a step.

The tokens are cut into blocks, and every sixteenth block is kept for validation. A batch is a
pure function of the seed, the step, the rank and the micro-batch, so the step number alone is
the position in the data.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

MAX_DEFAULT_BYTES = 16 * 2**20
"""Where the default text ends: enough for any model that a laptop trains."""

BLOCK_TOKENS = 2**16
"""Largest block; small data have smaller ones, so that at least 64 fit where that is possible."""

VALIDATION_STRIDE = 16
"""One block of so many is kept for validation."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and the tokens that follow them."""

    inputs: Tensor
    """[batch_size, sequence_length] int64."""

    targets: Tensor
    """[batch_size, sequence_length] int64, the inputs moved on by one."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens, and how they are cut into sequences for training and validation."""

    tokens: Tokens
    """[number of tokens], in memory or mapped from a file."""

    is_bytes: bool
    """Whether a token is one byte of text: only then are bits per byte defined."""

    sequence_length: int
    """Tokens of one sequence."""

    batch_size: int
    """Sequences of a batch."""

    vocab_size: int
    """Vocabulary of the model; a token outside it raises ``ValueError`` when it is drawn."""

    seed: int
    """Seed of the training batches."""

    def __post_init__(self) -> None:
        """Check that there is a block to train on and one for validation."""
        wanted = 2 * (self.sequence_length + 1)
        if len(self.tokens) < wanted:
            raise ValueError(
                f"data has {len(self.tokens)} tokens: wanted at least {wanted}, one training and "
                f"one validation block of sequence_length={self.sequence_length} plus one."
            )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; sequences never cross the border of a block."""
        return max(self.sequence_length + 1, min(BLOCK_TOKENS, len(self.tokens) // 64))

    def blocks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Start positions of the training blocks and of the validation blocks."""
        count = len(self.tokens) // self.block_tokens
        index = np.arange(count, dtype=np.int64)
        stride = min(VALIDATION_STRIDE, count)
        held_out = index % stride == stride - 1
        return index[~held_out] * self.block_tokens, index[held_out] * self.block_tokens

    def training_batch(self, step: int, rank: int, micro_batch: int = 0) -> Batch:
        """Draw the batch of one rank, step and micro-batch; the same whenever it is asked for."""
        random = np.random.default_rng((self.seed, step, rank, micro_batch))
        starts, _ = self.blocks()
        last_offset = self.block_tokens - self.sequence_length - 1
        block = random.integers(len(starts), size=self.batch_size)
        offset = random.integers(last_offset + 1, size=self.batch_size)
        return self._batch(starts[block] + offset)

    def validation_batches(self, rank: int, world_size: int, limit: int) -> Iterator[Batch]:
        """Yield this rank's share of one fixed set, at most ``limit`` batches.

        The set is spread evenly over the validation blocks, and every rank yields equally many
        full batches: FSDP's forward is a collective.
        """
        starts = self._validation_starts()
        count = min(limit, max(1, len(starts) // (world_size * self.batch_size)))
        wanted = count * world_size * self.batch_size
        chosen = starts[np.arange(wanted) * len(starts) // wanted]
        for batch in chosen[rank::world_size].reshape(count, self.batch_size):
            yield self._batch(batch)

    def _validation_starts(self) -> npt.NDArray[np.int64]:
        """Start positions of all validation sequences, which do not overlap."""
        _, blocks = self.blocks()
        per_block = (self.block_tokens - 1) // self.sequence_length
        offsets = np.arange(per_block, dtype=np.int64) * self.sequence_length
        return (blocks[:, None] + offsets).reshape(-1)

    def _batch(self, starts: npt.NDArray[np.int64]) -> Batch:
        index = starts[:, None] + np.arange(self.sequence_length + 1)
        window = torch.from_numpy(self.tokens[index].astype(np.int64))
        if (largest := int(window.max())) >= self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size}: wanted more than {largest}, a token in the data."
            )
        return Batch(inputs=window[:, :-1], targets=window[:, 1:])


def load_tokens(data: str | None) -> tuple[Tokens, bool]:
    """Read ``data`` as the settings describe it; the flag says whether tokens are bytes.

    Raises ``ValueError`` when there is nothing to read.
    """
    if data is None:
        return _join(standard_library_files())[:MAX_DEFAULT_BYTES], True
    path = Path(data)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise ValueError(f"data={data!r}: this folder holds no *.txt file.")
        return _join(files), True
    if not path.is_file():
        raise ValueError(f"data={data!r}: no such file or folder.")
    num_bytes = path.stat().st_size
    if not num_bytes:
        raise ValueError(f"data={data!r}: this file is empty.")
    if path.suffix != ".bin":
        return np.memmap(path, dtype=np.uint8, mode="r"), True
    if num_bytes % 2:
        raise ValueError(
            f"data={data!r}: a .bin file holds uint16 tokens; this one has {num_bytes} bytes."
        )
    return np.memmap(path, dtype=np.dtype("<u2"), mode="r"), False


def standard_library_files() -> list[Path]:
    """List the source files of Python's standard library, sorted, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(files) if not skipped.intersection(file.parts)]


def bits_per_token(loss: float) -> float:
    """Convert a cross-entropy in nats per token. For byte tokens these are bits per byte."""
    return loss / math.log(2)


def decode(tokens: list[int], is_bytes: bool) -> str:
    """Show tokens as text, or as numbers where only the user's tokenizer knows the text."""
    if is_bytes:
        return bytes(tokens).decode("utf-8", errors="replace")
    return " ".join(map(str, tokens))


def _join(files: list[Path]) -> npt.NDArray[np.uint8]:
    """Read the files into one array, with an empty line after each."""
    return np.frombuffer(b"".join(file.read_bytes() + b"\n\n" for file in files), dtype=np.uint8)
