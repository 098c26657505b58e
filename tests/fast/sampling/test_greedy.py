from __future__ import annotations

import pytest
import torch

from servespec.fast.sampling.greedy import greedy, require_numbers


def test_the_greatest_logit_wins_and_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -4.0, -9.0, -4.0]])
    assert greedy(logits).tolist() == [1, 0, 1]


def test_ties_in_wide_rows():
    torch.manual_seed(0)
    # Few distinct values in many columns: every row has hundreds of maxima.
    logits = torch.randint(0, 4, (50, 5000)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy(logits).tolist() == expected


def test_logits_that_are_not_numbers_are_refused():
    logits = torch.zeros(3, 70)
    assert greedy(logits.fill_(-torch.inf)).tolist() == [0, 0, 0]
    require_numbers(logits, greedy(logits))
    logits[1, 69] = torch.nan
    with pytest.raises(ValueError, match="row 1 contain NaN"):
        require_numbers(logits, greedy(logits))
