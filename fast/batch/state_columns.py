"""State blocks of the tokens of verification rows, by one gather.

Source: the recurrent operator of vllm-ascend (``csrc``) and ``fused_recurrent_gated_delta_rule``
of vLLM 0.27.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servespec.fast.batch.inputs import GdnInputs

__all__ = ["spec_token_states"]


def spec_token_states(
    inputs: GdnInputs, packed_index: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks that rows with drafts read first, and those their tokens write.

    Parameters
    ----------
    inputs : GdnInputs
        Of a step with N rows and S tokens with drafts.
    packed_index : bool
        The quirk `gdn_packed_state_index`: index the flattened blocks by the packed position of
        a token, whatever row it belongs to, and skip rows that accepted more than they hold.

    Returns
    -------
    initial : torch.Tensor
        ``[N]`` int64.
    written : torch.Tensor
        ``[S]`` int64.
    runs : torch.Tensor
        ``[N]`` bool, rows that are computed at all.

    Raises
    ------
    ValueError
        No row carries drafts.
    """
    blocks, starts = inputs.spec_state_indices, inputs.spec_query_start_loc
    accepted = inputs.num_accepted_tokens
    if blocks is None or starts is None or accepted is None:
        raise ValueError("GdnInputs.num_spec_decodes is 0: no row carries drafts")
    rows = inputs.num_spec_decodes
    flat = blocks.reshape(-1).long()
    first = starts[:rows].long()
    counts = starts[1 : rows + 1].long() - first
    token = torch.arange(inputs.num_spec_decode_tokens, device=flat.device)
    accepted = accepted[:rows].long()
    if packed_index:
        runs = accepted <= counts
        lookup = torch.where(runs, first + accepted - 1, first)
        return flat[lookup], flat[token], runs
    base = torch.arange(rows, device=flat.device) * blocks.shape[1]
    written = flat[token + torch.repeat_interleave(base - first, counts)]
    return flat[base + accepted - 1], written, torch.ones_like(counts, dtype=torch.bool)
