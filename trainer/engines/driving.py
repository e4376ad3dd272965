"""What engines have in common whose library makes the updates: DeepSpeed's and megatron-core's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.distributed.step_sync import StepStats, StepSync
from trainer.distributed.transport import sum_numbers
from trainer.engines.base import EngineOptions
from trainer.engines.single import SingleDevice
from trainer.names import bare_names
from trainer.optim.lomo import is_lomo
from trainer.optim.schedule_free import is_schedule_free

# Parts of the names of optimizers that look at norms, rows or columns of whole tensors, or at all
# parameters together.
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


class DrivesOptimizer(SingleDevice):
    """An engine that has one model and makes the updates of its optimizer.

    Attributes:
        library: What makes them, for errors.
        argument: What asks for the library, for errors.
    """

    gathers_state = True
    library: str
    argument: str

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._owner: nn.Module | None = None  # the user's module, which has the model
        self._client: Optimizer | None = None  # the user's
        self._trains: set[int] = set()  # the ids of its trained parameters
        self._scheduled = False  # whether the schedule of the plugin was prepared
        self._undo: list[Callable[[], Any]] = []

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
                f"{type(module).__name__} sets automatic_optimization = False, but the step of "
                f"{self.library} reduces, clips and updates at once: leave out {self.argument}, or "
                "let the Trainer optimise."
            )
        super().start(module, step_sync)

    def _take(self, optimizer: Optimizer) -> None:
        """Take the optimizer of the model.

        Raises:
            ValueError: It needs whole tensors, has parameters that the model has not, or is the
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
                f"{self.library} has one optimizer, a {type(self._client).__name__}, and was given "
                f"another, a {name}: put all parameters into groups of one."
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
                f"{name} has other weights for the evaluation, which it cannot put into the "
                f"parameters, since {self.library} updates copies of them. {instead}"
            )
        own = set(map(id, self._owner.parameters()))
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if unknown := [tuple(each.shape) for each in parameters if id(each) not in own]:
            raise ValueError(
                f"The optimizer has parameters of the shapes {unknown} that "
                f"{type(self._owner).__name__} has not: assign them to an attribute of the model."
            )
        self._client = optimizer
        self._trains = self._trained_now()

    def _trained_now(self) -> set[int]:
        return {id(each) for group in self._groups for each in trained(group["params"])}

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The user's groups that have trained parameters; loading a state replaces them."""
        assert self._client is not None
        return [group for group in self._client.param_groups if trained(group["params"])]

    def _give_options(self, stepped: Optimizer) -> None:
        """Give the present options of the user's groups to the optimizer that is stepped."""
        for own, group in zip(stepped.param_groups, self._groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})

    def sync_stats(self, stats: StepStats) -> float | Tensor:
        """All-reduce the step stats of a window."""
        total = self.step_sync.sync_vector(stats)
        sum_numbers(total)
        return self.step_sync.count(total)

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
            f"{self.library} has taken the model and its optimizer: decide what is trained in "
            "configure_model or configure_optimizers, or before prepare."
        )

    def begin_epoch(self) -> None:
        """See `check_unknown_parameters`."""
        self.check_unknown_parameters()


def trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return those that require gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]
