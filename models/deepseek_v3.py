"""DeepSeek-V3: latent attention and mixture-of-experts layers (arXiv:2412.19437).

Experts are spread over the ranks of one process group; every other weight is whole on each rank,
and each rank has its own batch. The rotary channels are laid out in halves, where the published
weights interleave them. Multi-token prediction and the YaRN extension of the context are left out.

Shape suffixes:
    B batch   S sequence   D model width   V vocabulary
    H heads   C channels a head (qk_nope + qk_rope for queries and keys)   R rotary channels
    L width of the latent
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models import text
from models.llama import (
    LossModel,
    SwiGLU,
    init_parameters,
    linear,
    rms_norm,
    rotary_table,
    rotate,
)
from models.moe import MoE, MoEConfig
from overlap.target import MeshSpec, Step, choose


@dataclass(frozen=True)
class DeepSeekV3Config:
    """Sizes of a model. `q_lora` None means queries without a latent; `max_seq` is in tokens."""

    num_layers: int
    num_dense: int  # the first layers, which have no experts
    dim: int
    num_heads: int
    q_lora: int | None
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_dim: int
    hidden_dim: int  # of the dense layers
    moe: MoEConfig
    vocab_size: int = 256
    max_seq: int = 128
    rope_base: float = 10_000.0

    @classmethod
    def toy(cls) -> DeepSeekV3Config:
        """Small enough to read its graph."""
        return cls(
            num_layers=2,
            num_dense=1,
            dim=32,
            num_heads=2,
            q_lora=None,
            kv_lora=16,
            qk_nope=16,
            qk_rope=8,
            v_dim=24,
            hidden_dim=64,
            moe=MoEConfig(hidden_dim=16, num_experts=4, top_k=2, num_shared=1),
            max_seq=16,
        )

    @classmethod
    def debug(cls) -> DeepSeekV3Config:
        """Trains on bytes on a CPU."""
        return cls(
            num_layers=3,
            num_dense=1,
            dim=256,
            num_heads=4,
            q_lora=None,
            kv_lora=64,
            qk_nope=32,
            qk_rope=32,
            v_dim=64,
            hidden_dim=512,
            moe=MoEConfig(hidden_dim=512, num_experts=8, top_k=2, num_shared=1),
        )

    @classmethod
    def demo(cls) -> DeepSeekV3Config:
        """The debug model with wider experts: more to compute for each row that is sent."""
        debug = cls.debug()
        return dataclasses.replace(debug, moe=dataclasses.replace(debug.moe, hidden_dim=1024))

    @classmethod
    def v3_671b(cls) -> DeepSeekV3Config:
        """The published model, 671e9 parameters."""
        return cls(
            num_layers=61,
            num_dense=3,
            dim=7168,
            num_heads=128,
            q_lora=1536,
            kv_lora=512,
            qk_nope=128,
            qk_rope=64,
            v_dim=128,
            hidden_dim=18_432,
            moe=MoEConfig(
                hidden_dim=2048,
                num_experts=256,
                top_k=8,
                num_shared=1,
                num_groups=8,
                top_groups=4,
                route_scale=2.5,
            ),
            vocab_size=129_280,
            max_seq=4096,
        )


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, [B, S, D] to [B, S, D].

    Keys and values of all heads come from one narrow latent; one rotary key is shared by all.
    """

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__()
        self.config = config
        heads, qk_dim = config.num_heads, config.qk_nope + config.qk_rope
        self.wq = query_projection(config.dim, config.q_lora, heads * qk_dim)
        self.wkv_a = linear(config.dim, config.kv_lora + config.qk_rope)
        self.kv_norm = rms_norm(config.kv_lora)
        self.wkv_b = linear(config.kv_lora, heads * (config.qk_nope + config.v_dim))
        self.wo = linear(heads * config.v_dim, config.dim)

    def forward(self, x_BSD: Tensor, rope_2SR: Tensor) -> Tensor:
        q_BHSC = self.queries(x_BSD, rope_2SR)
        k_BHSC, v_BHSC = self.keys_and_values(x_BSD, rope_2SR)
        y_BHSC = F.scaled_dot_product_attention(q_BHSC, k_BHSC, v_BHSC, is_causal=True)
        return self.wo(y_BHSC.transpose(1, 2).flatten(2))

    def queries(self, x_BSD: Tensor, rope_2SR: Tensor) -> Tensor:
        q_BHSC = self.split_heads(self.wq(x_BSD))
        nope, rope = q_BHSC.split([self.config.qk_nope, self.config.qk_rope], dim=-1)
        return torch.cat([nope, rotate(rope, rope_2SR)], dim=-1)

    def keys_and_values(self, x_BSD: Tensor, rope_2SR: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        latent_BSL, rope_BSR = self.wkv_a(x_BSD).split([config.kv_lora, config.qk_rope], dim=-1)
        rope_BHSR = rotate(rope_BSR.unsqueeze(1), rope_2SR).expand(-1, config.num_heads, -1, -1)
        kv_BHSC = self.split_heads(self.wkv_b(self.kv_norm(latent_BSL)))
        nope_BHSC, v_BHSC = kv_BHSC.split([config.qk_nope, config.v_dim], dim=-1)
        return torch.cat([nope_BHSC, rope_BHSR], dim=-1), v_BHSC

    def split_heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)


