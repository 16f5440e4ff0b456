from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from models import Llama, LlamaConfig, LossModel
from models.llama import IGNORE_INDEX, rotary_table, rotate

TOY = LlamaConfig.toy()


@pytest.fixture
def tokens_BS() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(TOY.vocab_size, (2, 12), generator=generator)


def test_logits_do_not_see_later_tokens(tokens_BS):
    model = Llama(TOY)
    changed = tokens_BS.clone()
    changed[:, 7:] = 0
    before, after = model(tokens_BS), model(changed)
    assert before.shape == (2, 12, TOY.vocab_size)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotary_scores_depend_on_distance_alone():
    rope = rotary_table(max_seq=16, dim=8, base=10_000.0)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    q_SR = rotate(q.expand(16, -1), rope)
    k_SR = rotate(k.expand(16, -1), rope)
    score = q_SR @ k_SR.T
    for distance in range(-3, 4):
        same = score.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same))
    assert not torch.allclose(score[0, 0], score[0, 3])


def test_tied_embeddings_are_one_parameter(tokens_BS):
    tied = Llama(replace(TOY, tie_embeddings=True))
    free = Llama(TOY)
    table = TOY.vocab_size * TOY.dim
    assert num_parameters(free) - num_parameters(tied) == table
    tied(tokens_BS).sum().backward()
    assert tied.head.weight is tied.embedding.weight


def test_loss_is_the_mean_over_labels_that_count(tokens_BS):
    model = LossModel(Llama(TOY))
    labels = tokens_BS.roll(-1, 1)
    labels[0] = IGNORE_INDEX
    expected = F.cross_entropy(model.model(tokens_BS[1:])[0], labels[1])
    torch.testing.assert_close(model(tokens_BS, labels), expected)


def test_the_seed_decides_the_weights_also_after_meta():
    with torch.device("meta"):
        late = Llama(TOY, seed=5)
    late.to_empty(device="cpu").init_weights(seed=5)
    same, other = Llama(TOY, seed=5), Llama(TOY, seed=6)
    late_tensors = dict(late.named_parameters()) | dict(late.named_buffers())
    for name, tensor in (dict(same.named_parameters()) | dict(same.named_buffers())).items():
        assert torch.equal(tensor, late_tensors[name]), name
    assert not torch.equal(same.head.weight, other.head.weight)


def test_published_size():
    with torch.device("meta"):
        model = Llama(LlamaConfig.llama3_8b())
    assert num_parameters(model) == 8_030_261_248


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph(tokens_BS, dynamic):
    model = LossModel(Llama(TOY))
    labels = tokens_BS.roll(-1, 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(tokens_BS, labels), model(tokens_BS, labels))


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
