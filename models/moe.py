"""A mixture-of-experts layer whose experts are spread over the ranks of a process group.

    router     each token picks its top-k experts and a weight for each
    sort       copies of the tokens, one per pick, in the order of their experts
    dispatch   an all-to-all takes each copy to the rank of its expert
    experts    every local expert transforms its rows
    combine    an all-to-all brings the rows back the same way
    weigh      each token sums its rows, weighted by the router

The number of rows for each expert is known only at run time, so the splits of both all-to-alls
are read back from a small all-to-all of counts. No row is dropped and none is padded. What
happens to a row depends on the row alone, never on its place in the batch.

Sources: DeepSeek-V3 (arXiv:2412.19437) for the router; GShard (arXiv:2006.16668) for the
exchange; the two steps of regrouping received rows follow TorchTitan's token dispatcher.

Shape suffixes:
    B batch        S sequence         T tokens, B * S            D model width
    E experts      L local experts    P ranks, E / L             K experts a token picks
    R routed rows, T * K              N rows received            F width of an expert
    G groups of experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from models.llama import SwiGLU, init_parameters, rms_norm
from overlap.target import MeshSpec, Step, choose

Scoring = Literal["sigmoid", "softmax"]
ExpertCompute = Literal["loop", "grouped"]


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing of one MoE layer.

    `num_shared` experts see every token. With `num_groups` > 1 a token picks only from its best
    `top_groups` groups of experts. `expert_compute`: "loop" runs one product per expert,
    "grouped" one grouped product over all of them, in bf16.
    """

    hidden_dim: int
    num_experts: int
    top_k: int
    num_shared: int = 0
    scoring: Scoring = "sigmoid"
    num_groups: int = 1
    top_groups: int = 1
    route_scale: float = 1.0
    expert_compute: ExpertCompute = "loop"

    def __post_init__(self) -> None:
        if self.scoring not in get_args(Scoring):
            raise ValueError(f"no scoring {self.scoring!r}; there are {get_args(Scoring)}")
        if self.expert_compute not in get_args(ExpertCompute):
            valid = get_args(ExpertCompute)
            raise ValueError(f"no expert_compute {self.expert_compute!r}; there are {valid}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not fill {self.num_groups} groups")


@dataclass(frozen=True)
class ExpertGroup:
    """The process group that shares the experts, by name: rank p has experts p*L to p*L + L-1."""

    name: str
    num_ranks: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ExpertGroup:
        """None stands for one rank that has all the experts."""
        if group is None:
            return cls("", 1, 0)
        return cls(group.group_name, group.size(), group.rank())

    def num_local(self, num_experts: int) -> int:
        if num_experts % self.num_ranks:
            raise ValueError(f"{num_experts} experts do not divide over {self.num_ranks} ranks")
        return num_experts // self.num_ranks


class Router(nn.Module):
    """Picks K experts for each token.

    `bias_E` steers the choice and nothing else: it balances the load without a loss of its own
    (arXiv:2408.15664), so the weights come from the scores without it.
    """

    bias_E: Tensor

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight_ED = nn.Parameter(torch.empty(config.num_experts, dim))
        self.register_buffer("bias_E", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, fp32 [T, K], and the experts, int64 [T, K]."""
        config = self.config
        scores_TE = score(F.linear(x_TD.float(), self.weight_ED.float()), config.scoring)
        choice_TE = scores_TE.detach() + self.bias_E
        if config.num_groups > 1:
            choice_TE = keep_best_groups(choice_TE, config.num_groups, config.top_groups)
        experts_TK = choice_TE.topk(config.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, experts_TK)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK * config.route_scale, experts_TK


def score(logits_TE: Tensor, scoring: Scoring) -> Tensor:
    match scoring:
        case "sigmoid":
            return logits_TE.sigmoid()
        case "softmax":
            return logits_TE.softmax(dim=-1)


def keep_best_groups(choice_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Minus infinity outside the `top_groups` groups whose two best experts sum highest."""
    choice_TGE = choice_TE.unflatten(1, (num_groups, -1))
    value_TG = choice_TGE.topk(2, dim=-1).values.sum(dim=-1)
    best = value_TG.topk(top_groups, dim=-1).indices
    is_out_TG = torch.ones_like(value_TG, dtype=torch.bool).scatter(1, best, False)
    return choice_TGE.masked_fill(is_out_TG.unsqueeze(-1), float("-inf")).flatten(1)


def count_experts(experts_R: Tensor, num_experts: int) -> Tensor:
    """How many rows each expert gets, int64 [E]."""
    zeros_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_R.device)
    return zeros_E.scatter_add(0, experts_R, torch.ones_like(experts_R))


