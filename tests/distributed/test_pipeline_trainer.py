"""Stages of layers in the Trainer, against one process: what the promises' suite does not hold."""

from __future__ import annotations

import random
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from callbacks import EMA, Callback, GradientNormMonitor
from tests.helpers import isolation
from tests.helpers.promises import (
    ENGINES,
    ONE,
    TOLERANCE,
    Net,
    fit,
    loader,
    pipeline,
    plain,
    trainer_and_module,
)
from trainer import Accelerator, ParallelismConfig, Trainer
from trainer.engines.absent import Absent, only_shapes
from trainer.engines.stages import plan_stages
from trainer.enums import DistributedType
from trainer.tree import part_here

CPU = torch.device("cpu")
PIPELINES = [name for name in ENGINES if name.startswith("pp")]


# -- tensors without values ------------------------------------------------------------------------


def test_what_depends_on_an_absent_tensor_is_absent_and_has_its_shape():
    weight = nn.Parameter(Absent(torch.randn(4, 3), CPU))
    layer = nn.Linear(3, 4)
    layer.weight = weight
    found = layer(torch.ones(2, 3))
    assert isinstance(weight, nn.Parameter)
    assert isinstance(found, Absent)
    assert (found.shape, found.dtype, found.device) == ((2, 4), torch.float32, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 3)).dtype == torch.bfloat16
    assert not isinstance(found.new_zeros(3), Absent)  # a mask has values
    assert not isinstance(torch.arange(found.shape[1], device=found.device), Absent)


def test_values_of_an_absent_tensor_are_neither_read_nor_written():
    tensor, plain_tensor = Absent(torch.randn(4), CPU), torch.zeros(4)
    for read in (lambda: tensor.sum().item(), lambda: bool(tensor.any()), lambda: float(tensor[0])):
        with pytest.raises(RuntimeError, match="another stage of the pipeline computes"):
            read()
    with pytest.raises(RuntimeError, match="copy_ writes"):
        plain_tensor.copy_(tensor)
    with only_shapes():
        plain_tensor.copy_(tensor)
    assert not plain_tensor.any()


# -- which layers are on which stage ---------------------------------------------------------------


def test_blocks_are_found_and_divided_by_their_parameters():
    found = plan_stages(Net(), None, 2)
    assert found.layers == ["model.blocks.0", "model.blocks.1"]
    assert [list(found.range_of(stage)) for stage in (0, 1)] == [[0], [1]]
    assert found.stages_with("model.embedding") == {0}
    assert found.stages_with("model.last") == {1}
    assert found.stages_with("model") == {0, 1}


@pytest.mark.parametrize(
    ("split", "stages", "message"),
    [
        (["model.block.1"], 2, "model.blocks.1"),
        (["model.blocks.1", "model.last"], 3, "children of one module"),
        (["model.blocks.0"], 2, "not the order of the layers"),
        (None, 3, "no nn.ModuleList or nn.Sequential of at least 3 layers"),
    ],
)
def test_a_split_that_cannot_be_is_an_error_by_name(split, stages, message):
    with pytest.raises(ValueError, match=message):
        plan_stages(Net(), split, stages)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pp_schedule": "zb"}, ValueError, "gpipe"),
        ({"pp_stages_per_rank": 2}, ValueError, "'interleaved'"),
        ({"pp_split": ["a", "b"]}, ValueError, "2 names"),
        ({"cp_size": 2}, NotImplementedError, "cp_size=2"),
    ],
)
def test_unsupported_parallelism_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        ParallelismConfig(pp_size=2, **options)


def test_each_process_knows_its_stage(ranks):
    def look() -> Any:
        config = ParallelismConfig(dp_replicate_size=2, pp_size=2)
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        assert not accelerator.is_fsdp2
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
        assert accelerator.engine.parallel.dp_rank == accelerator.data_parallel_rank
        return accelerator.data_parallel_rank, accelerator.pipeline_parallel_rank

    assert ranks(4)(look) == [(0, 0), (0, 1), (1, 0), (1, 1)]


# -- training --------------------------------------------------------------------------------------


