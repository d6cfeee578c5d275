"""A small decoder-only transformer over bytes: pre-norm RMSNorm, rotary positions, SwiGLU, causal attention.

The layout is that of the Llama family. Every op is real-valued and one that CUDA, MPS and the CPU share. The
module traces as one graph under `torch.compile` (call `model.compile()`, so that `loss` is compiled too).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import ConfigError

INIT_STD: Final = 0.02
ROTARY_BASE: Final = 10_000.0
BYTES: Final = 256


class Transformer(nn.Module):
    """Predicts the next token at every position. float32 weights, no biases, embedding and head untied.

    Args (all counts):
        dim: width of the residual stream, a multiple of `heads`; `dim / heads` is even.
        layers: number of blocks.
        heads: attention heads per block.
        context: the longest sequence it can see, in tokens.
        vocab: number of tokens; 256 for bytes.
        ffn_dim: inner width of the SwiGLU; None takes `default_ffn_dim(dim)`.

    Raises:
        ConfigError: a size is out of range; the text names the key, the value and what is allowed.
    """

    def __init__(
        self,
        *,
        dim: int,
        layers: int,
        heads: int,
        context: int,
        vocab: int = BYTES,
        ffn_dim: int | None = None,
    ) -> None:
        super().__init__()
        ffn_dim = default_ffn_dim(dim) if ffn_dim is None else ffn_dim
        _check_sizes(dim=dim, layers=layers, heads=heads, context=context, vocab=vocab, ffn_dim=ffn_dim)
        self.context = context
        self.vocab = vocab
        self.embedding = nn.Embedding(vocab, dim)
        self.rotary = Rotary(head_dim=dim // heads, context=context)
        self.blocks = nn.ModuleList(Block(dim=dim, heads=heads, ffn_dim=ffn_dim) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 `[batch, time]` with `time <= context` -> float32 logits `[batch, time, vocab]`."""
        time = tokens.shape[1]
        if time > self.context:
            raise ConfigError(f"sequence of {time} tokens: the model was built with context = {self.context}")
        cos, sin = self.rotary(time)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """int64 `[batch, time + 1]` -> the mean cross-entropy of the last `time` tokens, nats per token."""
        logits = self(tokens[:, :-1])
        # Under autocast the head yields bf16, too coarse for a softmax over the vocabulary.
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        *,
        length: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """The `length` bytes that follow `prompt`, drawn one at a time; without the prompt itself.

        Args:
            prompt: its last `context` bytes are seen; an empty one counts as a newline.
            length: number of new bytes.
            temperature: divides the logits; 0 takes the likeliest byte each time.
            generator: a CPU generator, whatever the model's device; the same state gives the same draws.

        Raises:
            ConfigError: a negative or non-finite temperature, or a prompt byte outside the vocabulary.
        """
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ConfigError(f"temperature = {temperature}: must be a finite number, 0 or more")
        text = bytearray(prompt or b"\n")
        if max(text) >= self.vocab:
            raise ConfigError(f"prompt holds byte {max(text)}: the model's vocab is {self.vocab}")
        start = len(text)
        for _ in range(length):
            window = torch.tensor(list(text[-self.context :]), device=self.head.weight.device)
            # Drawing on the host makes one generator serve every device.
            logits = self(window[None])[0, -1].cpu().float()[:BYTES]
            text.append(_draw(logits, temperature, generator))
        return bytes(text[start:])

    def _initialise(self, layers: int) -> None:
        """Normal weights, smaller where they write to the residual stream, lest it grow (GPT-2)."""
        residual_std = INIT_STD / math.sqrt(2 * layers)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                to_residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
                nn.init.normal_(weight, std=residual_std if to_residual else INIT_STD)


class Block(nn.Module):
    """One pre-norm layer: attention, then the feed-forward, each added to the residual stream."""

    def __init__(self, *, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim=dim, heads=heads)
        self.ffn_norm = RMSNorm(dim)
        self.ffn = SwiGLU(dim=dim, ffn_dim=ffn_dim)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, time, dim]`, cos and sin `[time, head_dim / 2]` -> `[batch, time, dim]`."""
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin)
        out: Tensor = hidden + self.ffn(self.ffn_norm(hidden))
        return out


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions (Su et al., RoFormer)."""

    def __init__(self, *, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, time, dim]`, cos and sin `[time, head_dim / 2]` -> `[batch, time, dim]`."""
        batch, time, dim = hidden.shape
        qkv = self.qkv(hidden).view(batch, time, 3, self.heads, dim // self.heads)
        # Contiguous, since attention over permuted views has been silently wrong on MPS (pytorch #181133).
        query, key, value = qkv.permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)  # each [batch, heads, time, head_dim]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return out


class SwiGLU(nn.Module):
    """Gated feed-forward: `down(silu(gate(x)) * up(x))` (Shazeer, GLU Variants Improve Transformer)."""

    def __init__(self, *, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, time, dim]` -> `[batch, time, dim]`."""
        out: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return out


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, in float32 and from plain ops, alike on every device."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., dim]` of any float dtype -> the same shape and dtype."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).type_as(hidden)


class Rotary(nn.Module):
    """The rotary angles of every position, as float32 cosines and sines: no complex numbers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, *, head_dim: int, context: int) -> None:
        super().__init__()
        frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
        # Not persistent: they follow from the config, so they are no part of a run's state.
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, time: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first `time` positions, each `[time, head_dim / 2]` float32."""
        return self.cos[:time], self.sin[:time]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of `x`, `[batch, heads, time, head_dim]`, by their angles."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    # Attention wants one dtype for all three inputs, and under autocast `value` is not float32.
    return turned.type_as(x)


def default_ffn_dim(dim: int) -> int:
    """The multiple of 64 nearest to 8/3 * dim, where its three matrices weigh as much as two of 4 * dim."""
    return max(64, 64 * round(8 * dim / (3 * 64)))


def _check_sizes(*, dim: int, heads: int, **others: int) -> None:
    for key, value in {"dim": dim, "heads": heads, **others}.items():
        if value < 1:
            raise ConfigError(f"model.{key} = {value}: must be 1 or more")
    if dim % (2 * heads):
        raise ConfigError(f"model.dim = {dim}: must be a multiple of 2 * heads = {2 * heads}, since rotary turns pairs")


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """One token out of logits `[vocab]` on the host."""
    if temperature == 0:
        return int(logits.argmax())
    # The maximum first, so that a tiny temperature can't make an infinity.
    probabilities = torch.softmax((logits - logits.max()) / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
