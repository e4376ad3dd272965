"""The common base of the DeepSpeed and megatron-core engines, where the library steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.configuration.dummy_optimizers import is_deepspeed_schedule
from trainer.distributed.step_sync import StepStats, StepSync
from trainer.engines.base import EngineOptions, Weights, gathered_on_first
from trainer.engines.single import SingleDevice
from trainer.enums import DistributedType
from trainer.names import bare_names, unwrapped
from trainer.optim.lomo import is_lomo
from trainer.optim.schedule_free import is_schedule_free

# Parts of the names of optimizers that need norms, rows or columns of whole tensors, or all
# parameters at once.
_NEED_WHOLE_TENSORS = (
    "adafactor",
    "adamp",
    "came",
    "dadapt",
    "galore",
    "lamb",
    "lars",
    "lbfgs",
    "muon",
    "novograd",
    "prodigy",
    "sgdp",
    "shampoo",
    "soap",
    "sparseadam",
)


class Prepared(nn.Module):
    """The prepared module that a custom loop calls; its engine runs the user's module.

    Args:
        module: The module.
        run: Called with the arguments.
    """

    wrapped_child = "module"  # see `trainer.names.wrapped_child`

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        vars(self)["_run"] = run  # not a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return vars(self)["_run"](*args, **kwargs)


class DrivesOptimizer(SingleDevice):
    """An engine that has one model and makes the updates of its optimizer.

    Attributes:
        library: The library's name, for errors.
        argument: The argument that selects the library, for errors.
        dummy_scheduler: The placeholder class for the plugin's schedule.
        plugin: The settings of the library.
        distributed_type: See `Parallel`.
        schedules: See `OptimizerDriver`.
    """

    library: str
    argument: str
    dummy_scheduler: type[Any]
    plugin: Any
    distributed_type: DistributedType

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        if problem := self._unsupported(options):
            raise NotImplementedError(f"{self.argument} does not support {problem}.")
        self.parallel = replace(
            self.parallel, divides_state=True, distributed_type=self.distributed_type
        )
        self.schedules: Sequence[Any] = ()
        self._pending = False  # whether there are gradients that no update has used
        self._ended = False  # whether those of the window are reduced
        self._owner: nn.Module | None = None  # the user's module, which has the model
        self._client: Optimizer | None = None  # the user's
        self._trains: set[int] = set()  # the ids of its trained parameters
        self._scheduled = False  # whether the schedule of the plugin was prepared
        self._undo: list[Callable[[], Any]] = []

    def _unsupported(self, options: EngineOptions) -> str | None:
        """Return an unsupported option, and what to do instead; None if all are supported."""
        if options.mixed_precision in ("fp16", "fp8"):
            return f"mixed_precision={options.mixed_precision!r}: use 'bf16' or 'no'"
        if options.ddp_kwargs is not None and options.ddp_kwargs.comm_hook != "no":
            return f"comm_hook={options.ddp_kwargs.comm_hook.value!r}: leave it out"
        return None

    def _make_group(self) -> None:
        """Make a process group of one process, which the library needs, if there is none."""
        if not dist.is_initialized():
            kind = "nccl" if self.options.device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__
            dist.init_process_group(kind, store=store, rank=0, world_size=1)

    def start(self, module: nn.Module, step_sync: StepSync | None) -> None:
        """Put the module on the device.

        Raises:
            ValueError: The module is optimised manually.
        """
        if step_sync is not None and not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"{type(module).__name__} sets automatic_optimization = False, but "
                f"{self.library} reduces, clips and updates in one step: leave out "
                f"{self.argument}, or use automatic optimisation."
            )
        super().start(module, step_sync)

    def _check_first(self, module: nn.Module) -> None:
        """Check that there is no other model.

        Raises:
            ValueError: There is one.
        """
        if self._owner is not None:
            raise ValueError(
                f"{self.library} trains one model with its optimizer, and a "
                f"{type(self._owner).__name__} is already prepared: use another Accelerator for "
                f"the {type(module).__name__}. Pass a model that is only evaluated to "
                "prepare_model(model, evaluation_mode=True)."
            )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the plugin's schedule in place of its `dummy_scheduler`.

        In a custom loop, each update advances this schedule, and schedules of DeepSpeed's classes.
        """
        if isinstance(scheduler, self.dummy_scheduler):
            self._scheduled = True
            scheduler = scheduler.make(self.plugin, self._client or scheduler.optimizer)
        elif not is_deepspeed_schedule(scheduler):
            return scheduler
        if not hasattr(self, "step_sync"):  # else the loop of the fit advances it
            self.schedules = [*self.schedules, scheduler]
        return scheduler

    def _step_schedules(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def _take(self, optimizer: Optimizer) -> None:
        """Take the optimizer of the model.

        Raises:
            ValueError: It needs whole tensors, has parameters that are not in the model, or is the
                second one; or there is no model yet.
        """
        name = type(optimizer).__name__
        instead = f"Use AdamW or SGD, or train without {self.argument}."
        if self._owner is None:
            raise ValueError(
                f"{self.library} needs a model before its optimizer: prepare the model first, or "
                "both in one call."
            )
        if self._client is not None:
            raise ValueError(
                f"{self.library} takes one optimizer. It has a {type(self._client).__name__} "
                f"already and got a {name}: use one optimizer with several parameter groups."
            )
        kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
        whole = any(part in kind for part in _NEED_WHOLE_TENSORS for kind in kinds)
        if whole or is_lomo(optimizer):
            raise ValueError(
                f"{name} cannot update the parts of parameters that {self.library} gives it, "
                f"because it needs whole tensors. {instead}"
            )
        if is_schedule_free(optimizer):
            raise ValueError(
                f"{name} uses different weights for evaluation, but cannot write them to the "
                f"parameters, because {self.library} updates copies of them. {instead}"
            )
        of_model = set(map(id, self._owner.parameters()))
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if unknown := [
            tuple(parameter.shape) for parameter in parameters if id(parameter) not in of_model
        ]:
            raise ValueError(
                f"The optimizer has parameters of the shapes {unknown} that "
                f"{type(self._owner).__name__} does not have: assign them to an attribute of the "
                "model."
            )
        self._client = optimizer
        self._trains = self._trained_now()

    def _trained_now(self) -> set[int]:
        return {id(parameter) for group in self._groups for parameter in trained(group["params"])}

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The user's groups that have trained parameters; loading a state replaces them."""
        assert self._client is not None
        return [group for group in self._client.param_groups if trained(group["params"])]

    def _give_options(self, stepped: Optimizer) -> None:
        """Give the present options of the user's groups to the optimizer that is stepped."""
        for of_twin, group in zip(stepped.param_groups, self._groups, strict=True):
            of_twin.update({key: value for key, value in group.items() if key != "params"})

    # -- the window of micro-batches ---------------------------------------------------------------

    # ARG002: an interface
    def begin_micro_batch(self, *, sync: bool, complete: bool = True, source: int = 0) -> None:  # noqa: ARG002
        """Drop gradients of a window whose update was skipped."""
        if self._ended:
            self.optimizer_zero_grad()

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - an interface
        """Do nothing: gradients are reduced at the end of a window, or as the library needs it."""
        return nullcontext()

    def _end_micro_batch(self, stats: StepStats | None) -> float | Tensor:
        """End the window if there are step stats; see `Engine.backward`."""
        if stats is None:
            return 0.0
        self._end_window()
        return self.sync_stats(stats)

    def _end_window(self) -> None:
        """Reduce the gradients of a window; collective, once a window."""
        raise NotImplementedError

    def optimizer_zero_grad(self, optimizer: Optimizer | None = None) -> None:
        """Drop the gradients that no update has used."""
        raise NotImplementedError

    def check_unknown_parameters(self) -> None:
        """Check that the same parameters are trained as when the optimizer was prepared.

        Raises:
            RuntimeError: Some were added, frozen or unfrozen.
        """
        if self._client is None or (now := self._trained_now()) == self._trains:
            return
        assert self._owner is not None
        named = bare_names(self._owner, self._owner.named_parameters())
        changed = [name for name, p in named if (id(p) in now) != (id(p) in self._trains)]
        raise RuntimeError(
            f"{', '.join(changed) or 'Parameters'} were added, frozen or unfrozen after "
            f"{self.library} wrapped the model and its optimizer: choose what is trained in "
            "configure_model or configure_optimizers, or before prepare."
        )

    def begin_epoch(self) -> None:
        """See `check_unknown_parameters`."""
        self.check_unknown_parameters()

    def close(self) -> None:
        """Restore what the engine has replaced in the module."""
        super().close()
        while self._undo:
            self._undo.pop()()


class DrivenWeights(Weights):
    """The weights of a model whose updates a library makes.

    Args:
        engine: The engine on that library.
    """

    def __init__(self, engine: DrivesOptimizer) -> None:
        self._engine = engine

    def parts(self, module: nn.Module, *, to_fill: bool = False) -> dict[str, Any]:
        """Return what this process holds of the weights that the library updates."""
        raise NotImplementedError

    def exported_parts(self, module: nn.Module) -> dict[str, Any]:
        """See `Weights.exported_parts`."""
        return self.parts(module)

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole weights; where they are divided, on the host of rank 0, and {} elsewhere."""
        model = unwrapped(module)
        named = bare_names(model, self.exported_parts(model).items())
        if not self._engine.parallel.divides_state:
            return dict(named)
        return gathered_on_first(named, self._engine.options.rank)

    def reshard(self, module: nn.Module, *, drops_gradients: bool = False) -> None:
        """Check that no gradients are left that only the library holds.

        Raises:
            RuntimeError: There are gradients that no update has used.
        """
        if drops_gradients:
            self._engine.optimizer_zero_grad()
        elif self._engine._pending:
            raise RuntimeError(
                f"{type(module).__name__} has gradients in buffers of {self._engine.library} "
                "that no update has used yet: save after optimizer.step() and "
                "optimizer.zero_grad() at the end of a window, under `if "
                "accelerator.sync_gradients:`."
            )


def trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]
