"""Models of transformers, tied and not, saved with ``save_pretrained``."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trainer import Accelerator
from trainer.big_models import (
    dispatch_model,
    find_tied_parameters,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)

peft = pytest.importorskip("peft")

SIZES = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LLAMA = {**SIZES, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_positions=32, n_embd=16, n_layer=3, n_head=2, **SIZES)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **LLAMA)),
}


def answers(model):
    ids = torch.arange(2, 12).reshape(2, 5)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False
    )
    return [logits, made]


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_runs_from_the_disk(name):
    torch.manual_seed(0)
    plain = MODELS[name]().eval()
    plain.save_pretrained("saved", max_shard_size="8KB")
    expected, state = answers(plain), plain.state_dict()
    with init_empty_weights():
        shape = MODELS[name]()
    assert find_tied_parameters(shape) == find_tied_parameters(plain)
    unsplit = plain._no_split_modules  # as transformers itself passes them
    for places in (
        {"": "cpu"},
        {"": "disk"},
        {"": "cpu", "lm_head": "disk"},
        {"": "disk", "lm_head": "cpu"},
        "auto",
    ):
        with init_empty_weights():
            model = MODELS[name]().eval()
        limit = {"cpu": 25_000} if places == "auto" else None
        model = load_checkpoint_and_dispatch(
            model, "saved", places, limit, unsplit, offload_folder="off"
        )
        if places == "auto":
            assert set(model.hf_device_map.values()) == {"cpu", "disk"}
            assert model.hf_device_map == infer_auto_device_map(shape, limit, unsplit)
        assert all(map(torch.equal, answers(model), expected)), places
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        model.save_pretrained("again")
    again = type(model).from_pretrained("again").state_dict()
    assert all(torch.equal(again[key], state[key]) for key in state)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_train_while_the_base_is_on_disk():
    ids = torch.arange(2, 12).reshape(2, 5)

    def losses(places):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights="gaussian")
        model = peft.get_peft_model(MODELS["llama-tied"](), config)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if places:
            dispatch_model(model, places | dict.fromkeys(trained, "cpu"), offload_dir="off")
            assert any(parameter.is_meta for parameter in model.parameters())
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(trained.values(), lr=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = losses({})
    assert losses({"": "cpu", "base_model.model.model.layers.1": "disk"}) == plain
    assert len(set(plain)) == 3


def test_a_device_map_of_transformers_is_understood():
    """It is accelerate that `from_pretrained` calls; the model is then dispatched anew."""
    torch.manual_seed(0)
    plain = MODELS["llama-tied"]().eval()
    plain.save_pretrained("saved")
    theirs = LlamaForCausalLM.from_pretrained(
        "saved", device_map={"model": "cpu", "lm_head": "cpu"}
    )
    ours = dispatch_model(theirs, {"": "cpu", "model.layers.1": "disk"}, offload_dir="off")
    assert all(map(torch.equal, answers(ours), answers(plain)))
