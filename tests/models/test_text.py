from __future__ import annotations

from itertools import islice

import pytest
import torch

from models import text


def test_splits_share_no_file_and_are_both_substantial():
    train, heldout = text.files("train"), text.files("heldout")
    assert not set(train) & set(heldout)
    assert len(text.read("train")) > 1_000_000
    assert len(text.read("heldout")) > 100_000


def test_labels_are_the_next_bytes():
    tokens, labels = next(text.batches("train", batch=3, seq=17))
    assert tokens.shape == labels.shape == (3, 17)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert tokens.min() >= 0
    assert tokens.max() < 256


def test_batches_depend_on_the_seed_alone():
    first = list(islice(text.batches("train", 2, 8, seed=3), 3))
    again = list(islice(text.batches("train", 2, 8, seed=3), 3))
    other = list(islice(text.batches("train", 2, 8, seed=4), 3))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_the_ranks_batches_make_up_one_large_batch():
    whole, _ = next(text.batches("heldout", 4, 8, seed=1))
    parts = [next(text.batches("heldout", 2, 8, seed=1, rank=r, world=2))[0] for r in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match=r"no split 'test'; there are \('train', 'heldout'\)"):
        text.files("test")
