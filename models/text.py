"""Real text without a download: the sources of Python's own standard library, as bytes.

One byte is one token, so the vocabulary is 256. Files, not passages, are held out. The text
depends on the Python version and on nothing else.

Shape suffixes: B batch, S sequence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

Split = Literal["train", "heldout"]

PACKAGES = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json")
HELDOUT_EVERY = 10


def files(split: Split) -> list[Path]:
    """The files of a split, in order of name; every tenth is held out."""
    if split not in get_args(Split):
        raise ValueError(f"no split {split!r}; there are {get_args(Split)}")
    library = Path(os.__file__).parent
    folders = [library, *(library / name for name in PACKAGES)]
    paths = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    is_heldout = split == "heldout"
    return [path for i, path in enumerate(paths) if (i % HELDOUT_EVERY == 0) == is_heldout]


@cache
def read(split: Split) -> Tensor:
    """All bytes of a split, uint8 of one dimension."""
    text = bytearray().join(path.read_bytes() for path in files(split))
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(
    split: Split, batch: int, seq: int, seed: int = 0, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of random passages: tokens and next-byte labels, int64 [batch, seq].

    All ranks draw the passages of the whole step and each keeps its own rows, so the ranks'
    batches, one below the other, are the batch of a single rank of `batch * world` rows.
    """
    text = read(split)
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(seq + 1)
    while True:
        starts = torch.randint(len(text) - seq, (world, batch, 1), generator=generator)
        passages = text[starts[rank] + window].long()
        yield passages[:, :-1].contiguous(), passages[:, 1:].contiguous()
