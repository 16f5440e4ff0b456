from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from models import MoE, MoEBlock, MoEConfig
from models.llama import init_parameters
from models.moe import ExpertGroup, Router, keep_best_groups, regroup

DIM = 16
PLAIN = MoEConfig(hidden_dim=8, num_experts=6, top_k=2)
SOFTMAX = MoEConfig(hidden_dim=8, num_experts=6, top_k=3, num_shared=1, scoring="softmax")
GROUPED = MoEConfig(
    hidden_dim=8, num_experts=8, top_k=2, num_groups=4, top_groups=2, route_scale=2.5
)
CONFIGS = [PLAIN, SOFTMAX, GROUPED]


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def every_expert_on_every_row(moe: MoE, x_TD: torch.Tensor) -> torch.Tensor:
    """The meaning of the layer: no sorting, no exchange, E dense products a token."""
    weights_TK, experts_TK = moe.router(x_TD)
    e = moe.experts
    y_ETD = torch.stack(
        [
            F.linear(F.silu(F.linear(x_TD, w1)) * F.linear(x_TD, w3), w2)
            for w1, w2, w3 in zip(e.w1_LFD, e.w2_LDF, e.w3_LFD, strict=True)
        ]
    )
    picked = F.one_hot(experts_TK, moe.config.num_experts) * weights_TK.unsqueeze(-1)
    y_TD = torch.einsum("etd,tke->td", y_ETD, picked)
    return y_TD if moe.shared is None else y_TD + moe.shared(x_TD)


@pytest.mark.parametrize("config", CONFIGS)
def test_equals_every_expert_on_every_row(config):
    moe = MoEBlock(DIM, config).moe
    torch.nn.init.normal_(moe.router.weight_ED, generator=torch.Generator().manual_seed(2))
    x_BSD = random_rows(2, 5, DIM)
    weight = random_rows(2, 5, DIM).cumsum(0)  # tells rows apart
    results = []
    for function in (moe, lambda x: every_expert_on_every_row(moe, x.flatten(0, 1)).view_as(x)):
        moe.zero_grad()
        x = x_BSD.clone().requires_grad_()
        y = function(x)
        (y * weight).sum().backward()
        results.append([y, x.grad, *(p.grad for p in moe.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_experts_without_tokens_get_zero_gradients():
    moe = MoEBlock(DIM, PLAIN).moe
    moe.router.bias_E.copy_(torch.tensor([9.0, 0, 0, 9.0, 0, 0]))  # all tokens to 0 and 3
    moe(random_rows(4, DIM)).sum().backward()
    assert moe.tokens_per_expert.tolist() == [4, 0, 0, 4, 0, 0]
    busy = moe.experts.w1_LFD.grad.flatten(1).abs().sum(1) > 0
    assert busy.tolist() == [True, False, False, True, False, False]


@pytest.mark.parametrize("compute", ["loop", "grouped"])
def test_no_tokens_at_all(compute):
    moe = MoEBlock(DIM, replace(SOFTMAX, expert_compute=compute)).moe
    y = moe(torch.empty(0, DIM))
    y.sum().backward()
    assert y.shape == (0, DIM)
    assert moe.router.weight_ED.grad.abs().sum() == 0


def test_bias_chooses_but_does_not_weigh():
    router = Router(DIM, PLAIN)
    init_parameters(router, seed=0)
    x_TD = random_rows(7, DIM)
    scores_TE = F.linear(x_TD, router.weight_ED).sigmoid()
    router.bias_E.copy_(torch.tensor([0, 9.0, 0, 0, 8.0, 0]))
    weights_TK, experts_TK = router(x_TD)
    assert experts_TK.tolist() == [[1, 4]] * 7
    expected = scores_TE[:, [1, 4]] / scores_TE[:, [1, 4]].sum(1, keepdim=True)
    torch.testing.assert_close(weights_TK, expected)


def test_only_the_best_groups_are_kept():
    choice_TE = torch.tensor([[5.0, 0, 3, 3, 2, 2, 4, 3]])  # pairs worth 5, 6, 4, 7
    kept = keep_best_groups(choice_TE, num_groups=4, top_groups=2).isfinite()
    assert kept.tolist() == [[False, False, True, True, False, False, True, True]]


def test_counters_count_once_in_training_only():
    block = MoEBlock(DIM, PLAIN)
    x = random_rows(5, DIM)
    block.eval()(x)
    assert block.moe.tokens_per_expert.sum() == 0
    block.train()(x).sum().backward()
    assert block.moe.tokens_per_expert.sum() == 5 * PLAIN.top_k


def test_update_bias_favours_starved_experts_and_clears_the_counter():
    moe = MoEBlock(DIM, PLAIN).moe
    moe.tokens_per_expert.copy_(torch.tensor([6, 0, 3, 3, 2, 4]))
    moe.update_bias(speed=0.5)
    assert moe.router.bias_E.tolist() == [-0.5, 0.5, 0, 0, 0.5, -0.5]
    assert moe.tokens_per_expert.sum() == 0


def test_regroup_swaps_segments_and_its_transpose_swaps_them_back():
    counts_AB = torch.tensor([[2, 0, 1], [1, 3, 0]])
    rows = ["a0", "a0", "a2", "b0", "b1", "b1", "b1"]
    there = regroup(counts_AB, len(rows)).tolist()
    back = regroup(counts_AB.t(), len(rows)).tolist()
    assert [rows[i] for i in there] == ["a0", "a0", "b0", "b1", "b1", "b1", "a2"]
    assert [there[i] for i in back] == list(range(len(rows)))


def test_grouped_compute_is_the_loop_in_bf16():
    loop = MoEBlock(DIM, PLAIN)
    grouped = MoEBlock(DIM, replace(PLAIN, expert_compute="grouped"))
    grouped.load_state_dict(loop.state_dict())
    x = random_rows(9, DIM)
    expected = loop.moe(x)
    assert (grouped.moe(x) - expected).norm() < 0.02 * expected.norm()
    grouped(x).sum().backward()
    assert grouped.moe.experts.w1_LFD.grad.isfinite().all()


def test_wrong_options_are_errors():
    with pytest.raises(ValueError, match="no scoring 'relu'; there are"):
        MoEConfig(8, 6, 2, scoring="relu")
    with pytest.raises(ValueError, match="no expert_compute 'fast'; there are"):
        MoEConfig(8, 6, 2, expert_compute="fast")
    with pytest.raises(ValueError, match="6 experts do not fill 4 groups"):
        MoEConfig(8, 6, 2, num_groups=4)
    with pytest.raises(ValueError, match="6 experts do not divide over 4 ranks"):
        ExpertGroup("ep", num_ranks=4, rank=0).num_local(6)