def query_projection(dim: int, q_lora: int | None, out_dim: int) -> nn.Module:
    if q_lora is None:
        return linear(dim, out_dim)
    return nn.Sequential(linear(dim, q_lora), rms_norm(q_lora), linear(q_lora, out_dim))


class DeepSeekV3Layer(nn.Module):
    """Attention and feed-forward, each with its norm before and a residual around."""

    def __init__(self, config: DeepSeekV3Config, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = rms_norm(config.dim)
        self.attention = LatentAttention(config)
        self.ffn_norm = rms_norm(config.dim)
        self.ffn = ffn

    def forward(self, x_BSD: Tensor, rope_2SR: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope_2SR)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class DeepSeekV3(nn.Module):
    """Tokens int64 [B, S] to logits [B, S, V]; `group` shares the experts, None keeps them here."""

    rope_2SR: Tensor

    def __init__(
        self, config: DeepSeekV3Config, group: dist.ProcessGroup | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            DeepSeekV3Layer(config, feed_forward(config, index, group))
            for index in range(config.num_layers)
        )
        self.norm = rms_norm(config.dim)
        self.head = linear(config.dim, config.vocab_size)
        self.register_buffer("rope_2SR", self.rope_table(), persistent=False)
        self.init_weights(seed)

    def rope_table(self) -> Tensor:
        config = self.config
        return rotary_table(config.max_seq, config.qk_rope, config.rope_base)

    def moe_layers(self) -> list[MoE]:
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, MoE)]

    def init_weights(self, seed: int = 0) -> None:
        """Set every parameter and buffer; after `to_empty` of a meta model, call it again."""
        moe_layers = self.moe_layers()
        init_parameters(self, seed, moe_layers[0].first_expert if moe_layers else 0)
        for moe in moe_layers:
            moe.reset_buffers()
        self.rope_2SR.copy_(self.rope_table())

    def forward(self, tokens_BS: Tensor) -> Tensor:
        rope_2SR = self.rope_2SR[:, : tokens_BS.shape[1]]
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, rope_2SR)
        return self.head(self.norm(x_BSD))

    def update_expert_bias(
        self, group: dist.ProcessGroup | None = None, speed: float = 1e-3
    ) -> None:
        """Balance the experts of all layers after a step; see `MoE.update_bias`."""
        for moe in self.moe_layers():
            moe.update_bias(group, speed)


BALANCE_SPEED = 1e-2  # ten times the published one, for runs of a few hundred steps
CONFIGS = {
    "toy": DeepSeekV3Config.toy,
    "debug": DeepSeekV3Config.debug,
    "demo": DeepSeekV3Config.demo,
}


def train_step(config: str | None, mesh: MeshSpec) -> Step:
    """The target `models.deepseek_v3:train_step`: experts are spread along axis `ep`, and balanced
    after every step of the optimizer."""
    sizes = choose(config, CONFIGS, default="debug")
    group = mesh.with_axis("ep", divides=sizes.moe.num_experts).group("ep")
    model = LossModel(DeepSeekV3(sizes, group))
    tokens_BS, labels_BS = next(text.batches("train", batch=8, seq=sizes.max_seq))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    everyone = dist.group.WORLD if mesh.num_ranks > 1 else None
    optimizer.register_step_post_hook(
        lambda *_: model.model.update_expert_bias(everyone, BALANCE_SPEED)
    )
    return Step(model, None, (tokens_BS, labels_BS), optimizer)


def feed_forward(
    config: DeepSeekV3Config, index: int, group: dist.ProcessGroup | None
) -> nn.Module:
    if index < config.num_dense:
        return SwiGLU(config.dim, config.hidden_dim)
    return MoE(config.dim, config.moe, group)
