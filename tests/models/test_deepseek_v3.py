from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models import DeepSeekV3, DeepSeekV3Config, LossModel
from models.deepseek_v3 import LatentAttention
from models.llama import init_parameters, rotary_table

TOY = DeepSeekV3Config.toy()


@pytest.fixture
def tokens_BS() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(TOY.vocab_size, (2, 12), generator=generator)


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("q_lora", [None, 8])
def test_attention_does_not_see_later_tokens(q_lora):
    attention = LatentAttention(replace(TOY, q_lora=q_lora))
    init_parameters(attention, seed=0)
    rope_2SR = rotary_table(12, TOY.qk_rope, TOY.rope_base)
    x_BSD = torch.randn(2, 12, TOY.dim, generator=torch.Generator().manual_seed(0))
    changed = x_BSD.clone()
    changed[:, 7:] = 1.0
    before, after = attention(x_BSD, rope_2SR), attention(changed, rope_2SR)
    assert before.shape == x_BSD.shape
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_attention_knows_the_order_of_tokens():
    attention = LatentAttention(TOY)
    init_parameters(attention, seed=0)
    x_BSD = torch.randn(1, 6, TOY.dim, generator=torch.Generator().manual_seed(0)) * 20
    swapped = x_BSD[:, [1, 0, 2, 3, 4, 5]]
    rope_2SR = rotary_table(6, TOY.qk_rope, TOY.rope_base)
    still = torch.stack([torch.ones_like(rope_2SR[0]), torch.zeros_like(rope_2SR[1])])
    last = [attention(x, still)[0, -1] for x in (x_BSD, swapped)]
    torch.testing.assert_close(*last)
    last = [attention(x, rope_2SR)[0, -1] for x in (x_BSD, swapped)]
    assert not torch.allclose(*last)


def test_every_parameter_learns(tokens_BS):
    model = LossModel(DeepSeekV3(TOY))
    loss = model(tokens_BS, tokens_BS.roll(-1, 1))
    loss.backward()
    assert abs(loss.item() - torch.tensor(256.0).log().item()) < 0.1
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_it_trains(tokens_BS):
    model = LossModel(DeepSeekV3(TOY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    labels = tokens_BS.roll(-1, 1)
    losses = []
    for _ in range(20):
        losses.append(model(tokens_BS, labels))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.model.update_expert_bias()
    assert losses[-1] < 0.5 * losses[0]


def test_counters_count_each_pick_once(tokens_BS):
    model = DeepSeekV3(TOY)
    model(tokens_BS)
    (moe,) = model.moe_layers()
    assert moe.tokens_per_expert.sum() == tokens_BS.numel() * TOY.moe.top_k
    model.update_expert_bias()
    assert moe.tokens_per_expert.sum() == 0
    assert moe.router.bias_E.abs().max() == pytest.approx(1e-3)


def test_meta_model_becomes_the_same_model():
    with torch.device("meta"):
        late = DeepSeekV3(TOY, seed=5)
    late.to_empty(device="cpu").init_weights(seed=5)
    late_tensors = dict(late.named_parameters()) | dict(late.named_buffers())
    same = DeepSeekV3(TOY, seed=5)
    for name, tensor in (dict(same.named_parameters()) | dict(same.named_buffers())).items():
        assert torch.equal(tensor, late_tensors[name]), name


def test_published_size():
    with torch.device("meta"):
        model = DeepSeekV3(DeepSeekV3Config.v3_671b())
    assert num_parameters(model) == pytest.approx(671e9, rel=0.01)


def test_ranks_share_the_experts_of_the_published_size(fake_group):
    with torch.device("meta"):
        model = DeepSeekV3(DeepSeekV3Config.v3_671b(), fake_group)
    assert model.moe_layers()[0].experts.w1_LFD.shape == (128, 2048, 7168)
    assert num_parameters(model) == pytest.approx(671e9 / 2, rel=0.05)


def test_a_model_on_a_group_can_be_copied(fake_group):
    model = DeepSeekV3(TOY, fake_group)
    assert torch.equal(copy.deepcopy(model).head.weight, model.head.weight)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_with_its_collectives(tokens_BS, fake_group, dynamic):
    config = replace(TOY, num_layers=3, moe=replace(TOY.moe, route_scale=2.5))
    graphs = []

    def keep(gm: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(gm)
        return lambda *args: (torch.zeros(()),)  # nobody at the other end: do not run it

    model = LossModel(DeepSeekV3(config, fake_group))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=dynamic)
    compiled(tokens_BS, tokens_BS)
    (gm,) = graphs
    calls = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert sum("all_to_all_single" in call for call in calls) == 3 * 2  # counts, there and back
    assert sum("wait_tensor" in call for call in calls) == 3 * 2


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("compute", ["loop", "grouped"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_without_ranks(tokens_BS, compute, dynamic):
    moe = replace(TOY.moe, expert_compute=compute, num_groups=2, route_scale=2.5)
    model = LossModel(DeepSeekV3(replace(TOY, moe=moe)))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(tokens_BS, tokens_BS), model(tokens_BS, tokens_BS))
    counted = model.model.moe_layers()[0].tokens_per_expert.sum()
    assert counted == 2 * tokens_BS.numel() * moe.top_k


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
