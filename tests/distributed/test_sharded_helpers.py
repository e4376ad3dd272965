"""Helpers of `trainer.utils` for sharded models, against the whole model on one process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from trainer import Accelerator, FullyShardedDataParallelPlugin, utils


def make(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))


def plugin():
    return FullyShardedDataParallelPlugin(auto_wrap_policy=lambda part: type(part) is nn.Linear)


def prepared(seed):
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    model = make(seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step(accelerator, model, optimizer):
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()


def whole(model):
    return [p.full_tensor().tolist() for p in model.parameters()]


def test_weights_and_optimizers_are_saved_and_loaded(ranks2, tmp_path):
    def save():
        accelerator, model, optimizer = prepared(1)
        step(accelerator, model, optimizer)
        utils.save_fsdp_model(plugin(), accelerator, model, tmp_path)
        utils.save_fsdp_optimizer(plugin(), accelerator, optimizer, model, tmp_path)
        saved = whole(model)
        step(accelerator, model, optimizer)
        return saved, whole(model)

    def load():
        accelerator, model, optimizer = prepared(2)
        utils.load_fsdp_model(plugin(), accelerator, model, tmp_path)
        utils.load_fsdp_optimizer(plugin(), accelerator, optimizer, model, tmp_path)
        loaded = whole(model)
        step(accelerator, model, optimizer)
        return loaded, whole(model)

    first, second = ranks2(save), ranks2(load)
    assert second == first
    state = load_file(tmp_path / "pytorch_model_fsdp_0" / "model.safetensors")
    assert [state[name].tolist() for name in make().state_dict()] == first[0][0]
    utils.merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_0", tmp_path / "merged", False, True)
    merged = utils.load(tmp_path / "merged" / "pytorch_model.bin")
    assert all(torch.equal(merged[name], state[name]) for name in state)
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()


def test_an_error_on_rank_0_is_raised_on_all_ranks(ranks2, tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    def body():
        accelerator, model, optimizer = prepared(1)
        found = []
        for call in (
            lambda: utils.merge_fsdp_weights(tmp_path / "missing", tmp_path / "merged"),
            lambda: utils.save_fsdp_optimizer(plugin(), accelerator, optimizer, model, file),
        ):
            with pytest.raises((ValueError, OSError, RuntimeError)) as raised:
                call()
            found.append(str(raised.value))
        return found

    own, others = ranks2(body)
    waited = "Rank 0 failed while the others waited for it: "
    for cause, text in zip(own, others, strict=True):
        assert text.startswith(waited)
        assert text.endswith(cause)


def test_adapters_are_saved_alone(ranks2, tmp_path):
    def body(save):
        from peft import LoraConfig, get_peft_model

        accelerator = Accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap")
        )
        torch.manual_seed(1)
        adapted = get_peft_model(make(), LoraConfig(target_modules=["2"], r=2))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora" in name:
                    parameter.fill_(0.5 if save else 0.25)
        model = accelerator.prepare(adapted)
        if save:
            utils.save_fsdp_model(None, accelerator, model, tmp_path, adapter_only=True)
        else:
            utils.load_fsdp_model(None, accelerator, model, tmp_path, adapter_only=True)
        state = accelerator.get_state_dict(model)
        return {value.unique().item() for name, value in state.items() if "lora" in name}

    assert ranks2(body, True)[0] == ranks2(body, False)[0] == {0.5}
    names = load_file(tmp_path / "pytorch_model_fsdp_0" / "model.safetensors").keys()
    assert len(names) == 2
    assert all("lora" in name for name in names)


def test_the_steps_of_sharding(ranks2):
    def body():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
        model = make(3)
        wraps = utils.fsdp2_prepare_auto_wrap_policy(plugin(), model)
        chosen = [name for name, part in model.named_modules() if wraps(part)]
        utils.fsdp2_apply_ac(accelerator, model)
        old = list(model.parameters())
        optimizer = torch.optim.SGD(old, lr=0.1)
        addresses = [parameter.data_ptr() for parameter in old]
        sharded = utils.fsdp2_prepare_model(accelerator, model)
        assert utils.model_has_dtensor(sharded)
        del addresses, optimizer
        full = make(7).state_dict() if accelerator.is_main_process else {}
        utils.fsdp2_load_full_state_dict(accelerator, sharded, full)
        sharded(torch.ones(2, 3)).sum().backward()
        return chosen, whole(sharded)

    expected = [p.tolist() for p in make(7).parameters()]
    assert ranks2(body) == [(["0", "1.0", "2"], expected)] * 2


def test_parameters_of_an_optimizer_are_switched_by_their_address():
    old, new = make(1), make(2)
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    mapping = {o.data_ptr(): n for o, n in zip(old.parameters(), new.parameters(), strict=True)}
    utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert all(
        a is b for a, b in zip(optimizer.param_groups[0]["params"], new.parameters(), strict=True)
    )
    with pytest.raises(KeyError):
        utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)