class Tied(Net):
    """The last layer's weight is the embedding's, which the first and the last stage have."""

    def made(self) -> None:
        model: Any = self.model
        model.last.weight = model.embedding.weight


class HeadOutside(Net):
    """What runs before and after the model is not in it."""

    def made(self) -> None:
        self.scale = nn.Parameter(torch.ones(8))
        self.shift = nn.Linear(8, 8)

    def mean(self, batch: Any) -> Tensor:
        kept = self.kept(batch)
        each = self.shift(self.model(batch[0]) * self.scale)
        return (each.square() * kept).sum() / kept.sum()


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", [Tied, HeadOutside])
def test_parameters_shared_by_stages_train_like_one_process(ranks, name, kind, tmp_path):
    case = ENGINES[name]
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    isolation.reset_trainer_state()
    expected = plain(ONE, kind, **options)
    found = ranks(case.processes)(lambda: fit(case, tmp_path, kind, **options))
    trained = {name: found[0].weights[name] for name in expected.weights}
    torch.testing.assert_close(trained, expected.weights, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found[0].gradients, expected.gradients, rtol=0, atol=TOLERANCE)
    assert found[0].metrics == pytest.approx(expected.metrics, abs=TOLERANCE)
    for other in found[1:]:
        for shared in other.copies.keys() & found[0].copies.keys():
            torch.testing.assert_close(
                other.copies[shared], found[0].copies[shared], rtol=0, atol=0
            )


# -- what a step does besides ----------------------------------------------------------------------


class Noise(Net):
    """Draws before the model, on all stages, and after it, on the last one."""

    dropout = 0.1

    def made(self) -> None:
        self.own = torch.Generator().manual_seed(3)
        self.drawn: list[float] = []

    def on_train_start(self) -> None:
        torch.manual_seed(dist.get_rank())  # the stages would draw other numbers
        self.own.manual_seed(dist.get_rank())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers = torch.rand(1).item(), torch.rand(1, generator=self.own).item(), random.random()
        self.drawn.append(sum(numbers))
        loss = super().training_step(batch, batch_idx)
        return loss + torch.rand(1).item() * torch.rand(1, generator=self.own).item()


