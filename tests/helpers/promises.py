"""Engines, one model that trains on all of them, and a plain loop that it is compared with.

The data are 44 sequences of 9 tokens, which can be learnt. A global batch is 8 of them, whatever
the number of processes, so that every layout makes the same updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from tests.helpers.averaging_engine import AverageAfterBackward
from tests.helpers.megatron import cuda_on_cpu, gpt
from trainer import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    Trainer,
    TrainModule,
)
from trainer.engines import exchange
from trainer.engines.absent import Absent

FIRST = torch.randint(0, 32, (44, 1), generator=torch.Generator().manual_seed(0))
TOKENS = (FIRST + 3 * torch.arange(9)) % 32
IDS = torch.arange(44)
BATCH = 8
TOLERANCE = 2e-6  # of sums in another order, in float32
MASK = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]  # for a GPT
PLACES = torch.arange(8)


def data(samples: int = 44) -> TensorDataset:
    return TensorDataset(TOKENS[:samples], IDS[:samples])


# -- the engines -----------------------------------------------------------------------------------


@contextmanager
def reduced_by_gloo() -> Iterator[None]:
    """Let DDP reduce all gradients; those of small models are exchanged otherwise."""
    few, exchange._FEW = exchange._FEW, -1
    try:
        yield
    finally:
        exchange._FEW = few


def ddp(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(**options)]}


def fsdp() -> dict[str, Any]:
    wrapped = {"transformer_cls_names_to_wrap": ["Block"], "auto_wrap_policy": None}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**wrapped)}


def zero(stage: int) -> Callable[[], dict[str, Any]]:
    options: dict[str, Any] = {"stage": stage}
    if stage == 3:  # else the parameters of a model so small stay whole
        options["stage3_param_persistence_threshold"] = 0
    config = {"zero_optimization": options}
    return lambda: {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}


@dataclass(frozen=True)
class EngineCase:
    """An engine on several processes.

    Attributes:
        options: Makes the arguments of `Trainer` and `Accelerator` that choose it.
        processes: The number of processes.
        shares: The number of processes with data of their own.
        around: A context for all that runs on its processes.
        is_gpt: Whether the model is one of megatron-core.
        differs: By how much the weights of a resumed loop of one's own may differ: in its first
            update with ``static_graph``, torch's DDP adds in another order.
        has_gradients: Whether `Trainer.gradient` gives them; megatron-core does not.
        refuses: The error of each promise that it cannot keep.
    """

    options: Callable[[], dict[str, Any]]
    processes: int = 2
    shares: int = 2
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    is_gpt: bool = False
    differs: float = 0.0
    has_gradients: bool = True
    refuses: dict[str, str] = field(default_factory=dict)


ONE = EngineCase(dict, processes=1, shares=1)  # one device, whose run others are compared with
GPT_ON_ONE = EngineCase(
    lambda: {"megatron_lm_plugin": MegatronLMPlugin(gradient_clipping=0.0)},
    processes=1,
    shares=1,
    around=cuda_on_cpu,
    is_gpt=True,
    has_gradients=False,
)


def driven(library: str) -> dict[str, str]:
    """The errors of an engine whose library makes the updates."""
    manual = f"automatic_optimization = False, but {library} reduces, clips and updates"
    return {"manual": manual, "unfrozen": "were added, frozen or unfrozen after"}


def pipeline(schedule: str, shares: int = 1, width: int = 1, **options: Any) -> EngineCase:
    """Two stages of `width` processes for each share, and what a schedule makes impossible."""
    given = {"pp_size": 2, "pp_schedule": schedule, "dp_replicate_size": shares, **options}
    refuses = {
        "manual": "automatic_optimization = False, but the schedule of a pipeline runs backward",
        "collectives": "is called in training_step, but the processes of a pipeline",
        "own loop": "a custom loop runs forward and backward",
    }
    return EngineCase(
        lambda: {"parallelism_config": ParallelismConfig(**given)},
        processes=2 * shares * width,
        shares=shares,
        refuses=refuses,
    )


ENGINES: dict[str, EngineCase] = {
    "one device": ONE,
    "ddp": EngineCase(dict),
    "ddp, reduced": EngineCase(ddp(), around=reduced_by_gloo),
    "ddp, static_graph": EngineCase(
        ddp(static_graph=True), around=reduced_by_gloo, differs=TOLERANCE
    ),
    "ddp, find_unused": EngineCase(ddp(find_unused_parameters=True), around=reduced_by_gloo),
    "fsdp": EngineCase(fsdp),
    "hsdp": EngineCase(
        lambda: {
            **fsdp(),
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        },
        processes=4,
        shares=4,
    ),
    "tp": EngineCase(lambda: {"parallelism_config": ParallelismConfig(tp_size=2)}, shares=1),
    "pp": pipeline("1f1b"),
    "pp, gpipe, dp": pipeline("gpipe", shares=2, pp_microbatches=2),
    "pp, interleaved": pipeline(
        "interleaved", pp_split=["model.drop", "model.blocks", "model.last"]
    ),
    "pp, fsdp": pipeline("1f1b", shares=2, dp_replicate_size=1, dp_shard_size=2),
    "pp, tp": pipeline("1f1b", width=2, tp_size=2),
    "zero0": EngineCase(zero(0), refuses=driven("DeepSpeed")),
    "zero1": EngineCase(zero(1), refuses=driven("DeepSpeed")),
    "zero2": EngineCase(zero(2), refuses=driven("DeepSpeed")),
    "zero3": EngineCase(zero(3), refuses=driven("DeepSpeed")),
    "own": EngineCase(lambda: {"engine": AverageAfterBackward}),
    "megatron": EngineCase(
        GPT_ON_ONE.options,
        around=cuda_on_cpu,
        is_gpt=True,
        has_gradients=False,
        refuses=driven("megatron-core"),
    ),
}


# -- the model -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Tokens(nn.Module):
    """Predicts each token from the one before it."""

    tp_plan = {"blocks.*.first": ColwiseParallel(), "blocks.*.second": RowwiseParallel()}

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.drop = nn.Embedding(32, 16), nn.Dropout(dropout)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token but the first; shape [batch, 8]."""
        logits = self.last(self.blocks(self.drop(self.embedding(tokens[:, :-1]))))
        return logits.logsumexp(-1) - logits.gather(-1, tokens[:, 1:, None])[..., 0]