class Exchange(NamedTuple):
    """How many rows this rank sends to each rank, and receives: the way back swaps the two."""

    send_splits: list[int]
    receive_splits: list[int]
    received_PL: Tensor  # rows received, by source rank and local expert


def plan_exchange(counts_E: Tensor, group: ExpertGroup) -> Exchange:
    """Tell each rank how many rows it will get for each of its experts.

    Waits for the answer and reads it on the host: the splits of the data are Python ints.
    """
    counts_PL = counts_E.view(group.num_ranks, -1)
    received_PL = funcol.all_to_all_single(counts_E, None, None, group.name).view_as(counts_PL)
    send_splits = counts_PL.sum(dim=1).tolist()
    receive_splits = received_PL.sum(dim=1).tolist()
    return Exchange(send_splits, receive_splits, received_PL)


def dispatch(rows_RD: Tensor, exchange: Exchange, group: ExpertGroup) -> Tensor:
    """Rows sorted by expert to the ranks of their experts; [N, D], sorted by local expert."""
    rows_ND = all_to_all(rows_RD, exchange.receive_splits, exchange.send_splits, group)
    return rows_ND.index_select(0, regroup(exchange.received_PL, rows_ND.shape[0]))


def combine(rows_ND: Tensor, exchange: Exchange, group: ExpertGroup) -> Tensor:
    """The inverse of `dispatch`."""
    rows_ND = rows_ND.index_select(0, regroup(exchange.received_PL.t(), rows_ND.shape[0]))
    return all_to_all(rows_ND, exchange.send_splits, exchange.receive_splits, group)


def all_to_all(
    rows: Tensor, output_splits: list[int], input_splits: list[int], group: ExpertGroup
) -> Tensor:
    """Differentiable; whoever uses the result first waits for it."""
    return funcol.all_to_all_single_autograd(rows, output_splits, input_splits, group.name)


def regroup(counts_AB: Tensor, num_rows: int) -> Tensor:
    """The index [num_rows] that takes rows ordered by (a, b) to the order (b, a).

    counts_AB[a, b] rows lie together as one segment; `regroup(counts_AB.t(), ...)` is the inverse.
    """
    lengths = counts_AB.t().flatten()
    old_starts = (counts_AB.flatten().cumsum(0).view_as(counts_AB) - counts_AB).t().flatten()
    new_starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(old_starts - new_starts, lengths, output_size=num_rows)
    return torch.arange(num_rows, device=counts_AB.device) + shift


class Experts(nn.Module):
    """The local experts, each a SwiGLU; their weights are set by the model that owns them."""

    def __init__(self, dim: int, hidden_dim: int, num_local: int, compute: ExpertCompute) -> None:
        super().__init__()
        self.compute = compute
        self.w1_LFD = nn.Parameter(torch.empty(num_local, hidden_dim, dim))
        self.w2_LDF = nn.Parameter(torch.empty(num_local, dim, hidden_dim))
        self.w3_LFD = nn.Parameter(torch.empty(num_local, hidden_dim, dim))

    def forward(self, rows_ND: Tensor, counts_L: Tensor) -> Tensor:
        """Rows sorted by expert, counts_L[l] of them for expert l; [N, D]."""
        run = grouped_experts if self.compute == "grouped" else looped_experts
        return run(rows_ND, counts_L, self.w1_LFD, self.w2_LDF, self.w3_LFD)


def looped_experts(
    rows_ND: Tensor, counts_L: Tensor, w1_LFD: Tensor, w2_LDF: Tensor, w3_LFD: Tensor
) -> Tensor:
    # unbind: its backward is one stack, where w1_LFD[l] would fill a whole stack per expert
    weights = (w.unbind(0) for w in (w1_LFD, w2_LDF, w3_LFD))
    experts = zip(rows_ND.split(counts_L.tolist()), *weights, strict=True)
    return torch.cat(
        [F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2) for x, w1, w2, w3 in experts]
    )


