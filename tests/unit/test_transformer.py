from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.config import ModelConfig
from gradwire.errors import ConfigError
from gradwire_worker.models import Transformer, build
from gradwire_worker.models.transformer import RMSNorm, Rotary, rotate

SMALL = ModelConfig(dim=32, layers=2, heads=2, context=16)
TEXT = b"the quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices: more threads only make them slower, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(seed: int = 0) -> Transformer:
    return build(SMALL, seed=seed, device="cpu")


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_a_later_token_changes_no_earlier_logits() -> None:
    model, tokens = small(), random_tokens(2, 16)
    before = model(tokens)
    tokens[:, 9] = (tokens[:, 9] + 1) % 256
    after = model(tokens)

    assert before.shape == (2, 16, 256)
    assert before.dtype == torch.float32
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=1e-6)
    changed = (after - before).abs().amax(dim=(0, 2))[9:]
    assert changed.min() > 1e-4


def test_an_earlier_token_changes_every_later_position() -> None:
    model, tokens = small(), random_tokens(1, 16)
    before = model(tokens)
    tokens[0, 0] = (tokens[0, 0] + 1) % 256

    assert (model(tokens) - before).abs().amax(dim=2).min() > 1e-5


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator)
    cos, sin = Rotary(head_dim=8, context=64)(64)
    queries = rotate(query.expand(1, 1, 64, 8), cos, sin)[0, 0]
    keys = rotate(key.expand(1, 1, 64, 8), cos, sin)[0, 0]
    scores = queries @ keys.T

    for distance in (-5, 0, 1, 17):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores.diagonal(0)[0] == pytest.approx(float(query.flatten() @ key.flatten()), abs=1e-5)
    torch.testing.assert_close(queries.norm(dim=1), query.norm().expand(64))


def test_rotary_is_complex_multiplication_by_the_angle() -> None:
    x = torch.randn(1, 1, 4, 6, generator=torch.Generator().manual_seed(1))
    cos, sin = Rotary(head_dim=6, context=4)(4)
    turned = rotate(x, cos, sin)

    angle = torch.arange(4)[:, None] * 10_000.0 ** (-torch.tensor([0.0, 2.0, 4.0]) / 6)
    expected = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * angle)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))


def test_rotary_table_is_no_part_of_the_state() -> None:
    assert not [name for name in small().state_dict() if "rotary" in name]


def test_rms_norm_is_that_of_torch() -> None:
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2)) * 7
    norm = RMSNorm(32)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 32))

    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, norm.eps))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_attention_is_the_textbook_formula() -> None:
    attention = small().blocks[0].attention
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))
    cos, sin = torch.ones(16, 8), torch.zeros(16, 8)  # no rotation

    query, key, value = (
        part.view(2, 16, 2, 16).transpose(1, 2) for part in (x @ attention.qkv.weight.T).split(32, dim=-1)
    )
    scores = query @ key.transpose(2, 3) / math.sqrt(16)
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 16, 32)
    torch.testing.assert_close(attention(x, cos, sin), mixed @ attention.out.weight.T)


def test_loss_is_the_mean_cross_entropy_of_the_next_token() -> None:
    model, tokens = small(), random_tokens(3, 17)
    log_probabilities = model(tokens[:, :-1]).log_softmax(-1).detach()
    expected = -sum(log_probabilities[b, t, tokens[b, t + 1]] for b in range(3) for t in range(16)) / 48

    assert float(model.loss(tokens).detach()) == pytest.approx(float(expected), rel=1e-6)
    assert model.loss(tokens).shape == ()


def test_untrained_model_knows_nothing() -> None:
    model = build(ModelConfig(), seed=0, device="cpu")
    with torch.no_grad():
        loss = float(model.loss(random_tokens(4, 129)))

    assert loss == pytest.approx(math.log(256), abs=0.1)


def test_default_model_has_0_82_million_parameters() -> None:
    model = build(ModelConfig(), seed=0, device="cpu")

    assert sum(weight.numel() for weight in model.parameters()) == 820_352
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_training_learns_a_short_text() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    windows = torch.tensor(list(TEXT)).unfold(0, 17, 5)[:64]
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(windows)
        loss.backward()
        optimizer.step()

    assert float(loss.detach()) < 1.0
    assert b"brown" in model.generate(b"the quick ", length=12, temperature=0)


def test_every_weight_gets_a_gradient() -> None:
    model = small()
    model.loss(random_tokens(2, 17)).backward()

    assert [name for name, w in model.named_parameters() if w.grad is None or not w.grad.any()] == []


def test_one_seed_gives_one_model_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    one = small(7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    same, other = small(7).state_dict(), small(8).state_dict()

    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_init_is_narrower_where_it_writes_to_the_residual_stream() -> None:
    model = build(ModelConfig(), seed=0, device="cpu").requires_grad_(False)
    narrow = 0.02 / math.sqrt(8)

    assert float(model.blocks[0].attention.qkv.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(model.blocks[3].attention.out.weight.std()) == pytest.approx(narrow, rel=0.02)
    assert float(model.blocks[3].ffn.down.weight.std()) == pytest.approx(narrow, rel=0.02)


def test_generate_returns_new_bytes_and_repeats_with_its_generator() -> None:
    model = small()
    drawn = [
        model.generate(b"import os", length=40, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]

    assert isinstance(drawn[0], bytes)
    assert [len(text) for text in drawn] == [40, 40, 40]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generate_without_a_prompt_or_a_temperature() -> None:
    model = small()

    assert model.generate(b"", length=3, temperature=0) == model.generate(b"\n", length=3, temperature=0)
    assert model.generate(b"x", length=0) == b""
    cold = model.generate(b"x", length=5, temperature=1e-30, generator=torch.Generator().manual_seed(0))
    assert cold == model.generate(b"x", length=5, temperature=0)
    for temperature in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"temperature = {temperature}"):
            model.generate(b"x", length=1, temperature=temperature)


def test_model_traces_as_one_graph() -> None:
    model, tokens = small(), random_tokens(2, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_autocast_computes_in_bf16_and_the_loss_in_float32() -> None:
    model, tokens = small(), random_tokens(2, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(tokens)
    loss.backward()

    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(model.loss(tokens).detach()), abs=0.01)


def test_sequence_beyond_the_context_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens.*context = 16"):
        small()(random_tokens(1, 17))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 33}, r"model.dim = 33: must be a multiple of 2 \* heads = 4"),
        ({"layers": 0}, "model.layers = 0: must be 1 or more"),
        ({"ffn_dim": -1}, "model.ffn_dim = -1: must be 1 or more"),
    ],
)
def test_impossible_size_is_named(change: dict[str, int], message: str) -> None:
    sizes = {"dim": 32, "layers": 2, "heads": 2, "context": 16, "vocab": 256}
    with pytest.raises(ConfigError, match=message):
        Transformer(**(sizes | change))
