"""Models and loops that are easily sharded wrongly: each trains as one process, or is refused."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Subset
from tqdm import tqdm

from callbacks import ModelCheckpoint, OnExceptionCheckpoint
from tests.distributed.test_fsdp import Block, X, plugin, whole
from tests.distributed.test_fsdp_promises import (
    DATA,
    Net,
    assert_equal,
    fit,
    loader,
    trainer,
    world,
)
from tests.distributed.test_watchdog import listening
from tests.helpers.ranks import RankError, RankPool
from trainer import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    ParallelismConfig,
    Trainer,
    TrainModule,
)
from trainer.state import AcceleratorState, PartialState

# -- memory ------------------------------------------------------------------------------------


def test_the_whole_parameters_are_freed_even_if_somebody_holds_them(ranks2):
    def held() -> int:
        model = Net()
        before = list(model.parameters())
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(model, optimizer)
        return sum(parameter.untyped_storage().nbytes() for parameter in before)

    assert ranks2(held) == [0, 0]


# -- optimizers and their parameters -----------------------------------------------------------


def own_loop(order: str) -> dict[str, Tensor]:
    """Train three steps; `order` says what is prepared first."""
    sharded = {"fsdp_plugin": plugin()} if world() > 1 else {}
    accelerator = Accelerator(cpu=True, **sharded)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if order == "with state":
        (model(X).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        optimizer, model = accelerator.prepare(optimizer, model)
    for x in torch.split(X[:24], 8):
        part = x.chunk(world())[accelerator.process_index]
        accelerator.backward(model(part).square().mean())
        with torch.no_grad():
            model(part)  # between backward and the update
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("order", ["together", "optimizer first", "with state"])
def test_an_optimizer_trains_the_shards_whenever_it_was_prepared(ranks2, order):
    assert_equal(ranks2, lambda name: own_loop(order))


def test_parameters_from_before_the_sharding_are_clipped(ranks2):
    def norms() -> Any:
        sharded = {"fsdp_plugin": plugin()} if world() > 1 else {}
        accelerator = Accelerator(cpu=True, **sharded)
        model = Net()
        parameters = list(model.parameters())
        model = accelerator.prepare(model)
        accelerator.backward(model(X).square().mean())
        found = [accelerator.clip_grad_norm_(parameters, 0.5, order) for order in (2, 1, "inf")]
        accelerator.clip_grad_value_(parameters, 1e-3)
        gradients = {n: p.grad for n, p in model.named_parameters()}
        return found, {n: g.full_tensor() if world() > 1 else g for n, g in gradients.items()}

    assert_equal(ranks2, lambda name: norms())


class Peeks(Net):
    """Runs a forward pass between backward and the update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self(X[:4])


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_forward_pass_before_the_update_leaves_no_old_weights(ranks2, sharding, tmp_path):
    def run(name: str) -> Any:
        given = {"fsdp_plugin": plugin(sharding_strategy=sharding)} if world() > 1 else {}
        return fit(tmp_path / name, Peeks, **given)

    assert_equal(ranks2, run)


class Unused(Net):
    """A layer in a block, and a whole block, that no loss uses; decay would change them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].unused = nn.Linear(16, 16)
        self.spare = Block()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


def test_parameters_that_are_never_used_stay_as_they_are(ranks2, tmp_path):
    def run(name: str) -> Any:
        own, model = trainer(tmp_path / name, max_grad_norm=0.5), Unused()
        own.fit(model, loader())
        known = own.optimizers[0].state
        return whole(model), {n: p in known for n, p in model.named_parameters()}

    expected = assert_equal(ranks2, run, 1e-4)
    assert not expected[1]["blocks.0.unused.weight"]
    assert torch.equal(expected[0]["spare.first.weight"], whole(Unused())["spare.first.weight"])


class Choices(nn.Module):
    """Layers and units of which each forward pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.always, self.unit = Block(), Block()
        self.heads = nn.ModuleDict({name: nn.Linear(16, 1) for name in ("a", "b")})

    def forward(self, x: Tensor, used: str) -> Tensor:
        x = self.always(self.first(x))
        x = self.unit(x) if "unit" in used else x
        return sum(
            (self.heads[name](x) for name in ("a", "b") if name in used.split()),
            x.mean(1, keepdim=True),
        )