def grouped_experts(
    rows_ND: Tensor, counts_L: Tensor, w1_LFD: Tensor, w2_LDF: Tensor, w3_LFD: Tensor
) -> Tensor:
    ends_L = counts_L.cumsum(0, dtype=torch.int32)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(rows, weight.bfloat16().transpose(1, 2), offs=ends_L)

    x = rows_ND.bfloat16()
    return product(F.silu(product(x, w1_LFD)) * product(x, w3_LFD), w2_LDF).type_as(rows_ND)


class MoE(nn.Module):
    """Routed and shared experts, [..., D] to [..., D].

    In training `tokens_per_expert` counts this rank's picks until `update_bias` uses them.
    """

    tokens_per_expert: Tensor

    def __init__(self, dim: int, config: MoEConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.group = ExpertGroup.of(group)
        num_local = self.group.num_local(config.num_experts)
        self.first_expert = self.group.rank * num_local
        self.router = Router(dim, config)
        self.experts = Experts(dim, config.hidden_dim, num_local, config.expert_compute)
        self.shared = (
            SwiGLU(dim, config.num_shared * config.hidden_dim) if config.num_shared else None
        )
        zeros_E = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", zeros_E, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        weights_TK, experts_TK = self.router(x_TD)
        experts_R = experts_TK.flatten()
        counts_E = count_experts(experts_R, self.config.num_experts)
        if self.training:
            self.tokens_per_expert.add_(counts_E)

        order_R = experts_R.argsort(stable=True)
        token_R = order_R // self.config.top_k
        rows_RD = self.run_experts(x_TD.index_select(0, token_R), counts_E)
        rows_RD = rows_RD * weights_TK.flatten().index_select(0, order_R).unsqueeze(1)
        y_TD = torch.zeros_like(x_TD, dtype=rows_RD.dtype).index_add(0, token_R, rows_RD)
        y_TD = y_TD.type_as(x_TD)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x)

    def run_experts(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Every row through its expert, wherever that is; rows are and stay sorted by expert."""
        if self.group.num_ranks == 1:
            return self.experts(rows_RD, counts_E)
        exchange = plan_exchange(counts_E, self.group)
        rows_ND = dispatch(rows_RD, exchange, self.group)
        rows_ND = self.experts(rows_ND, exchange.received_PL.sum(dim=0))
        return combine(rows_ND, exchange, self.group)

    @torch.no_grad()
    def update_bias(self, group: dist.ProcessGroup | None = None, speed: float = 1e-3) -> None:
        """Make overloaded experts less, starved ones more likely to be picked (arXiv:2408.15664).

        Sums the counts over `group`, the ranks that see different tokens, and clears them. Call
        it between steps, outside the compiled forward, on all ranks of the group.
        """
        counts_E = self.tokens_per_expert
        if group is not None:
            dist.all_reduce(counts_E, group=group)
        load_E = counts_E.float()
        self.router.bias_E.add_(speed * (load_E.mean() - load_E).sign())
        counts_E.zero_()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        self.router.bias_E.zero_()
        self.tokens_per_expert.zero_()


class MoEBlock(nn.Module):
    """Norm, MoE and the residual around them, [..., D] to [..., D]."""

    def __init__(
        self, dim: int, config: MoEConfig, group: dist.ProcessGroup | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.norm = rms_norm(dim)
        self.moe = MoE(dim, config, group)
        self.init_weights(seed)

    def init_weights(self, seed: int = 0) -> None:
        """Set every parameter and buffer; after `to_empty` of a meta model, call it again."""
        init_parameters(self, seed, self.moe.first_expert)
        self.moe.reset_buffers()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


BLOCK_DIM = 256
CONFIGS = {
    "toy": lambda: MoEConfig(hidden_dim=16, num_experts=4, top_k=2),
    "debug": lambda: MoEConfig(hidden_dim=512, num_experts=8, top_k=2, num_shared=1),
}


def train_step(config: str | None, mesh: MeshSpec) -> Step:
    """The target `models.moe:train_step`: one block that learns to reproduce its input."""
    sizes = choose(config, CONFIGS, default="debug")
    group = mesh.with_axis("ep", divides=sizes.num_experts).group("ep")
    block = MoEBlock(BLOCK_DIM, sizes, group)
    x_BSD = torch.randn(8, 128, BLOCK_DIM, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    return Step(block, F.mse_loss, (x_BSD, x_BSD.clone()), optimizer)