def run_of(case: Any, folder: Path, kind: type[Net], **options: Any) -> tuple[Trainer, Net]:
    trainer, module = trainer_and_module(case, folder, kind, **options)
    path = "auto" if options.get("checkpointing") else None
    trainer.fit(module, loader(case), ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_draw_equal_random_numbers_and_a_resumed_run_continues_them(ranks, name, tmp_path):
    case = ENGINES[name]

    def runs() -> Any:
        _, once = run_of(case, tmp_path / "whole", Noise, checkpointing=True)
        run_of(case, tmp_path / "cut", Noise, checkpointing=True, max_epochs=1)
        _, again = run_of(case, tmp_path / "cut", Noise, checkpointing=True)
        held = {n: p for n, p in again.named_parameters() if not isinstance(p, Absent)}
        kept = {name: part_here(once.get_parameter(name)) for name in held}
        same = [torch.equal(part_here(p), kept[name]) for name, p in held.items()]
        return once.drawn, again.drawn, same

    found = ranks(case.processes)(runs)
    each = case.processes // case.shares
    for number in range(case.shares):  # the stages of one replica
        drawn = {tuple(once) for once, *_ in found[each * number : each * (number + 1)]}
        if name != "pp, interleaved":  # where a process runs several stages
            assert len(drawn) == 1
    assert len({tuple(set(once)) for once, *_ in found}) >= case.shares
    for once, again, same in found:
        assert again == once[-len(again) :]
        assert all(same)


class Extra(nn.Module):
    """A layer with state that is no tensor, and buffers that it replaces by others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(0), persistent=False)  # it grows
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
            self.count = self.count + 1
        return x + self.linear(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class WithExtra(Net):
    """Both stages have such a layer."""

    def made(self) -> None:
        model: Any = self.model
        model.blocks = nn.Sequential(Extra(), *model.blocks, Extra())


@pytest.mark.parametrize("name", ["pp", "pp, gpipe, dp"])
def test_state_of_all_stages_is_saved_and_loads_on_one_process(ranks, name, tmp_path):
    case = ENGINES[name]

    def run() -> dict[str, Any]:
        _, module = run_of(case, tmp_path, WithExtra, checkpointing=True)
        blocks: Any = module.model.blocks
        ends = {0: blocks[0], 3: blocks[3]}
        return {
            index: (each.calls, each.seen.tolist(), each.count.item())
            for index, each in ends.items()
            if not isinstance(each.seen, Absent)
        }

    found = ranks(case.processes)(run)
    assert [list(each) for each in found] == [[0], [3]] * case.shares
    first, last = found[0][0], found[1][3]
    for of_rank in found[2:]:  # the other replica has the buffers of the first
        for index, (_, seen, count) in of_rank.items():
            assert (seen, count) == (first, last)[index // 3][1:]
    (step,) = (tmp_path / "checkpoints").glob("step-*")
    isolation.reset_trainer_state()
    trainer, module = trainer_and_module(ONE, tmp_path / "one", WithExtra)
    trainer.validate(module, loader(ONE), ckpt_path=step)
    blocks: Any = module.model.blocks
    assert (blocks[0].calls, blocks[3].calls) == (first[0], last[0])
    assert (blocks[0].count.item(), blocks[3].count.item()) == (first[2], last[2])


class WithoutItems(Net):
    """A whole window has no items."""

    def kept(self, batch: Any) -> Tensor:
        return super().kept(batch) & ((batch[1] < 16) | (batch[1] >= 32))[:, None]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_window_without_items_updates_with_zero_gradients(ranks, name, tmp_path):
    case = ENGINES[name]

    def run(case: Any) -> Any:
        isolation.reset_trainer_state()
        outcome = fit(case, tmp_path / name, WithoutItems, gradient_accumulation_steps=2)
        return outcome.weights, outcome.metrics, outcome.counters

    weights, metrics, counters = run(ONE)
    found = ranks(case.processes)(lambda: run(case))
    torch.testing.assert_close(found[0][0], weights, rtol=0, atol=TOLERANCE)
    for _, metrics_there, counters_there in found:
        assert metrics_there == pytest.approx(metrics, abs=TOLERANCE)
        assert counters_there["items_seen"] == counters["items_seen"]
        assert counters_there["global_step"] == counters["global_step"]


# -- errors ----------------------------------------------------------------------------------------


class Fails(Net):
    """Fails on some ranks, where `place` says."""

    place, ranks, at = "", (0,), 0

    def fail(self, place: str) -> None:
        if self.place == place and dist.get_rank() in self.ranks and self.batch_idx >= self.at:
            raise KeyError("the user's own error")

    def made(self) -> None:
        self.model.register_forward_pre_hook(lambda *_: self.fail("model"))
        self.model.blocks[1].norm.register_forward_hook(lambda *_: self.fail("layer"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch_idx = batch_idx
        self.fail("before")
        loss = super().training_step(batch, batch_idx)
        self.fail("after")
        return loss


@pytest.mark.parametrize(
    ("place", "ranks_of"), [("before", (0,)), ("before", (0, 1)), ("layer", (1,)), ("after", (1,))]
)
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_in_a_step_is_shown_where_it_was_raised_and_stops_all_ranks(
    ranks2, place, ranks_of, at, tmp_path
):
    class Kind(Fails):
        pass

    Kind.place, Kind.ranks, Kind.at = place, ranks_of, at

    def run() -> str:
        with pytest.raises((KeyError, RuntimeError)) as caught:
            run_of(ENGINES["pp"], tmp_path, Kind)
        shown = "".join(traceback.format_exception(caught.value))
        assert isinstance(caught.value, KeyError) is (dist.get_rank() in ranks_of)
        return shown

    for rank, shown in enumerate(ranks2(run)):
        if rank in ranks_of:
            assert 'raise KeyError("the user\'s own error")' in shown
            assert "in training_step" in shown
        else:
            assert f"Rank {ranks_of[0]} failed while the others waited for it: KeyError" in shown


# -- activation checkpointing ----------------------------------------------------------------------


class Checkpointed(Net):
    """Activations of each block are computed again in backward."""

    dropout, reentrant = 0.0, False

    def made(self) -> None:
        model: Any = self.model
        model.blocks = Recomputed(model.blocks, self.reentrant)


class Recomputed(nn.Module):
    def __init__(self, blocks: Any, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.2)) for block in blocks)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class NotCheckpointed(Checkpointed):
    def made(self) -> None:
        super().made()
        self.model.blocks.forward = self.plainly  # type: ignore[union-attr]

    def plainly(self, x: Tensor) -> Tensor:
        blocks: Any = self.model.blocks
        for layer in blocks.layers:
            x = layer(x)
        return x


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("name", ["pp", "pp, gpipe, dp"])
def test_activations_that_are_computed_again_give_the_same_run(ranks, name, tmp_path):
    case = ENGINES[name]
    pool = ranks(case.processes)
    kept = pool(lambda: fit(case, tmp_path, NotCheckpointed))
    found = pool(lambda: fit(case, tmp_path, Checkpointed))
    torch.testing.assert_close(found[0].weights, kept[0].weights, rtol=0, atol=0)
    assert found[0].metrics == kept[0].metrics


def test_reentrant_checkpointing_is_refused_by_name(ranks2, tmp_path):
    def run() -> str:
        with pytest.raises(RuntimeError) as caught:
            run_of(ENGINES["pp"], tmp_path, Reentrant)
        return str(caught.value)

    assert all("use_reentrant=False" in message for message in ranks2(run))


# -- models of transformers ------------------------------------------------------------------------


class Language(Net):
    """A model of transformers, whose blocks are found."""

    recomputes = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(0)
        self.model = self.language()
        if self.recomputes:
            enable = getattr(
                self.model,
                "activation_checkpointing_enable",
                getattr(self.model, "gradient_checkpointing_enable", None),
            )
            enable({"use_reentrant": False})

    def mean(self, batch: Any) -> Tensor:
        logits = self.model(input_ids=batch[0][:, :-1]).logits
        each = nn.functional.cross_entropy(logits.mT, batch[0][:, 1:], reduction="none")
        return (each * self.kept(batch)).sum() / self.kept(batch).sum()


class Gpt2(Language):
    """Its head is its embedding."""

    def language(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
        nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **nothing, **ids))


class Llama(Language):
    """It computes positions for all layers, and recomputes their activations."""

    recomputes = True

    def language(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 32}
        ids = {"vocab_size": 32, "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
        return LlamaForCausalLM(LlamaConfig(**sizes, **ids))


@pytest.mark.parametrize("kind", [Gpt2, Llama])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_transformers_models_train_like_one_process(ranks2, kind, schedule, tmp_path):
    pytest.importorskip("transformers")
    isolation.reset_trainer_state()
    expected = plain(ONE, kind, max_grad_norm=0.5)
    case = pipeline(schedule)
    found = ranks2(lambda: fit(case, tmp_path, kind, max_grad_norm=0.5))
    trained = {name: found[0].weights[name] for name in expected.weights}
    torch.testing.assert_close(trained, expected.weights, rtol=0, atol=1e-5)
    assert found[0].metrics == pytest.approx(expected.metrics, abs=1e-5)


# -- memory ----------------------------------------------------------------------------------------


def test_a_process_holds_the_weights_and_state_of_its_stage(ranks2, tmp_path):
    class Held(Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            parameters = [p for p in module.parameters() if not isinstance(p, Absent)]
            self.numbers = sum(p.numel() for p in parameters)
            optimizer = trainer.optimizers[0].optimizer
            self.states = sum(s["momentum_buffer"].numel() for s in optimizer.state.values())

    def run() -> tuple[int, int]:
        held = Held()
        run_of(ENGINES["pp"], tmp_path, Net, callbacks=[held])
        return held.numbers, held.states

    block = 2 * 16 + 16 * 32 + 32 + 32 * 16 + 16
    first, last = 32 * 16 + block, block + 16 * 32 + 32
    assert ranks2(run) == [(first, first), (last, last)]


# -- what cannot be --------------------------------------------------------------------------------


class LeavesOut(nn.Module):
    """The first block never runs."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](x)  # type: ignore[no-any-return]


class TakesBoth(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return self.inner(x) + first


class LongSkip(nn.Module):
    """The last block needs what the first one gets."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([blocks[0], TakesBoth(blocks[1])])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x), x)


class NeedsTheEmbedding(Net):
    def made(self) -> None:
        model: Any = self.model
        model.blocks = LongSkip(model.blocks)


class WithoutFirst(Net):
    def made(self) -> None:
        model: Any = self.model
        model.blocks = LeavesOut(model.blocks)


class Between(nn.Module):
    """Code between the blocks, which belongs to none of them."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


class HasCodeBetween(Net):
    def made(self) -> None:
        model: Any = self.model
        model.blocks = Between(model.blocks)


class OtherData(Net):
    def on_train_epoch_start(self) -> None:
        self.shift = dist.get_rank()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.training:
            batch = [value + self.shift if torch.is_tensor(value) else value for value in batch]
        return batch


class CallsTwice(Net):
    def mean(self, batch: Any) -> Tensor:
        return super().mean(batch) + super().mean(batch)


class ReadsAValue(Net):
    def made(self) -> None:
        self.model.last.register_forward_pre_hook(lambda _, args: float(args[0].sum()))


class ReturnsNone(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class SparseNet(Net):
    def made(self) -> None:
        self.model.embedding.sparse = True  # type: ignore[union-attr]


class Prodigy(torch.optim.SGD):
    """Its name says that it looks at all parameters."""


class AllTogether(Net):
    def configure_optimizers(self) -> Any:
        return Prodigy(self.parameters(), lr=0.1)


class OwnStep(Net):
    def optimizer_step(self, *_: Any, **__: Any) -> None:
        pass


class KeepsParameters(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": {name: p.detach() for name, p in self.module.named_parameters()}}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.module = module


REFUSED: dict[str, tuple[type[Net], dict[str, Any], str]] = {
    "a skip": (NeedsTheEmbedding, {}, "needs a value from another stage of the pipeline"),
    "layers left out": (WithoutFirst, {}, "does not get the output of model.blocks.layers.0"),
    "code between stages": (HasCodeBetween, {}, "no stage would run the code between them"),
    "other data": (
        OtherData,
        {},
        "The batch of process 0 of the pipeline differs from that of the last",
    ),
    "two calls": (CallsTwice, {}, "call the model once"),
    "a value": (ReadsAValue, {}, "A value was read that another stage of the pipeline computes"),
    "no loss": (ReturnsNone, {}, "training_step returned None"),
    "sparse gradients": (SparseNet, {}, "sparse gradients in model.embedding"),
    "an optimizer of all parameters": (AllTogether, {}, "Prodigy cannot update the layers of one"),
    "its own step": (OwnStep, {}, "OwnStep overrides optimizer_step, but a pipeline"),
    "fp16": (Net, {"mixed_precision": "fp16"}, "does not support mixed_precision='fp16'"),
    "averages": (Net, {"callbacks": [EMA()]}, "EMA replaces the trained weights.*a pipeline keeps"),
    "gradient norms": (
        Net,
        {"callbacks": [GradientNormMonitor()]},
        "GradientNormMonitor reads.*of a pipeline have different layers",
    ),
    "saved parameters": (
        Net,
        {"callbacks": [KeepsParameters()], "checkpointing": True},
        r"\['kept'\]\['model.* cannot be saved: it is a Absent",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_unsupported_features_are_refused_by_name(ranks2, why, tmp_path):
    kind, options, message = REFUSED[why]

    def run() -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each has its own class
            run_of(ENGINES["pp"], tmp_path, kind, **options)
        return str(caught.value)

    messages = ranks2(run)
    assert any(re.search(message, each) for each in messages), messages