# For each micro-batch what the two processes use of these.
USES: dict[str, list[tuple[str, str]]] = {
    "alternating heads": [("a", "a"), ("b", "b")] * 3,
    "a unit that is skipped": [("a", "a"), ("a unit", "a unit"), ("a", "a"), ("", "")] * 2,
    "only at first": [("a b unit", "a b unit"), *[("a", "a")] * 5],
    "on one process alone": [("a", "b"), ("a", "a"), ("", "b"), ("a b", "")] * 2,
}


def loop_of(uses: list[tuple[str, str]], kind: str, accumulation: int, **options: Any) -> Any:
    """Weights, and the names that have a gradient at each update, of the same loop in three ways.

    Args:
        uses: See `USES`.
        kind: ``"ours"``, ``"fully_shard"`` or ``"one process"``, on the data of both.
        accumulation: Micro-batches of an update.
        **options: Of the `Accelerator`.
    """
    one, model = kind == "one process", Choices()
    accelerator: Any = None
    if kind == "ours":
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin(),
            gradient_accumulation_steps=accumulation,
            **options,
        )
    elif not one:
        for part in (model.always, model.unit, model):
            fully_shard(part)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    present = []
    for number, used in enumerate(uses):
        ends = (number + 1) % accumulation == 0
        xs = X[8 * (number % 5) :][:8].split(4)
        losses = [model(xs[r], used[r]).square().mean() for r in ([0, 1] if one else [rank()])]
        if accelerator is not None:
            with accelerator.accumulate(model):
                accelerator.backward(losses[0])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
        else:
            if not one:
                model.set_requires_gradient_sync(ends)
            (sum(losses) / len(losses) / accumulation).backward()
            if ends:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if ends:
            present.append([name for name, p in model.named_parameters() if p.grad is not None])
        if ends or accelerator is not None:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model), present


def rank() -> int:
    return dist.get_rank()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("uses", USES)
def test_an_own_loop_leaves_what_no_process_used_in_an_update(ranks2, uses, accumulation):
    """Weight decay and momentum would move parameters whose gradient is zero instead of None."""
    weights, present = loop_of(USES[uses], "one process", accumulation)
    for found, names in ranks2(lambda: loop_of(USES[uses], "ours", accumulation)):
        assert names == present
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("uses", ["alternating heads", "a unit that is skipped"])
def test_an_own_loop_is_that_of_plain_fully_shard(ranks2, uses):
    expected = ranks2(lambda: loop_of(USES[uses], "fully_shard", 2))
    for (weights, present), (found, names) in zip(
        expected, ranks2(lambda: loop_of(USES[uses], "ours", 2)), strict=True
    ):
        assert names == present
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_leaves_what_no_process_used(ranks2, uses, precision):
    """Where torch accumulates in float32 what it computes in 16 bits; fp16 has a scaler."""
    weights, present = loop_of(USES[uses], "one process", 2)
    for found, names in ranks2(lambda: loop_of(USES[uses], "ours", 2, mixed_precision=precision)):
        assert names == present
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0.05)


class TwoLosses(Net):
    """Two backward passes in a step: the second leaves out a head that the first one used."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.choices = Choices()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for used in ("a", "") if batch_idx % 2 else ("b unit", "b"):
            self.manual_backward(self.choices(batch[0], used).square().mean())
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.choices.parameters(), lr=1e-2, weight_decay=0.5)


def test_manual_optimisation_leaves_what_no_process_used(ranks2, tmp_path):
    def run(name: str) -> Any:
        own, model = trainer(tmp_path / name), TwoLosses()
        own.fit(model, loader(Subset(DATA, range(40))))
        return whole(model.choices), {}

    assert_equal(ranks2, run, 1e-5)


class Views(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(0).squeeze(0)


def test_a_module_may_return_a_view(ranks2, tmp_path):
    """Torch warns of it, as of a loss of its hooks; a warning is an error here."""
    assert_equal(ranks2, lambda name: fit(tmp_path / name, Views))


class Thaws(Net):
    """Unfreezes a block within an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[1].requires_grad_(batch_idx >= 2)


