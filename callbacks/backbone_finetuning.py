"""Fine-tuning: train with frozen layers, and unfreeze them later with their own learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from callbacks.base import Callback
from trainer.checks import check_counts, check_positive, given
from trainer.names import bare_names

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from trainer import Trainer, TrainModule

Modules = nn.Module | Iterable["Modules"]


def multiplicative(epoch: int) -> float:  # noqa: ARG001 - an interface
    """Return 2: the learning rate doubles each epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """The base of callbacks that freeze and unfreeze parts of a model.

    Override :meth:`freeze_before_training` and :meth:`finetune_function`, and use :meth:`freeze`,
    :meth:`make_trainable` and :meth:`unfreeze_and_add_param_group` in them. Frozen batch
    normalisation uses its running statistics and does not update them. Other modules keep their
    mode, so dropout between frozen layers stays active. Checkpoints store which parts are frozen
    and which parameter groups were added, so that a resumed run continues exactly. After the fit,
    all ``requires_grad`` flags are restored.

    Example::

        class EncoderFinetuning(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.encoder)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 5:
                    self.unfreeze_and_add_param_group(module.encoder, optimizer, lr=1e-4)

        trainer = Trainer(max_epochs=10, callbacks=[EncoderFinetuning()])
    """

    _trainer: Trainer | None = None  # while a fit runs
    _loaded: dict[str, Any]

    def freeze_before_training(self, module: TrainModule) -> None:
        """Freeze parts of the module; called before ``configure_optimizers``."""

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze parts; called for each optimizer at the beginning of each epoch (from 0)."""

    def freeze(self, modules: Modules, train_bn: bool = False) -> None:
        """Freeze the parameters, and the running statistics of batch normalisation.

        Args:
            modules: A module, or an iterable of modules, nested to any depth.
            train_bn: Do not freeze batch normalisation, which continues to train.
        """
        for module in _all_modules(modules):
            if not (train_bn and isinstance(module, _BatchNorm)):
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad = False
                self._freeze_statistics(module)

    def make_trainable(self, modules: Modules, train_bn: bool = True) -> None:
        """Undo :meth:`freeze`. Parts that the user froze or set to evaluation mode are unchanged.

        Args:
            modules: A module, or an iterable of modules, nested to any depth.
            train_bn: False leaves batch normalisation frozen.
        """
        names = {parameter: name for name, parameter in self._parameters()}
        for module in _all_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                for parameter in module.parameters(recurse=False):
                    name = names.get(parameter, "")
                    parameter.requires_grad = self._trainable.get(name, True)
                self._unfreeze_statistics(module)

    def unfreeze_and_add_param_group(
        self,
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Undo :meth:`freeze`, and add the parameters to the optimizer in a new group.

        The group follows the schedule of the first group, scaled, and has the first group's other
        options. Parameters that an optimizer already has stay in their group.

        Args:
            modules: A module, or an iterable of modules, nested to any depth.
            optimizer: The argument of :meth:`finetune_function`.
            lr: The group's learning rate.
            initial_denom_lr: Without `lr`, the first group's learning rate is divided by this.
            train_bn: False leaves batch normalisation frozen.
        """
        ratio = 1 / initial_denom_lr if lr is None else _ratio(lr, optimizer)
        self._unfreeze_and_add(modules, optimizer, ratio, train_bn)

    def _unfreeze_and_add(
        self, modules: Modules, optimizer: Optimizer, ratio: float, train_bn: bool = True
    ) -> None:
        assert self._trainer is not None
        self.make_trainable(modules, train_bn)
        groups = [group for prepared in self._trainer.optimizers for group in prepared.param_groups]
        taken = {id(p) for group in groups for p in group["params"]}
        ids = {id(p) for module in _all_modules(modules) for p in module.parameters(recurse=False)}
        new = {
            name: parameter
            for name, parameter in self._parameters()
            if parameter.requires_grad and id(parameter) in ids - taken
        }
        if new:
            self._trainer.add_param_group(optimizer, new, ratio=ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the frozen parts, and the last epoch that was begun."""
        if self._trainer is None:
            return getattr(self, "_final", {})
        return {
            "epoch": self._epoch,
            "frozen": [name for name, p in self._parameters() if not p.requires_grad],
            "norms": [name for name, part in self._parts() if part in self._norms],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store ``state`` until `on_load_checkpoint`, which gets the module."""
        self._loaded = state

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Record the ``requires_grad`` flags and modes, and freeze."""
        if stage != "fit":
            return
        self._trainer, self._module = trainer, module
        # By name: an engine may replace parameters.
        self._trainable = {name: p.requires_grad for name, p in self._parameters()}
        # If the whole module is in evaluation mode, `fit` puts all of it into training mode.
        self._modes = {part: part.training or not module.training for part in module.modules()}
        self._norms: dict[nn.Module, RemovableHandle] = {}
        self._epoch = -1
        self._loaded = {}
        self.freeze_before_training(module)

    def on_load_checkpoint(
        self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]
    ) -> None:
        """Freeze the parts that were frozen at the save."""
        if not self._loaded:
            return
        self._epoch = self._loaded["epoch"]
        frozen = set(self._loaded["frozen"])
        # An earlier release had put frozen modules of any kind into evaluation mode.
        asleep = set(self._loaded.get("asleep", ()))
        norms = asleep | set(self._loaded.get("norms", ()))
        for name, parameter in self._parameters():
            parameter.requires_grad = name not in frozen
        for name, part in self._parts():
            if name in asleep:
                part.training = self._modes.get(part, True)
            if name in norms:
                self._freeze_statistics(part)
            else:
                self._unfreeze_statistics(part)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Call `finetune_function`, unless the run resumes in the middle of the epoch."""
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            for optimizer in trainer.optimizers:
                self.finetune_function(module, trainer.current_epoch, optimizer)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Restore the module's ``requires_grad`` flags and modes."""
        if self._trainer is None:
            return
        self._final = self.state_dict()  # for a checkpoint that is saved after the fit
        for name, parameter in self._parameters():
            parameter.requires_grad = self._trainable.get(name, parameter.requires_grad)
        for norm in list(self._norms):
            self._unfreeze_statistics(norm)
        self._trainer = None

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return bare_names(self._module, self._module.named_parameters())

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        return bare_names(self._module, self._module.named_modules())

    def _freeze_statistics(self, module: nn.Module) -> None:
        if isinstance(module, _BatchNorm) and module not in self._norms:
            # A forward hook, because the user's code may call `train()` of a parent at any time.
            self._norms[module] = module.register_forward_pre_hook(_enter_evaluation_mode)

    def _unfreeze_statistics(self, module: nn.Module) -> None:
        if handle := self._norms.pop(module, None):
            handle.remove()
            module.training = self._modes.get(module, True) and self._module.training


def _enter_evaluation_mode(module: nn.Module, _: Any) -> None:
    module.training = False


class BackboneFinetuning(BaseFinetuning):
    """Train the head alone, then the backbone too, with a smaller learning rate that increases.

    The backbone is frozen until epoch ``unfreeze_backbone_at_epoch`` (from 0); its dropout stays
    active. Then its parameters are added to the first optimizer as a parameter group, whose
    learning rate is a fraction of the first group's. The fraction is multiplied by
    ``lambda_func(epoch)`` at each further epoch until it is 1. A learning rate schedule continues
    for both groups.

    ``configure_optimizers`` is called while the backbone is frozen, and should pass only parameters
    with ``requires_grad`` to the optimizer. If it passes the backbone's parameters in separate
    groups, these groups keep their learning rates and schedules, and the callback only freezes and
    unfreezes.

    The module must have its backbone when ``fit`` begins, not only after ``configure_model``.

    Example::

        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=5, backbone="encoder")
        trainer = Trainer(max_epochs=10, callbacks=[callback])

    Args:
        unfreeze_backbone_at_epoch: The first epoch, from 0, in which the backbone is trained.
        lambda_func: Returns the factor by which the fraction grows at an epoch.
        backbone_initial_ratio_lr: The initial fraction.
        backbone_initial_lr: The backbone's initial learning rate, instead of a fraction.
        should_align: False allows a learning rate of the backbone above the head's.
        train_bn: Train the backbone's batch normalisation from the start, and update its running
            statistics, while the other layers are frozen.
        verbose: Print the learning rates at the start of each epoch once the backbone is unfrozen.
        backbone: The path of the backbone in the module, such as ``"model.encoder"``.

    Raises:
        ValueError: An argument is invalid; in ``fit``, if the module has no such submodule, or an
            optimizer has parameters of the backbone and others in the same group.
        TypeError: ``lambda_func`` is not callable.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        *,
        train_bn: bool = False,
        verbose: bool = False,
        backbone: str = "backbone",
    ) -> None:
        check_counts(0, unfreeze_backbone_at_epoch=unfreeze_backbone_at_epoch)
        check_positive(backbone_initial_ratio_lr=backbone_initial_ratio_lr)
        check_positive(**given(backbone_initial_lr=backbone_initial_lr))
        if not callable(lambda_func):  # it is called epochs later
            raise TypeError(f"lambda_func is {lambda_func!r}; it must be a function of the epoch.")
        if not backbone:
            raise ValueError(
                f"backbone is {backbone!r}, which is the whole module, head included; name the "
                "submodule to freeze, such as 'backbone' or 'model.encoder'."
            )
        self.unfreeze_backbone_at_epoch = int(unfreeze_backbone_at_epoch)
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.train_bn = train_bn
        self.verbose = verbose
        self.backbone = backbone
        self._begin()

    def _begin(self) -> None:
        self._unfrozen = False
        self._group: int | None = None  # index in the first optimizer; None if none was added
        self._fraction = 0.0

    @property
    def state_key(self) -> str:
        """The name of the class with the path of the backbone."""
        return f"{super().state_key}({self.backbone})"

    def state_dict(self) -> dict[str, Any]:
        """Return the frozen parts and the current fraction of the learning rate."""
        state = {"unfrozen": self._unfrozen, "group": self._group, "fraction": self._fraction}
        return super().state_dict() | state

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Freeze the backbone."""
        if stage == "fit":
            self._begin()
        super().setup(trainer, module, stage)

    def freeze_before_training(self, module: TrainModule) -> None:
        """Freeze the backbone."""
        self.freeze(self._backbone(module), train_bn=self.train_bn)

    def on_load_checkpoint(
        self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the frozen parts and the current fraction of the learning rate."""
        super().on_load_checkpoint(trainer, module, checkpoint)
        if self._loaded:
            self._unfrozen = self._loaded["unfrozen"]
            self._group = self._loaded["group"]
            self._fraction = self._loaded["fraction"]

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Check that the backbone can have its own learning rate.

        Raises:
            ValueError: An optimizer has parameters of the backbone and others in the same group.
        """
        backbone_ids = {id(p) for p in self._backbone(module).parameters()}
        frozen_ids = {
            id(p)
            for name, p in self._parameters()
            if id(p) in backbone_ids and self._trainable.get(name, True) and not p.requires_grad
        }
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                ids = {id(p) for p in group["params"]}
                if ids & frozen_ids and ids - backbone_ids:
                    raise ValueError(
                        f"configure_optimizers put parameters of {self.backbone} and others into "
                        "one group. Pass [p for p in self.parameters() if p.requires_grad], or two "
                        "groups."
                    )

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone at its epoch, and increase its learning rate after that."""
        assert self._trainer is not None
        first = optimizer is self._trainer.optimizers[0]
        if epoch < self.unfreeze_backbone_at_epoch or not first:
            return
        if not self._unfrozen:
            lr, groups = self.backbone_initial_lr, len(optimizer.param_groups)
            ratio = self.backbone_initial_ratio_lr if lr is None else _ratio(lr, optimizer)
            self._unfreeze_and_add(self._backbone(module), optimizer, ratio)
            self._group = groups if len(optimizer.param_groups) > groups else None
            self._fraction, self._unfrozen = ratio, True
        elif self._group is not None:
            factor = self.lambda_func(epoch)
            check_positive(**{f"lambda_func({epoch})": factor})
            fraction = self._fraction * factor
            if self.should_align:
                fraction = min(fraction, max(self._fraction, 1.0))
            self._trainer.scale_learning_rate(optimizer, self._group, fraction / self._fraction)
            self._fraction = fraction
        if self.verbose:
            rates = ", ".join(f"{float(group['lr']):.3g}" for group in optimizer.param_groups)
            self._trainer.accelerator.print(
                f"BackboneFinetuning: epoch {epoch + 1}, learning rates {rates}"
            )

    def _backbone(self, module: TrainModule) -> nn.Module:
        try:
            return module.get_submodule(self.backbone)
        except AttributeError:
            submodules = ", ".join(name for name, _ in module.named_children()) or "none"
            raise ValueError(
                f"{type(module).__name__} has no submodule {self.backbone!r} when fit begins; "
                f"its submodules are {submodules}. Create it in __init__, or name another with "
                "backbone=..."
            ) from None


def _all_modules(modules: Modules) -> Iterator[nn.Module]:
    """Yield the modules of a module, itself included, or of an iterable nested to any depth."""
    if isinstance(modules, nn.Module):
        yield from modules.modules()
        return
    for module in modules:
        yield from _all_modules(module)


def _ratio(lr: float, optimizer: Optimizer) -> float:
    """Return the ratio of `lr` to the first group's learning rate."""
    first = float(optimizer.param_groups[0]["lr"])
    if first == 0:
        raise ValueError(
            "The first parameter group's learning rate is 0, so its schedule cannot be scaled to "
            f"{lr}. Unfreeze after the warm-up, or give a ratio (backbone_initial_ratio_lr)."
        )
    return lr / first