def losses(model: nn.Module, tokens: Tensor, is_gpt: bool) -> Tensor:
    """Return the loss of each token but the first; shape [batch, 8]."""
    if not is_gpt:
        return model(tokens)  # type: ignore[no-any-return]
    given, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model(given, PLACES.expand(len(tokens), -1), MASK, labels=wanted)  # type: ignore[no-any-return]


class Net(TrainModule):
    """The loss is a mean over the tokens above 3."""

    tp_plan = {f"model.{name}": style for name, style in Tokens.tp_plan.items()}
    dropout, precision = 0.0, "no"

    def __init__(self, plugin: MegatronLMPlugin | None = None, is_gpt: bool = False) -> None:
        super().__init__()
        self.plugin, self.is_gpt = plugin, is_gpt
        if not is_gpt:
            self.model: nn.Module = Tokens(self.dropout)
            self.made()

    def configure_model(self) -> None:
        if self.is_gpt and not hasattr(self, "model"):
            arguments = self.plugin.transformer_arguments(self.precision) if self.plugin else {}
            self.model = gpt(arguments, hidden_dropout=self.dropout, attention_dropout=self.dropout)
            self.made()

    def made(self) -> None:
        """Change the model that was made."""

    def epoch_starts(self, epoch: int) -> None:
        """Change it before an epoch."""

    def kept(self, batch: Any) -> Tensor:
        """Return which tokens count."""
        return batch[0][:, 1:] > 3

    def count_items(self, batch: Any) -> Tensor:
        return self.kept(batch).sum()

    def mean(self, batch: Any) -> Tensor:
        kept = self.kept(batch)
        return (losses(self.model, batch[0], self.is_gpt) * kept).sum() / kept.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean(batch)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/loss", self.mean(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.mean(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return losses(self.model, batch[0], self.is_gpt)

    def configure_optimizers(self) -> Any:
        # Not Adam, which inflates the rounding of gradients that are nearly 0.
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


# -- a run -----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a fit made, on one process.

    Attributes:
        weights: The whole weights; on rank 0 alone.
        copies: The same, as this process has them: of a pipeline, those of its stage.
        gradients: Of each update, by name: what `Trainer.gradient` returned.
        rates: The learning rate of each update.
        seen: The epoch and the samples of each batch of this process.
        metrics: `Trainer.callback_metrics`.
        counters: What the Trainer counts.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


