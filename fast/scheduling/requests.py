"""The state of all live requests, one array for each field, indexed by slot."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import IntArray
from servespec.reference.contracts import Request, RequestError, RequestStatus

__all__ = ["NEVER", "POISON", "RequestTable", "doubled"]

Scalar = TypeVar("Scalar", bound=np.generic)

POISON = -7
"""What the fields of a free slot hold, so that a stale read shows."""

NEVER = 1 << 60
"""A number of tokens that no request reaches."""

_FIELDS = (
    "serial",
    "status",
    "num_prompt",
    "num_tokens",
    "num_computed",
    "num_in_flight",
    "num_placeholders",
    "num_drafts",
    "num_stale",
    "drop_stale",
    "is_chunk",
    "shared_prefix",
    "max_total",
    "stop_from",
    "length_limit",
    "eos",
    "stops_slowly",
    "last_step",
)


class RequestTable:
    """Fields of live requests; a request keeps its slot from arrival to end.

    Parameters
    ----------
    max_model_len : int
    num_spec_tokens : int
        Drafts of a request there is room for in the beginning.
    min_tokens_outlive_model_len : bool
        Whether ``min_tokens`` keeps a request alive that has reached `max_model_len`.
    capacity : int
        Slots in the beginning; their number doubles as needed.

    Attributes
    ----------
    serial : array of int64, shape (capacity,)
        Number of the request since the start; tells a slot's successive owners apart. This and
        the following are arrays of one shape and type.
    status : array
        `RequestStatus` values.
    num_prompt, num_tokens : array
        Prompt tokens; known tokens, prompt and output.
    num_computed : array
        Tokens scheduled so far, less rejected drafts.
    num_in_flight : array
        Scheduled tokens whose step's output has not come back.
    num_placeholders : array
        Output tokens in flight under asynchronous scheduling.
    num_drafts : array
        Drafts waiting to be scheduled.
    num_stale, drop_stale : array
        Tokens in flight when the request was preempted; whether their output is to be dropped.
    is_chunk : array
        1 if the last step left a part of the known tokens uncomputed.
    shared_prefix : array
        Token position of a prefix known to be shared whose GDN state is worth keeping; 0 if none.
    max_total : array
        Prompt plus ``max_tokens``.
    stop_from, length_limit : array
        Known tokens from which a stop is possible (``min_tokens``) and from which it is certain.
    eos : array
        End-of-sequence token, -1 if ignored.
    stops_slowly : array
        1 if the stop rule needs more than the last token and lengths.
    last_step : array
        The last step in which the request was scheduled.
    token_ids : array of int32, shape (capacity, width)
        Known tokens.
    drafts : array of int32, shape (capacity, draft width)
        Draft tokens, `num_drafts` of them; -1 is a placeholder.
    requests : list of (Request or None)
        By slot.
    hard_limit : int
        Known tokens at which a request ends even before ``min_tokens``.
    any_drafts : bool
        Whether any request may ever have drafts.
    slot_of : dict of str to int
        Slot of each live request, in order of arrival.
    """

    serial: IntArray
    status: IntArray
    num_prompt: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    num_in_flight: IntArray
    num_placeholders: IntArray
    num_drafts: IntArray
    num_stale: IntArray
    drop_stale: IntArray
    is_chunk: IntArray
    shared_prefix: IntArray
    max_total: IntArray
    stop_from: IntArray
    length_limit: IntArray
    eos: IntArray
    stops_slowly: IntArray
    last_step: IntArray

    def __init__(
        self,
        max_model_len: int,
        num_spec_tokens: int,
        *,
        min_tokens_outlive_model_len: bool = False,
        capacity: int = 64,
    ) -> None:
        self.max_model_len = max_model_len
        self.hard_limit = NEVER if min_tokens_outlive_model_len else max_model_len
        self.capacity = capacity
        self.any_drafts = num_spec_tokens > 0
        self._fields: IntArray = np.full((len(_FIELDS), capacity), POISON, dtype=np.int64)
        self._name_fields()
        self.token_ids: npt.NDArray[np.int32] = np.zeros((capacity, 64), dtype=np.int32)
        self.drafts: npt.NDArray[np.int32] = np.full(
            (capacity, max(num_spec_tokens, 1)), -1, dtype=np.int32
        )
        self.requests: list[Request | None] = [None] * capacity
        self.slot_of: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._num_added = 0

    def add(self, request: Request) -> int:
        """Give a request a slot and return it.

        Raises
        ------
        RequestError
            If a token id does not fit 32 bits.
        """
        params = request.sampling_params
        num_prompt = request.num_prompt_tokens
        try:
            prompt = np.array(request.prompt_token_ids, dtype=np.int32)
        except OverflowError:
            raise RequestError(
                f"request {request.request_id!r}: prompt_token_ids holds"
                f" {max(request.prompt_token_ids)}: token ids must be below 2**31"
            ) from None
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.ensure_width(num_prompt)
        self.token_ids[slot, :num_prompt] = prompt
        max_total = num_prompt + params.max_tokens
        self._fields[:, slot] = 0
        self.serial[slot] = self._num_added
        self.status[slot] = RequestStatus.WAITING
        self.num_prompt[slot] = self.num_tokens[slot] = num_prompt
        self.max_total[slot] = max_total
        self.stop_from[slot] = num_prompt + params.min_tokens
        self.length_limit[slot] = min(max_total, self.max_model_len)
        self.eos[slot] = -1 if params.eos_token_id is None else params.eos_token_id
        self.stops_slowly[slot] = bool(params.stop_token_ids) or (
            params.repetition_detection is not None
        )
        self.last_step[slot] = -1
        self.requests[slot] = request
        self.slot_of[request.request_id] = slot
        self._num_added += 1
        return slot

    def remove(self, slot: int) -> None:
        """Free a slot and poison what it held."""
        self.token_ids[slot, : self.num_tokens[slot]] = POISON
        self.drafts[slot] = POISON
        self._fields[:, slot] = POISON
        del self.slot_of[self.request(slot).request_id]
        self.requests[slot] = None
        self._free.append(slot)

    def request(self, slot: int) -> Request:
        """Return the request in a slot that is in use."""
        request = self.requests[slot]
        assert request is not None
        return request

    def known_tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """Return a view of the known tokens of a request.

        Returns
        -------
        array of int32, shape (num_tokens[slot],)
        """
        return self.token_ids[slot, : self.num_tokens[slot]]

    def set_drafts(self, slot: int, drafts: tuple[int, ...]) -> None:
        """Note the drafts of a request, in place of any before."""
        count = len(drafts)
        if count > self.drafts.shape[1]:
            wider = np.full((self.capacity, count), -1, dtype=np.int32)
            wider[:, : self.drafts.shape[1]] = self.drafts
            self.drafts = wider
        self.any_drafts = True
        self.drafts[slot, :count] = drafts
        self.num_drafts[slot] = count

    def ensure_width(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in each row of `token_ids`."""
        width = self.token_ids.shape[1]
        if num_tokens <= width:
            return
        # Memory that is never written costs nothing, so doubling is cheap even for long rows.
        wider = np.zeros((self.capacity, max(2 * width, num_tokens)), dtype=np.int32)
        wider[:, :width] = self.token_ids
        self.token_ids = wider

    def _grow(self) -> None:
        old, self.capacity = self.capacity, 2 * self.capacity
        self._fields = doubled(self._fields, axis=1, fill=POISON)
        self._name_fields()
        self.token_ids = doubled(self.token_ids, axis=0, fill=0)
        self.drafts = doubled(self.drafts, axis=0, fill=-1)
        self.requests.extend([None] * old)
        self._free.extend(range(self.capacity - 1, old - 1, -1))

    def _name_fields(self) -> None:
        for name, row in zip(_FIELDS, self._fields, strict=True):
            setattr(self, name, row)


def doubled(array: npt.NDArray[Scalar], axis: int, fill: int = 0) -> npt.NDArray[Scalar]:
    """Return a copy with twice the length along `axis`, the new half filled with `fill`."""
    shape = list(array.shape)
    shape[axis] *= 2
    # Zeroed memory is not committed before it is written, so zeros are left alone.
    larger = np.zeros(shape, dtype=array.dtype)
    half = array.shape[axis]
    index = (slice(None),) * axis
    larger[(*index, slice(half))] = array
    if fill:
        larger[(*index, slice(half, None))] = fill
    return larger
