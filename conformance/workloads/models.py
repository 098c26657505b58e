"""Strategies for model sizes and weights."""

from __future__ import annotations

from hypothesis import strategies as st

from servespec.conformance.cases.case import TinyModel
from servespec.reference.contracts import LayerType
from servespec.reference.models import tiny

__all__ = ["dense_models", "embedded_models", "hybrid_models", "random_models"]

_G: LayerType = "linear_attention"
_F: LayerType = "full_attention"

_HYBRID_PATTERNS: tuple[tuple[LayerType, ...], ...] = (
    (_G, _F),
    (_G, _G, _G, _F),
    (_G, _G, _F),
    (_G, _F, _G, _F),
    (_F, _G, _G),
)
_DENSE_PATTERNS: tuple[tuple[LayerType, ...], ...] = ((_F,), (_F, _F), (_F, _F, _F))

_seeds = st.integers(0, 2**32 - 1)


def embedded_models() -> st.SearchStrategy[TinyModel]:
    """Return the embedded model with weights of any seed, the default seed most often."""
    return st.builds(TinyModel, config=st.just(tiny.config()), seed=st.one_of(st.just(0), _seeds))


def hybrid_models() -> st.SearchStrategy[TinyModel]:
    """Return models with GDN and full-attention layers, of random sizes."""
    return random_models(_HYBRID_PATTERNS)


def dense_models() -> st.SearchStrategy[TinyModel]:
    """Return models with full-attention layers only, of random sizes."""
    return random_models(_DENSE_PATTERNS)


@st.composite
def random_models(draw: st.DrawFn, patterns: tuple[tuple[LayerType, ...], ...]) -> TinyModel:
    """Return models of random sizes.

    Key and value dimensions, head counts and groupings differ from each other as often as they
    may, so that a swapped pair of sizes fails instead of passing by luck.

    Parameters
    ----------
    patterns : tuple of tuple of str
        Layer patterns to choose from.
    """
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    key_heads = draw(st.sampled_from((1, 2, 3)))
    config = tiny.config(
        vocab_size=draw(st.sampled_from((64, 96, 200))),
        hidden_size=draw(st.sampled_from((24, 32, 48))),
        intermediate_size=draw(st.sampled_from((32, 56))),
        layer_types=draw(st.sampled_from(patterns)),
        num_attention_heads=kv_heads * draw(st.sampled_from((1, 2, 4))),
        num_key_value_heads=kv_heads,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw(st.sampled_from((1, 2, 3))),
        linear_key_head_dim=draw(st.sampled_from((8, 12, 16))),
        linear_value_head_dim=draw(st.sampled_from((8, 10, 24))),
        linear_conv_kernel_dim=draw(st.sampled_from((2, 3, 4))),
        tie_word_embeddings=draw(st.booleans()),
    )
    return TinyModel(config=config, seed=draw(_seeds))
