"""Which state block each token of a verification row reads and writes.

The state before the step is in column ``accepted - 1`` of the row's blocks, and the state after
the step's token t goes to column t, so that whatever is accepted, its state is kept.

Source: the recurrent operator of vllm-ascend (``csrc``) and ``fused_recurrent_gated_delta_rule``
of vLLM 0.27.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from servespec.reference.contracts import GdnMetadata

__all__ = ["TokenStates", "spec_token_states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStates:
    """The blocks of one row.

    Attributes
    ----------
    initial : int
        Read before the first token.
    written : tuple of int
        Written after each token.
    """

    initial: int
    written: tuple[int, ...]


def spec_token_states(
    metadata: GdnMetadata, packed_index: bool = False
) -> tuple[TokenStates | None, ...]:
    """Return the state blocks of every row with drafts.

    Parameters
    ----------
    metadata : GdnMetadata
        Of a step with drafts.
    packed_index : bool
        The quirk `gdn_packed_state_index`: blocks are looked up in the flattened list at the
        token's position among all packed tokens. That is the row's own column only while every
        row before it has all its drafts; behind a shorter one a row works on another request's
        states. A row that accepted more tokens than it has now is left out without a word.

    Returns
    -------
    tuple of (TokenStates or None)
        None for a row that the quirk leaves out.
    """
    starts = metadata.spec_query_start_loc or (0,)
    blocks = metadata.spec_state_indices or ()
    accepted = metadata.num_accepted_tokens or ()
    flat = tuple(block for row in blocks for block in row)
    result: list[TokenStates | None] = []
    for row in range(metadata.num_spec_decodes):
        start, count = starts[row], starts[row + 1] - starts[row]
        columns = flat[start:] if packed_index else blocks[row]
        if packed_index and accepted[row] > count:
            result.append(None)
            continue
        result.append(
            TokenStates(initial=columns[accepted[row] - 1], written=tuple(columns[:count]))
        )
    return tuple(result)
