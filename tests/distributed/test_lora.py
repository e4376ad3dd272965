"""LoRA adapters of peft train on shards and split layers as in one process, and load as theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.test_transformers_models import MODELS, TOKENS, assert_close
from tests.helpers.ranks import RankError
from trainer import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Trainer,
    TrainModule,
)
from trainer.checkpoint.shards import merge_weights
from trainer.checkpoint.weights import load_weights

peft = pytest.importorskip("peft")

# peft asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

LAYOUTS: dict[str, Any] = {
    "shards": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "split layers": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}
CASES = [("GPT-2, tied", "shards"), ("Llama", "shards"), ("Llama, tied", "split layers")]


def base_of(model: str) -> Any:
    torch.manual_seed(0)
    base = MODELS[model]()
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim > 1:  # larger than at the start, or queries and keys learn nothing
                parameter.mul_(10)
    return base


def adapted(model: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a base that is the same everywhere, with adapters of which rank 0's are taken."""
    base = base_of(model).to(dtype)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    gpt = model.startswith("GPT")
    layers: Any = ["c_attn", "c_fc", "c_proj"] if gpt else "all-linear"
    config = peft.LoraConfig(r=4, target_modules=layers, fan_in_fan_out=gpt, **options)
    return peft.get_peft_model(base, config)


class Adapted(TrainModule):
    """Its checkpoints consist of the adapters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "lora_" in name}

    def load_state_dict(self, state_dict: Any, strict: bool = True, **kwargs: Any) -> Any:
        return super().load_state_dict(state_dict, strict=False, **kwargs)


def fit(
    folder: Path,
    model: str,
    layout: str | None = None,
    *,
    max_steps: int = 6,
    made: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], Any]:
    """Train; return whole adapters on rank 0, and the module."""
    options |= {} if layout is None else LAYOUTS[layout]()
    trainer = Trainer(
        cpu=True,
        max_steps=max_steps,
        seed=3,
        progress_bar=False,
        project_dir=folder,
        **options,
    )
    module = Adapted(adapted(model, **(made or {})))
    size = 8 // trainer.accelerator.engine.parallel.dp_size // trainer.gradient_accumulation_steps
    loader = DataLoader(TOKENS, size, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path="auto")
    weights = trainer.accelerator.get_state_dict(module)
    return {name.removeprefix("model."): value for name, value in weights.items()}, module


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_fit_of_adapters_equals_one_process_and_loads_into_plain_peft(
    ranks2, model, layout, tmp_path
):
    def train() -> dict[str, Tensor]:
        found, module = fit(tmp_path / "two", model, layout)
        if found:
            module.model.save_pretrained(tmp_path / "saved", state_dict=found)
        return found

    start = dict(adapted(model).named_parameters())
    expected, module = fit(tmp_path / "one", model)
    found, other = ranks2(train)
    assert other == {}
    assert_close(found, expected)
    moved = [(expected[name] - start[name]).abs().max().item() for name in expected]
    assert min(moved) > 1e-4
    plain = peft.PeftModel.from_pretrained(base_of(model), tmp_path / "saved")
    torch.testing.assert_close(logits(plain), logits(module.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # the logits
def test_an_own_loop_of_adapters_equals_one_process_and_loads_into_plain_peft(
    ranks2, model, layout, tmp_path
):
    def loop(folder: Path, layout: str | None = None) -> None:
        accelerator = Accelerator(cpu=True, **({} if layout is None else LAYOUTS[layout]()))
        net = adapted(model)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        loader = DataLoader(TOKENS, 8 // accelerator.engine.parallel.dp_size)  # type: ignore[arg-type]
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for batch in loader:
            accelerator.backward(net(input_ids=batch, labels=batch).loss)
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(net, folder)

    loop(tmp_path / "one")
    ranks2(lambda: loop(tmp_path / "two", layout))
    whole, found = (load_file(tmp_path / each / "model.safetensors") for each in ("one", "two"))
    assert_close(found, whole)
    plain = []
    for weights in (whole, found):
        plain.append(peft.get_peft_model(base_of(model), adapted(model).peft_config["default"]))
        own = {n.replace(".default.", "."): v for n, v in weights.items() if "lora_" in n}
        assert not peft.set_peft_model_state_dict(plain[-1], own).unexpected_keys
    assert not torch.allclose(logits(plain[0]), logits(base_of(model)), atol=1e-3)
    torch.testing.assert_close(logits(plain[1]), logits(plain[0]), rtol=0, atol=1e-5)


def test_checkpoints_of_adapters_alone_resume_on_any_layout(ranks2, tmp_path):
    expected = ranks2(lambda: fit(tmp_path / "whole", "Llama", "shards")[0])[0]
    for folder in ("again", "alone"):
        ranks2(lambda folder=folder: fit(tmp_path / folder, "Llama", "shards", max_steps=4)[0])
    (index,) = (tmp_path / "again").rglob("shards.json")
    tensors = json.loads(index.read_text())["tensors"]
    saved = {name.removeprefix("model.") for name, known in tensors.items() if "section" in known}
    assert saved == expected.keys()
    merge_weights(index.parent, tmp_path / "merged.safetensors")
    merged = load_weights(tmp_path / "merged.safetensors")
    assert {name.removeprefix("model.") for name in merged} == expected.keys()

    again = ranks2(lambda: fit(tmp_path / "again", "Llama", "shards")[0])[0]
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    alone, _ = fit(tmp_path / "alone", "Llama", gradient_accumulation_steps=2)
    assert_close(alone, expected)


def test_adapters_in_float32_of_a_base_in_bfloat16(ranks2, tmp_path):
    made = {"dtype": torch.bfloat16}

    def train() -> Any:
        found, module = fit(tmp_path / "two", "Llama", "shards", made=made)
        return found, {p.requires_grad: p.dtype for p in module.parameters()}

    expected, _ = fit(tmp_path / "one", "Llama", made=made)
    (found, dtypes), _ = ranks2(train)
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-2)


def test_each_process_holds_its_part_of_base_and_adapters(ranks):
    def sizes() -> dict[str, int]:
        config = ParallelismConfig(dp_shard_size=2, tp_size=2)
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        net = accelerator.prepare(adapted("Llama"))
        return {name: p.to_local().numel() for name, p in net.named_parameters()}

    (here, *_), whole = ranks(4)(sizes), dict(adapted("Llama").named_parameters())
    layers = {name: whole[name].numel() / size for name, size in here.items()}
    split = {"q_proj.lora_B": 4, "q_proj.lora_A": 2, "o_proj.lora_A": 4, "o_proj.lora_B": 2}
    for part, parts in (split | {"q_proj.base": 4, "down_proj.base": 4, "norm": 2}).items():
        assert {size for name, size in layers.items() if part in name} == {parts}


def test_adapters_that_cannot_be_split_are_refused(ranks2):
    def prepare(config: Any) -> None:
        Accelerator(cpu=True, **LAYOUTS["split layers"]()).prepare(
            peft.get_peft_model(base_of("Llama"), config)
        )

    for config, kinds in (
        (peft.LoraConfig(target_modules="all-linear", use_dora=True), "lora_magnitude_vector"),
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "ia3_l"),
    ):
        with pytest.raises(RankError, match=f"tp_plan splits .*q_proj, .*{kinds}.*only LoRA"):
            ranks2(prepare, config)
