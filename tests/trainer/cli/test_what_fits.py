"""The guide's table of what fits on which devices is what the estimate computes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.cli.estimate_memory.footprint import Input
from trainer.cli.estimate_memory.sharding import Layout, measure

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "large-models.md"
SIZES: dict[str, dict[str, int]] = {  # Touvron et al., "Llama 2", 2023
    "7": {},
    "13": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "70": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
ROW = re.compile(r"\| (\d+) billion \| (FSDP [^|]*) \| ([\d.]+) \| (\d+) GiB \|")
ROWS = ROW.findall(GUIDE.read_text(encoding="utf-8"))
SHOWN = [pytest.param(*row, marks=[pytest.mark.long] if n else []) for n, row in enumerate(ROWS)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("billions", "processes", "size", "device"), SHOWN)
def test_a_row_of_the_guide_is_the_estimate(billions, processes, size, device):
    numbers = dict(part.split() for part in processes.split(" x "))
    tokens: dict[str, Any] = {"shape": (4096,), "dtype": torch.int64}
    found = measure(
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES[billions], use_cache=False)),
        layout=Layout(
            shard=int(numbers["FSDP"]), tp=int(numbers.get("TP", 1)), activation_checkpointing=True
        ),
        precision="bf16",
        make_optimizer=torch.optim.AdamW,
        inputs=[Input(name=name, **tokens) for name in ("input_ids", "labels")],
    )
    gibibytes = sum(vars(found).values()) / 2**30
    assert float(size) == round(gibibytes, 1)
    assert int(device) == next(each for each in (24, 40, 80) if gibibytes <= 0.9 * each)


def test_the_guide_shows_models_that_need_many_devices():
    assert {row[0] for row in ROWS} == {"7", "13", "70"}