class Watch(Callback):
    """Fills an outcome."""

    def __init__(self, *, reads_gradients: bool) -> None:
        self.outcome, self.reads_gradients = Outcome(), reads_gradients

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.outcome.seen.append((trainer.current_epoch, batch[1].tolist()))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.outcome.rates.append(optimizer.param_groups[0]["lr"])
        if self.reads_gradients:
            self.outcome.gradients.append(
                {
                    name: whole(gradient)
                    for name, p in module.named_parameters()
                    if p.requires_grad and (gradient := trainer.gradient(p)) is not None
                }
            )

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        state = trainer.accelerator.get_state_dict(module)
        self.outcome.weights = {n: v.clone() for n, v in state.items() if isinstance(v, Tensor)}
        held = ((n, p) for n, p in module.named_parameters() if not isinstance(p, Absent))
        self.outcome.copies = {name: whole(p) for name, p in held}
        names = "global_step batches_seen samples_seen items_seen skipped_updates"
        self.outcome.counters = {name: getattr(trainer, name) for name in names.split()}


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that may be in parts; collective."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    with gathered([tensor]):
        return tensor.detach().clone()


def gathered(parameters: list[Tensor]) -> AbstractContextManager[None]:
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)  # type: ignore[no-any-return]


def loader(
    case: EngineCase, samples: int = 44, batch: int | None = None, **options: Any
) -> DataLoader[Any]:
    """Return a loader whose batches are as large over all processes."""
    return DataLoader(data(samples), batch or BATCH // case.shares, **options)


def trainer_and_module(
    case: EngineCase, folder: Path, kind: type[Net] = Net, **options: Any
) -> tuple[Trainer, Net]:
    chosen = case.options()
    defaults = {"max_epochs": 2, "checkpointing": False, "log_every": 1, "seed": 3}
    trainer = Trainer(
        cpu=True, progress_bar=False, project_dir=folder, **{**chosen, **defaults, **options}
    )
    module = kind(chosen.get("megatron_lm_plugin"), case.is_gpt)
    module.precision = options.get("mixed_precision", "no")
    return trainer, module


def fit(
    case: EngineCase,
    folder: Path,
    kind: type[Net] = Net,
    samples: int = 44,
    *,
    batch: int | None = None,
    shuffle: bool = False,
    ckpt_path: Any = None,
    reads_gradients: bool = True,
    **options: Any,
) -> Outcome:
    """Train and validate on this process, with its peers."""
    watch = Watch(reads_gradients=reads_gradients and case.has_gradients)
    trainer, module = trainer_and_module(case, folder, kind, callbacks=[watch], **options)
    batches = loader(case, samples, batch, shuffle=shuffle)
    trainer.fit(module, batches, loader(case, samples), ckpt_path=ckpt_path)
    watch.outcome.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return watch.outcome


# -- the reference ---------------------------------------------------------------------------------


def plain(
    case: EngineCase,
    kind: type[Net] = Net,
    samples: int = 44,
    *,
    max_epochs: int = 2,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    without: Iterable[int] = (),
) -> Outcome:
    """Train in a plain loop on whole batches; leave out the updates of these numbers."""
    module, outcome = plain_module(case, kind), Outcome()
    made = module.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    window = BATCH * gradient_accumulation_steps
    for epoch in range(max_epochs):
        module.train()
        module.epoch_starts(epoch)
        total = items = 0.0
        for first in range(0, samples, window):
            batch = data(samples)[first : min(first + window, samples)]
            loss = module.mean(batch)
            optimizer.zero_grad()
            loss.backward()
            count = float(module.count_items(batch))
            total, items = total + loss.item() * count, items + count
            named = module.named_parameters()
            outcome.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
            outcome.rates.append(optimizer.param_groups[0]["lr"])
            if max_grad_value is not None:
                nn.utils.clip_grad_value_(module.parameters(), max_grad_value)
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
            if len(outcome.rates) not in without:
                optimizer.step()
            if isinstance(made, dict):
                made["scheduler"].step()
        outcome.metrics["train/loss"] = total / items
    module.eval()
    with torch.no_grad():
        outcome.metrics["val/loss"] = float(module.mean(data(samples)[:]))
    outcome.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    items = float(module.count_items(data(samples)[:]))
    outcome.counters = {
        "global_step": len(outcome.rates),
        "samples_seen": max_epochs * samples,
        "items_seen": max_epochs * items,
        "skipped_updates": len(list(without)),
    }
    return outcome


def plain_module(case: EngineCase, kind: type[Net] = Net) -> Net:
    """Return the module as one process has it, for a plain loop."""
    if case.is_gpt:
        one_process_of_megatron()
    module = kind(is_gpt=case.is_gpt)
    module.configure_model()
    return module


def one_process_of_megatron() -> None:
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
