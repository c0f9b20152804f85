"""A LLaMA-style decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU or experts.

Shape names: ``B`` sequences, ``T`` tokens of a sequence, ``D`` width of the residual stream,
``H`` query heads, ``K`` key and value heads, ``C = D/H`` head size, ``F`` inner width, ``E``
experts, ``V`` vocabulary, ``N = B*T``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.settings import ModelSettings, MoESettings


class DecoderOutput(NamedTuple):
    """What the decoder returns."""

    logits: Tensor
    """[B, T, V] in the compute dtype."""

    balance_loss: Tensor
    """Scalar float32: mean load-balancing loss of the blocks, 0 for the dense model."""


class RotaryEmbedding(nn.Module):
    """Turns pairs of channels by an angle that grows with the position.

    The angles live in the module, in float32. As arguments of a block they would be cast to the
    block's parameter dtype by FSDP, and bfloat16 angles are wrong after a few hundred positions.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_length: int, base: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        position = torch.arange(max_length, dtype=torch.float32)
        angle = torch.outer(position, base**-exponent)  # [T, C/2]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate ``x: [B, H, T, C]``; the result has the shape and dtype of ``x``."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; groups of query heads share one key and value head."""

    def __init__(self, settings: ModelSettings, max_length: int) -> None:
        super().__init__()
        self.head_dim = settings.dim // settings.num_heads
        self.queries_per_kv = settings.num_heads // settings.num_kv_heads
        kv_dim = settings.num_kv_heads * self.head_dim
        self.query = nn.Linear(settings.dim, settings.dim, bias=False)
        self.key = nn.Linear(settings.dim, kv_dim, bias=False)
        self.value = nn.Linear(settings.dim, kv_dim, bias=False)
        self.output = nn.Linear(settings.dim, settings.dim, bias=False)
        self.rotary = RotaryEmbedding(self.head_dim, max_length, settings.rope_base)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``x: [B, T, D]``, each token to itself and those before it."""
        query = self.rotary(self._split(self.query(x)))  # [B, H, T, C]
        key = self.rotary(self._split(self.key(x)))  # [B, K, T, C]
        value = self._split(self.value(x))
        # Repeated heads reach the fast kernel on every device; ``enable_gqa`` does not on CPU.
        key = key.repeat_interleave(self.queries_per_kv, dim=1)
        value = value.repeat_interleave(self.queries_per_kv, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _split(self, x: Tensor) -> Tensor:
        """Split the heads of ``x: [B, T, heads*C]`` -> ``[B, heads, T, C]``."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated feed-forward layer of the dense model."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate = nn.Linear(settings.dim, settings.ffn_dim, bias=False)
        self.up = nn.Linear(settings.dim, settings.ffn_dim, bias=False)
        self.down = nn.Linear(settings.ffn_dim, settings.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x: [B, T, D]`` to the same shape."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class MixtureOfExperts(nn.Module):
    """SwiGLU experts of which each token uses a few.

    The experts' matrices are stacked in one parameter each. So every rank has a gradient for the
    same set of parameters whichever experts its own tokens chose (zeros for an expert without
    tokens), and FSDP's shards are equal at any number of ranks.
    """

    def __init__(self, settings: ModelSettings, moe: MoESettings) -> None:
        super().__init__()
        self.moe = moe
        rows = moe.num_experts * settings.ffn_dim
        self.router = nn.Linear(settings.dim, moe.num_experts, bias=False)
        self.gate = nn.Parameter(torch.empty(rows, settings.dim))  # [E*F, D]
        self.up = nn.Parameter(torch.empty(rows, settings.dim))  # [E*F, D]
        self.down = nn.Parameter(torch.empty(rows, settings.dim))  # [E*F, D], used transposed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' mixture for ``x: [B, T, D]`` and the load-balancing loss."""
        tokens = x.flatten(0, -2)  # [N, D]
        probability = self.router(tokens).float().softmax(dim=-1)  # [N, E]
        weight, expert = probability.topk(self.moe.experts_per_token, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        mixture = torch.zeros_like(tokens)
        stacked = (self.gate, self.up, self.down)
        matrices = zip(*(matrix.chunk(self.moe.num_experts) for matrix in stacked), strict=True)
        for index, (gate, up, down) in enumerate(matrices):
            token, choice = (expert == index).nonzero(as_tuple=True)
            chosen = tokens[token]
            hidden = F.silu(chosen @ gate.T) * (chosen @ up.T)
            share = weight[token, choice].unsqueeze(-1).type_as(hidden)
            mixture = mixture.index_add(0, token, (hidden @ down) * share)
        return mixture.view_as(x), self._balance_loss(probability, expert)

    def _balance_loss(self, probability: Tensor, expert: Tensor) -> Tensor:
        """1 when the tokens of this rank spread evenly over the experts, more when they do not.

        It is the loss of the Switch Transformer (arXiv 2101.03961, equation 4):
        ``E * sum_e f_e * p_e`` with f the share of choices and p the mean probability.
        """
        count = torch.bincount(expert.flatten(), minlength=self.moe.num_experts)
        share = count.float() / expert.numel()
        return self.moe.num_experts * (share * probability.mean(dim=0)).sum()


class Block(nn.Module):
    """One decoder block: attention and feed-forward, each behind a norm and a skip connection."""

    def __init__(self, settings: ModelSettings, max_length: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.attention = Attention(settings, max_length)
        self.ffn_norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.ffn: SwiGLU | MixtureOfExperts = (
            SwiGLU(settings) if settings.moe is None else MixtureOfExperts(settings, settings.moe)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new residual stream for ``x: [B, T, D]`` and the load-balancing loss."""
        x = x + self.attention(self.attention_norm(x))
        hidden = self.ffn_norm(x)
        if isinstance(self.ffn, MixtureOfExperts):
            update, balance_loss = self.ffn(hidden)
        else:
            update, balance_loss = self.ffn(hidden), hidden.new_zeros((), dtype=torch.float32)
        return x + update, balance_loss


class Decoder(nn.Module):
    """The language model: ``tokens [B, T]`` to the logits of each next token."""

    def __init__(self, settings: ModelSettings, max_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocab_size, settings.dim)
        self.blocks = nn.ModuleList(Block(settings, max_length) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.head = nn.Linear(settings.dim, settings.vocab_size, bias=False)
        self._initialise(settings)

    def forward(self, tokens: Tensor) -> DecoderOutput:
        """Predict from ``tokens: [B, T] int64`` with T at most ``max_length``."""
        x = self.embedding(tokens)
        balance_losses = []
        for block in self.blocks:
            x, balance_loss = block(x)
            balance_losses.append(balance_loss)
        return DecoderOutput(self.head(self.norm(x)), torch.stack(balance_losses).mean())

    @torch.no_grad()
    def _initialise(self, settings: ModelSettings) -> None:
        """Draw the matrices; those that write to the residual stream get less with more layers."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # the norms' weights are ones already
            std = 0.02 if name.startswith("embedding") else parameter.shape[-1] ** -0.5
            if name.endswith(("attention.output.weight", "ffn.down.weight", "ffn.down")):
                std /= math.sqrt(2 * settings.num_layers)
            parameter.normal_(std=std)
