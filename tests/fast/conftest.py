"""A small random Qwen3.5 made and saved by transformers, which the tests compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

# One thread: others may be at work on the machine, and results then do not depend on it.
torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Witness:
    """A transformers model and the folder it was saved to."""

    model: Any
    folder: Path

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """``[len(tokens), vocab_size]`` of one full pass."""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        return out[0, len(prompt) :].tolist()


def build(folder: Path, **changes: Any) -> Witness:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **(SIZES | changes), bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).float().eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            # Far from their defaults, so that none can be left out unseen.
            if name.endswith("linear_attn.norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith("norm.weight"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("dt_bias"):
                parameter.copy_(noise - 2.0)
            elif name.endswith("A_log"):
                parameter.copy_(noise)
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return Witness(model, folder)


@pytest.fixture(scope="session")
def build_witness(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Witness]:
    return lambda **changes: build(tmp_path_factory.mktemp("checkpoint"), **changes)


@pytest.fixture(scope="session")
def witness(build_witness: Callable[..., Witness]) -> Witness:
    return build_witness()
