"""A dense Llama-style transformer, and the parts that the other models share.

Grouped-query attention, rotary positions, RMSNorm before each sub-layer and SwiGLU, after
"The Llama 3 Herd of Models" (arXiv:2407.21783). Written for one rank's batch: nothing here
communicates.

Shape suffixes:
    B batch            S sequence         T tokens, B * S     D model width
    H query heads      K key-value heads  C channels a head   F feed-forward width
    R rotary channels  V vocabulary
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import text
from overlap.target import MeshSpec, Step, choose

NORM_EPS = 1e-6
INIT_STD = 0.02
IGNORE_INDEX = -100


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model. `max_seq` is the longest sequence, in tokens."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int = 256
    max_seq: int = 128
    rope_base: float = 10_000.0
    tie_embeddings: bool = False

    @classmethod
    def toy(cls) -> LlamaConfig:
        """Small enough to read its graph."""
        return cls(2, dim=32, num_heads=4, num_kv_heads=2, hidden_dim=64, max_seq=16)

    @classmethod
    def debug(cls) -> LlamaConfig:
        """Trains on bytes on a CPU."""
        return cls(4, dim=256, num_heads=8, num_kv_heads=4, hidden_dim=512)

    @classmethod
    def llama3_8b(cls) -> LlamaConfig:
        """The published 8B, 8.03e9 parameters."""
        return cls(
            num_layers=32,
            dim=4096,
            num_heads=32,
            num_kv_heads=8,
            hidden_dim=14_336,
            vocab_size=128_256,
            max_seq=8192,
            rope_base=500_000.0,
        )


def linear(in_dim: int, out_dim: int) -> nn.Linear:
    """A linear layer without bias: no layer of these models has one."""
    return nn.Linear(in_dim, out_dim, bias=False)


def rms_norm(dim: int) -> nn.RMSNorm:
    return nn.RMSNorm(dim, eps=NORM_EPS)


def rotary_table(max_seq: int, dim: int, base: float) -> Tensor:
    """Cosines and sines of each position's angles, fp32 [2, max_seq, dim / 2]."""
    frequency_R = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle_SR = torch.outer(torch.arange(max_seq, dtype=torch.float32), frequency_R)
    return torch.stack([angle_SR.cos(), angle_SR.sin()])


def rotate(x_BHSR: Tensor, rope_2SR: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864): channel i turns with channel i + R/2."""
    cos_SR, sin_SR = rope_2SR.unbind(0)
    a, b = x_BHSR.float().chunk(2, dim=-1)
    turned = torch.cat([a * cos_SR - b * sin_SR, b * cos_SR + a * sin_SR], dim=-1)
    return turned.type_as(x_BHSR)


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`, [..., D] to [..., D] (arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = linear(dim, hidden_dim)
        self.w2 = linear(hidden_dim, dim)
        self.w3 = linear(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    """Causal grouped-query attention, [B, S, D] to [B, S, D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq = linear(config.dim, config.num_heads * self.head_dim)
        self.wk = linear(config.dim, config.num_kv_heads * self.head_dim)
        self.wv = linear(config.dim, config.num_kv_heads * self.head_dim)
        self.wo = linear(config.num_heads * self.head_dim, config.dim)

    def forward(self, x_BSD: Tensor, rope_2SR: Tensor) -> Tensor:
        q_BHSC = rotate(self.split_heads(self.wq(x_BSD)), rope_2SR)
        k_BKSC = rotate(self.split_heads(self.wk(x_BSD)), rope_2SR)
        v_BKSC = self.split_heads(self.wv(x_BSD))
        y_BHSC = F.scaled_dot_product_attention(
            q_BHSC, k_BKSC, v_BKSC, is_causal=True, enable_gqa=True
        )
        return self.wo(y_BHSC.transpose(1, 2).flatten(2))

    def split_heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each with its norm before and a residual around."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = rms_norm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = rms_norm(config.dim)
        self.ffn = SwiGLU(config.dim, config.hidden_dim)

    def forward(self, x_BSD: Tensor, rope_2SR: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope_2SR)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class Llama(nn.Module):
    """Tokens int64 [B, S] to logits [B, S, V]."""

    rope_2SR: Tensor

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm = rms_norm(config.dim)
        self.head = linear(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.register_buffer("rope_2SR", self.rope_table(), persistent=False)
        self.init_weights(seed)

    def rope_table(self) -> Tensor:
        config = self.config
        return rotary_table(config.max_seq, config.dim // config.num_heads, config.rope_base)

    def init_weights(self, seed: int = 0) -> None:
        """Set every parameter and buffer; after `to_empty` of a meta model, call it again."""
        init_parameters(self, seed)
        self.rope_2SR.copy_(self.rope_table())

    def forward(self, tokens_BS: Tensor) -> Tensor:
        rope_2SR = self.rope_2SR[:, : tokens_BS.shape[1]]
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, rope_2SR)
        return self.head(self.norm(x_BSD))


class LossModel(nn.Module):
    """A model and its loss as one function, so that both can be compiled into one graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the labels that are not IGNORE_INDEX; fp32, no dims."""
        logits_TV = self.model(tokens_BS).flatten(0, 1)
        return F.cross_entropy(logits_TV.float(), labels_BS.flatten(), ignore_index=IGNORE_INDEX)


CONFIGS = {
    "toy": LlamaConfig.toy,
    "debug": LlamaConfig.debug,
}


def train_step(config: str | None, mesh: MeshSpec) -> Step:
    """The target `models.llama:train_step`; one rank's replica, which communicates nothing."""
    sizes = choose(config, CONFIGS, default="debug")
    model = LossModel(Llama(sizes))
    tokens_BS, labels_BS = next(text.batches("train", batch=8, seq=sizes.max_seq))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Step(model, None, (tokens_BS, labels_BS), optimizer)


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, first_expert: int = 0) -> None:
    """Norms to one; every matrix normal, from a random stream named by `seed` and parameter.

    A stack of expert matrices [E, ., .] is drawn matrix by matrix, numbered from
    `first_expert`: however many ranks share the experts, expert e starts from the same weights.
    Parameters on the meta device are left alone.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        match parameter.ndim:
            case 1:
                parameter.fill_(1.0)
            case 2:
                draw_normal_(parameter, f"{seed}/{name}")
            case _:
                for expert, matrix in enumerate(parameter, start=first_expert):
                    draw_normal_(matrix, f"{seed}/{name}/{expert}")


def draw_normal_(matrix: Tensor, stream: str) -> None:
    generator = torch.Generator(matrix.device).manual_seed(zlib.crc32(stream.encode()))
    matrix.normal_(0.0, INIT_STD, generator=generator)