def test_parameters_that_are_unfrozen_within_an_epoch_are_trained(ranks2, tmp_path):
    weights, *_ = assert_equal(ranks2, lambda name: fit(tmp_path / name, Thaws))
    assert not torch.equal(weights["blocks.1.first.weight"], whole(Net())["blocks.1.first.weight"])


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_normalisation_keeps_float32_weights_in_mixed_precision(ranks2, precision, tmp_path):
    """Each process normalises its own batch, as with DDP."""

    def run(**options: Any) -> Any:
        model, seen = Normed(), set()
        model.first[1].register_forward_pre_hook(lambda norm, _: seen.add(norm.weight.dtype))
        own = trainer(tmp_path / str(options), mixed_precision=precision, max_epochs=1, **options)
        own.fit(model, loader())
        return whole(model), seen

    expected = ranks2(lambda: run(fsdp_plugin=None))
    for (found, seen), (weights, _) in zip(ranks2(run), expected, strict=True):
        assert seen == {torch.float32}
        for name in ("first.1.weight", "blocks.1.first.weight"):
            torch.testing.assert_close(found[name], weights[name], rtol=0, atol=3e-2)


class Adds(Net):
    """Adds a layer when the model is sharded already."""

    def on_train_epoch_start(self) -> None:
        self.added = nn.Linear(2, 2)
        self.optimizers().add_param_group({"params": list(self.added.parameters())})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.added(self(batch[0])), batch[1])


def test_parameters_added_after_the_sharding_are_refused(ranks2, tmp_path):
    with pytest.raises(RankError, match=r"added.weight, added.bias got gradients that FSDP does"):
        ranks2(lambda: trainer(tmp_path).fit(Adds(), loader()))


class TwoDtypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).double())


def test_a_unit_with_parameters_of_two_dtypes_is_refused(ranks2, tmp_path):
    message = (
        r"unit TwoDtypes are torch.float32 \(first.weight\) and torch.float64 \(norm.weight\)"
        r".*mixed_precision='bf16'.*freeze.*auto_wrap_policy"
    )
    with pytest.raises(RankError, match=message):
        ranks2(lambda: fit(tmp_path / "refused", TwoDtypes))
    with pytest.raises(RankError, match=message):
        ranks2(lambda: Accelerator(cpu=True, fsdp_plugin=plugin()).prepare(TwoDtypes()))


class FrozenDtype(TwoDtypes):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)


def test_frozen_parameters_of_a_unit_may_have_another_dtype(ranks2, tmp_path):
    assert_equal(ranks2, lambda name: fit(tmp_path / name, FrozenDtype))


def test_ignored_parameters_that_are_unfrozen_later_are_refused(ranks2):
    def run() -> None:
        model = Net()
        model.last.requires_grad_(False)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(ignored_modules=[model.last]))
        model = accelerator.prepare(model)
        model.last.requires_grad_(True)
        accelerator.backward(model(X).square().mean())

    with pytest.raises(RankError, match="Some parameters of ignored_modules got gradients"):
        ranks2(run)


# -- the meta device ---------------------------------------------------------------------------


