"""The Qwen3.5 text model (dense): one step of a batch in, logits and the new memory out.

A layer is ``x += mixer(norm(x)); x += mlp(norm(x))``, where the mixer is full attention or a gated
delta net (GDN). Projections, norms and activations treat every token alike and run over all tokens
of the step at once; what looks at other tokens runs row by row.

Source: ``Qwen3_5ForCausalLM`` of transformers' ``models/qwen3_5/modeling_qwen3_5.py``; how the
rows find their K/V and states follows ``vllm/model_executor/models/qwen3_next.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from servespec.reference.cache.memory import (
    GdnState,
    Memory,
    read_kv,
    read_state,
    write_kv,
    write_states,
)
from servespec.reference.contracts import (
    AttentionMetadata,
    BatchRecord,
    GdnMetadata,
    KVCacheGroup,
    ModelConfig,
)
from servespec.reference.models.parameters import check_weights, layer_shapes
from servespec.reference.numerics.activations import sigmoid
from servespec.reference.numerics.arrays import Array, frozen
from servespec.reference.numerics.attention import attention
from servespec.reference.numerics.convolution import causal_convolution
from servespec.reference.numerics.gated_delta_rule import (
    chunked_gated_delta_rule,
    gating,
    recurrent_gated_delta_rule,
)
from servespec.reference.numerics.mlp import mlp
from servespec.reference.numerics.norms import gated_rms_norm, l2_norm, rms_norm
from servespec.reference.numerics.rotary import apply_rotary, rotary_angles

__all__ = ["Qwen3_5", "forward", "from_weights"]

Layer = Mapping[str, Array]
M = TypeVar("M", AttentionMetadata, tuple["_GdnRow", ...])


@dataclass(frozen=True, slots=True, eq=False)
class Qwen3_5:  # noqa: N801 - the name of the architecture
    """Parameters in float64, read-only.

    Attributes
    ----------
    config : ModelConfig
    embedding, lm_head : numpy.ndarray
        ``[vocab_size, hidden_size]``; one and the same array with tied embeddings.
    layers : tuple of mapping of str to numpy.ndarray
        For each layer its parameters by their names below ``model.layers.<i>.``.
    norm : numpy.ndarray
        ``[hidden_size]``.
    """

    config: ModelConfig
    embedding: Array
    layers: tuple[Layer, ...]
    norm: Array
    lm_head: Array


def from_weights(config: ModelConfig, weights: Mapping[str, npt.NDArray[np.float32]]) -> Qwen3_5:
    """Make a model of checkpoint parameters.

    Parameters
    ----------
    config : ModelConfig
    weights : mapping of str to numpy.ndarray
        By checkpoint name (`servespec.reference.models.parameters.parameter_shapes`); copied.

    Returns
    -------
    Qwen3_5

    Raises
    ------
    ConfigError
        If a parameter is missing, unknown or of the wrong shape.
    """
    check_weights(config, weights)
    exact = {name: frozen(values.astype(np.float64)) for name, values in weights.items()}
    embedding = exact["model.embed_tokens.weight"]
    return Qwen3_5(
        config=config,
        embedding=embedding,
        layers=tuple(
            MappingProxyType(
                {
                    name: exact[f"model.layers.{index}.{name}"]
                    for name in layer_shapes(config, layer_type)
                }
            )
            for index, layer_type in enumerate(config.layer_types)
        ),
        norm=exact["model.norm.weight"],
        lm_head=embedding if config.tie_word_embeddings else exact["lm_head.weight"],
    )


# What weights that are not finite make of the logits is refused where a token is chosen.
@np.errstate(invalid="ignore", over="ignore")
def forward(
    model: Qwen3_5, batch: BatchRecord, groups: tuple[KVCacheGroup, ...], memory: Memory
) -> tuple[Array, Memory]:
    """Run one step.

    K/V of the step's tokens are written before they are read, so a row reads all its tokens
    through its block table. A row without computed tokens starts from zero states whatever its
    state block holds; every other row's state must be the one after just those tokens.

    Parameters
    ----------
    model : Qwen3_5
    batch : BatchRecord
        At least one row.
    groups : tuple of KVCacheGroup
        As in `CacheConfig.groups`.
    memory : Memory

    Returns
    -------
    logits : numpy.ndarray
        ``[len(batch.logits_indices), vocab_size]``.
    memory : Memory

    Raises
    ------
    MemoryAccessError
        If the metadata lead to K/V or states that were not written for the row.
    """
    config = model.config
    positions = np.array(batch.positions)
    angles = rotary_angles(positions, config.rotary_dim, config.rope.rope_theta)
    attention_of = _by_layer(groups, "full_attention", batch.attention)
    gdn_of = _by_layer(
        groups, "linear_attention", [_gdn_rows(batch, metadata) for metadata in batch.gdn]
    )
    x = model.embedding[np.array(batch.token_ids)]
    for index, layer in enumerate(model.layers):
        normed = rms_norm(x, layer["input_layernorm.weight"], config.rms_norm_eps)
        if index in attention_of:
            mixed, memory = _full_attention(
                config, layer, index, normed, positions, angles, attention_of[index], memory
            )
        else:
            mixed, memory = _gated_delta_net(config, layer, index, normed, gdn_of[index], memory)
        x = x + mixed
        x = x + mlp(
            rms_norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps),
            layer["mlp.gate_proj.weight"],
            layer["mlp.up_proj.weight"],
            layer["mlp.down_proj.weight"],
        )
    last = rms_norm(x[np.array(batch.logits_indices)], model.norm, config.rms_norm_eps)
    return frozen(last @ model.lm_head.T), memory


def _by_layer(
    groups: tuple[KVCacheGroup, ...], layer_type: str, metadata: Sequence[M]
) -> dict[int, M]:
    """Give each layer of a type the metadata of its group."""
    of_type = [group for group in groups if group.layer_type == layer_type]
    return {
        layer: entry
        for group, entry in zip(of_type, metadata, strict=True)
        for layer in group.layer_indices
    }


def _full_attention(
    config: ModelConfig,
    layer: Layer,
    index: int,
    x: Array,
    positions: npt.NDArray[np.int64],
    angles: Array,
    metadata: AttentionMetadata,
    memory: Memory,
) -> tuple[Array, Memory]:
    """Grouped-query attention with normed and rotated heads and an output gate.

    The query projection holds, head by head, the query and then its gate.
    """
    tokens = len(x)
    both = (x @ layer["self_attn.q_proj.weight"].T).reshape(
        tokens, config.num_attention_heads, 2 * config.head_dim
    )
    query, gate = both[..., : config.head_dim], both[..., config.head_dim :]
    kv_shape = (tokens, config.num_key_value_heads, config.head_dim)
    key = (x @ layer["self_attn.k_proj.weight"].T).reshape(kv_shape)
    value = (x @ layer["self_attn.v_proj.weight"].T).reshape(kv_shape)
    eps = config.rms_norm_eps
    query = apply_rotary(rms_norm(query, layer["self_attn.q_norm.weight"], eps), angles)
    key = apply_rotary(rms_norm(key, layer["self_attn.k_norm.weight"], eps), angles)
    memory = write_kv(memory, index, np.array(metadata.slot_mapping), positions, key, value)

    mixed = np.empty_like(query)
    starts = metadata.query_start_loc
    for row, (table, seq_len) in enumerate(
        zip(metadata.block_tables, metadata.seq_lens, strict=True)
    ):
        if starts[row] >= tokens:
            break  # dummy rows of a padded step
        span = slice(starts[row], starts[row + 1])
        keys, values = read_kv(memory, index, table, seq_len)
        mixed[span] = attention(query[span], keys, values, config.head_dim**-0.5)
    gated = (mixed * sigmoid(gate)).reshape(tokens, -1)
    return gated @ layer["self_attn.o_proj.weight"].T, memory


@dataclass(frozen=True, slots=True)
class _GdnRow:
    """What a GDN layer does for one row.

    `source` is the block of the state to start from (None: zeros) after `num_computed_tokens`
    tokens. The step's tokens are run in `pieces`, each followed by a write of the state: one for
    the whole row, or with drafts one for each token, since any of them may turn out the last kept.
    """

    source: int | None
    num_computed_tokens: int
    recurrent: bool
    pieces: tuple[tuple[slice, int], ...]


def _gdn_rows(batch: BatchRecord, metadata: GdnMetadata) -> tuple[_GdnRow, ...]:
    masks = (metadata.spec_sequence_masks or (False,) * len(batch.req_ids))[: len(batch.req_ids)]
    spec_blocks = iter(metadata.spec_state_indices or ())
    spec_accepted = iter(metadata.num_accepted_tokens or ())
    other_blocks = iter(metadata.non_spec_state_indices or ())
    initial_blocks = iter(metadata.non_spec_initial_state_indices or ())
    # Only batches with a prefill carry flags; elsewhere every row is a decode and has a state.
    flags: Iterator[bool] = iter(metadata.has_initial_state or ())
    rows: list[_GdnRow] = []
    num_others = 0
    for row, is_spec in enumerate(masks):
        start, end = batch.query_start_loc[row], batch.query_start_loc[row + 1]
        computed = batch.num_computed_tokens[row]
        pieces: tuple[tuple[slice, int], ...]
        if is_spec:
            columns = next(spec_blocks)
            source = columns[next(spec_accepted) - 1]
            pieces = tuple(
                (slice(token, token + 1), columns[token - start]) for token in range(start, end)
            )
            recurrent = True
        else:
            block = next(other_blocks)
            # After a step with drafts the state is in the column of the last accepted one.
            source = next(initial_blocks, block)
            pieces = ((slice(start, end), block),)
            recurrent = num_others < metadata.num_decodes
            num_others += 1
        fresh = computed == 0 or (not is_spec and not next(flags, True))
        rows.append(_GdnRow(None if fresh else source, computed, recurrent, pieces))
    return tuple(rows)


def _gated_delta_net(
    config: ModelConfig,
    layer: Layer,
    index: int,
    x: Array,
    rows: tuple[_GdnRow, ...],
    memory: Memory,
) -> tuple[Array, Memory]:
    """Linear attention: convolve queries, keys and values, run the delta rule, norm and gate."""
    tokens = len(x)
    key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    value_heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim
    inputs = x @ layer["linear_attn.in_proj_qkv.weight"].T
    gate = (x @ layer["linear_attn.in_proj_z.weight"].T).reshape(tokens, value_heads, value_dim)
    g, beta = gating(
        x @ layer["linear_attn.in_proj_a.weight"].T,
        x @ layer["linear_attn.in_proj_b.weight"].T,
        layer["linear_attn.A_log"],
        layer["linear_attn.dt_bias"],
    )
    taps = layer["linear_attn.conv1d.weight"][:, 0]
    zeros = GdnState(
        layer=index,
        convolution=frozen(np.zeros((config.linear_conv_kernel_dim - 1, config.conv_dim))),
        recurrent=frozen(np.zeros((value_heads, value_dim, key_dim))),
        num_tokens=0,
    )
    outputs = np.empty((tokens, value_heads, value_dim))
    written: dict[int, GdnState] = {}
    for row in rows:
        state = zeros
        if row.source is not None:
            state = read_state(memory, index, row.source, row.num_computed_tokens)
        rule = recurrent_gated_delta_rule if row.recurrent else chunked_gated_delta_rule
        for span, block in row.pieces:
            mixed, convolution = causal_convolution(inputs[span], taps, state.convolution)
            query, key, value = np.split(
                mixed, (key_heads * key_dim, 2 * key_heads * key_dim), axis=1
            )
            outputs[span], recurrent = rule(
                l2_norm(query.reshape(-1, key_heads, key_dim)),
                l2_norm(key.reshape(-1, key_heads, key_dim)),
                value.reshape(-1, value_heads, value_dim),
                g[span],
                beta[span],
                state.recurrent,
            )
            count = state.num_tokens + len(mixed)
            state = GdnState(index, convolution, recurrent, count)
            written[block] = state
    memory = write_states(memory, written)
    normed = gated_rms_norm(
        outputs, gate, layer["linear_attn.norm.weight"], config.rms_norm_eps
    ).reshape(tokens, -1)
    return normed @ layer["linear_attn.out_proj.weight"].T, memory