class Tied(Net):
    """Tied weights, a buffer that the state dict leaves out, and a frozen, ignored part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].second.weight = self.blocks[2].first.weight
        self.out = nn.Linear(16, 8)
        self.out.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.back = nn.Linear(16, 8, bias=False)
        self.back.weight = self.out.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("scale", torch.full((8,), 0.7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.first(x))
        return (
            self.last(self.first((self.out(hidden) + self.back(hidden)) * self.scale))
            + (self.frozen(x)[:, :2])
        )


class OnMeta(Tied):
    """Rank 1 has no weights of its own."""

    def __init__(self) -> None:
        with torch.device("meta" if world() > 1 and dist.get_rank() else "cpu"):
            super().__init__()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("module", [Tied, OnMeta])
def test_ties_and_buffers_survive_the_sharding(ranks2, module, offload, tmp_path):
    def run(name: str) -> Any:
        given = {"fsdp_plugin": plugin(ignored_modules="frozen", cpu_offload=offload)}
        options = given if world() > 1 else {}
        own, model = trainer(tmp_path / name, **options), module()
        own.fit(model, loader(), loader())
        ties = [model.out.weight is model.back.weight]
        ties.append(model.blocks[2].first.weight is model.blocks[2].second.weight)
        return whole(model), model.scale, ties

    expected = assert_equal(ranks2, run)
    assert expected[2] == [True, True]


def test_tied_weights_on_meta_follow_into_an_optimizer_that_was_made_before(ranks2):
    def run() -> Any:
        with torch.device("meta" if world() > 1 and dist.get_rank() else "cpu"):
            torch.manual_seed(0)
            model = Tied()
        sharded = {"fsdp_plugin": plugin(ignored_modules="frozen")} if world() > 1 else {}
        accelerator = Accelerator(cpu=True, **sharded)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            accelerator.backward(model(X).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    assert_equal(ranks2, lambda name: run())


def test_only_the_first_process_reads_pretrained_weights(tmp_path):
    pytest.importorskip("transformers")

    def load() -> Any:
        import transformers
        from transformers.integrations import is_fsdp_enabled

        from trainer.environment import patch_environment

        tqdm.monitor_interval = 0  # its thread would never end
        config = transformers.LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        expected = transformers.LlamaForCausalLM(config)
        tokens = torch.arange(16).reshape(2, 8)
        with patch_environment(ACCELERATE_USE_FSDP="false", FSDP_CPU_RAM_EFFICIENT_LOADING="0"):
            given = plugin(cpu_ram_efficient_loading=True, transformer_cls_names_to_wrap=None)
            accelerator = Accelerator(cpu=True, fsdp_plugin=given)
            told = is_fsdp_enabled()
        if accelerator.is_main_process:
            expected.save_pretrained(tmp_path / "model")
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        else:
            with torch.device("meta"):
                model = transformers.LlamaForCausalLM(config)
        found = accelerator.prepare(model)(tokens).logits
        return told, found.detach(), expected(tokens).logits.detach()

    pool = RankPool(2)  # of its own, as transformers reads the variables when it is imported
    try:
        outcomes = pool(load, timeout=240)  # importing transformers and DeepSpeed takes long
    finally:
        pool.close()
    for told, found, expected in outcomes:
        assert told
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# -- units -------------------------------------------------------------------------------------


class AcrossUnits(Net):
    """A weight of the first block is the last block's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].first.weight = self.blocks[0].first.weight


def test_units_that_share_a_parameter_are_gathered_together(ranks2, tmp_path):
    def run(name: str) -> Any:
        own, model = trainer(tmp_path / name), AcrossUnits()
        own.fit(model, loader(), loader())
        tied = model.blocks[2].first.weight is model.blocks[0].first.weight
        units = [n for n, part in model.named_modules() if hasattr(part, "unshard")]
        return (whole(model), tied), units

    expected, _ = run("one")
    for found, units in ranks2(lambda: run("shards")):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert units == ["", "blocks.1"]


class SharedRoots(TrainModule):
    """Two children with forward passes of their own share an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.makes, self.judges = nn.Linear(8, 8), nn.Linear(8, 8)
        self.judges.weight = self.makes.weight

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_parameters_of_two_models_that_gather_separately_are_refused(ranks2, tmp_path):
    with pytest.raises(RankError, match="'weight' is shared by Linear and Linear, which gather"):
        ranks2(lambda: trainer(tmp_path).fit(SharedRoots(), loader()))

    def two_models() -> None:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(auto_wrap_policy="no_wrap"))
        module = SharedRoots()
        accelerator.prepare(module.makes, module.judges)

    with pytest.raises(RankError, match="Linear and a model that was prepared before"):
        ranks2(two_models)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activation_checkpointing": True, "auto_wrap_policy": "no_wrap"},
            "activation_checkpointing .* the plugin creates no units in Net",
        ),
        (
            {"transformer_cls_names_to_wrap": ["Block", "Blok"]},
            "A class of Net in transformer_cls_names_to_wrap is .Blok.*Did you mean .Block",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(ranks2, options, message, tmp_path):
    with pytest.raises(RankError, match=message):
        ranks2(lambda: fit(tmp_path, fsdp_plugin=plugin(**options)))


def test_a_communication_hook_of_ddp_is_refused(ranks2, tmp_path):
    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    with pytest.raises(RankError, match=r"comm_hook='fp16'.* which sharded models do not have"):
        ranks2(lambda: fit(tmp_path, kwargs_handlers=[hook]))


@pytest.mark.parametrize(
    "callback", [OnExceptionCheckpoint(), ModelCheckpoint(on_exception=True)], ids=type
)
def test_callbacks_that_save_one_process_alone_are_refused(ranks2, callback, tmp_path):
    with pytest.raises(RankError, match=f"{type(callback).__name__} cannot be used with a sharded"):
        ranks2(lambda: fit(tmp_path, callbacks=[callback]))


def test_uneven_inputs_of_a_sharded_model_are_refused(ranks2):
    def join(even_batches: bool | None) -> str:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
        model = accelerator.prepare(Net())
        try:
            with accelerator.join_uneven_inputs([model], even_batches=even_batches):
                return "joined"
        except ValueError as error:
            return str(error)

    assert "Net that is sharded, whose forward pass needs every process" in ranks2(join, False)[0]
    assert ranks2(join, None) == ["joined", "joined"]


# -- accumulation ------------------------------------------------------------------------------


def test_each_micro_batch_may_be_reduced(ranks2, tmp_path):
    """Then a process never holds whole gradients."""
    expected = fit(tmp_path / "one", gradient_accumulation_steps=4, max_grad_norm=0.5)

    def run() -> Any:
        window = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
        ready = Accelerator(cpu=True, fsdp_plugin=plugin(), gradient_accumulation_plugin=window)
        own = Trainer(
            accelerator=ready,
            max_epochs=2,
            checkpointing=False,
            log_every=1,
            seed=3,
            progress_bar=False,
            project_dir=tmp_path / "two",
            max_grad_norm=0.5,
        )
        model, reduced = Net(), []
        model.on_train_batch_end = lambda *_: reduced.append(model.last.weight.grad is not None)
        own.fit(model, loader(), loader())
        metrics = {name: float(value) for name, value in own.callback_metrics.items()}
        return (whole(model), metrics), all(reduced)

    for found, reduced in ranks2(run):
        assert reduced
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# -- what a process says of itself -------------------------------------------------------------


@pytest.mark.parametrize("by", ["plugin", "mesh", "nothing"])
def test_the_state_says_that_models_are_sharded_and_keeps_the_kind_of_device(ranks2, by):
    def told() -> Any:
        given: dict[str, Any] = {}
        if by == "plugin":
            given["fsdp_plugin"] = plugin()
        elif by == "mesh":
            given["parallelism_config"] = ParallelismConfig(dp_shard_size=2)
        accelerator = Accelerator(cpu=True, **given)
        state = accelerator.state
        return [
            accelerator.distributed_type,
            state.distributed_type,
            state.is_fsdp2,
            PartialState().distributed_type,
            AcceleratorState().distributed_type,
            state.parallelism_config is given.get("parallelism_config"),
        ]

    kind = DistributedType.MULTI_CPU if by == "nothing" else DistributedType.FSDP
    expected = [kind, kind, by != "nothing", DistributedType.MULTI_CPU, kind, True]
    assert ranks2(told) == [expected, expected]


# -- processes that run different numbers of units ---------------------------------------------


class SkipsOnRank1(Net):
    def forward(self, x: Tensor) -> Tensor:
        blocks = self.blocks if dist.get_rank() == 0 else self.blocks[:1]
        return self.last(blocks(self.first(x)))


def test_the_watchdog_names_ranks_that_run_different_numbers_of_units(ranks2, tmp_path):
    def hang() -> None:
        def heard() -> None:
            if "No process has made progress" in texts[-1]:
                with suppress(FileExistsError), (tmp_path / "said").open("x") as said:
                    said.write(texts[-1])
                os._exit(3)  # nothing else ends it before the timeout of the backend

        with listening(heard) as texts:
            fit(tmp_path / "run", SkipsOnRank1)

    with pytest.raises(RankError):
        ranks2(hang)
    said = (tmp_path / "said").read_text()
    assert "rank 0 is in fit, sanity check, validation batch 0" in said
    assert "rank 1 is in fit, sanity check, validation batch 0" in said
    assert "in forward" in said
