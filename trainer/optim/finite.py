"""Detect non-finite gradients and losses on the device, before they reach a checkpoint.

NaN or infinity in gradients comes from a non-finite loss or from an overflow in the backward pass.
After the gradient reduction all ranks have the same gradients, so all find the same result without
further communication. A non-finite loss may have finite gradients, for example if a NaN constant is
added. A flag for such losses travels with the step sync.

On the CPU the result is available at once. On an accelerator the host reads it one update later,
or before an evaluation or a save, so that it does not wait for the device. With ``"stop"`` the
weights after the bad update are lost, but never saved. With ``"skip"`` a fused optimizer reads the
result on the device and skips the update itself. For other optimizers the host must read it, which
synchronises with the device once per update.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainer.checks import check_choice, check_counts
from trainer.distributed.guards import read_back
from trainer.distributed.objects import all_gather_object
from trainer.distributed.transport import HostCopy

Policy = Literal["stop", "skip", "ignore"]
POLICIES = ("stop", "skip", "ignore")
_SHOWN = 8  # the maximum number of names in an error
# The dtypes of the GradScaler kernel on CUDA; it takes bfloat16 only on the CPU (pytorch#127176).
# On MPS the kernel reads its scale on the host, and so waits for the device.
_KERNEL_DTYPES = (torch.float16, torch.float32, torch.float64)


def check_policy(policy: str, max_skipped_in_row: int) -> None:
    """Check the arguments `non_finite` and `max_skipped_in_row`.

    Raises:
        ValueError: The policy is unknown, or the limit is not an int of at least 1.
    """
    check_choice("non_finite", policy, POLICIES)
    check_counts(1, max_skipped_in_row=max_skipped_in_row)


def find_non_finite(gradients: Iterable[Tensor | None]) -> bool | Tensor | None:
    """Return whether any gradient holds NaN or infinity, without a device sync.

    Each gradient is read once, by the kernel of `GradScaler` with a scale of 1. On MPS, and for
    dtypes that the kernel does not support, the maximum norms are used.

    Args:
        gradients: The gradients, also sparse or complex ones; None is skipped.

    Returns:
        A bool on the CPU; on an accelerator a float32 tensor of shape (), 1 or 0; None without
        gradients.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if not present[0].is_cpu:
        return _any_non_finite_in_groups(present)
    found_inf = _ON_HOST.found_inf
    try:  # on the CPU one call takes several dtypes
        _set_if_non_finite(found_inf, present)
    except RuntimeError:  # sparse or complex gradients, or several devices
        found_inf.zero_()
        return _any_non_finite_in_groups(present)
    if not found_inf:
        return False
    found_inf.zero_()
    return True


class _OnHost(threading.local):
    """The kernel's flag on the CPU, made once: a new tensor takes half as long as the check."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # even if the first check runs in inference mode
            self.found_inf = torch.zeros((), dtype=torch.float32, device="cpu")


_ON_HOST = _OnHost()


def _any_non_finite_in_groups(gradients: list[Tensor]) -> bool | Tensor:
    result: Tensor | None = None
    for tensors in _by_device_and_dtype(gradients):
        kernel = tensors[0].dtype in _KERNEL_DTYPES and tensors[0].device.type != "mps"
        here = _any_non_finite(tensors) if kernel else _any_non_finite_norm(tensors)
        # The flag must be 0 or 1: fused optimizers compare it with 1 and subtract it from the step.
        result = here if result is None else torch.maximum(result, here.to(result.device))
    assert result is not None
    return bool(result) if result.is_cpu else result


def _any_non_finite(gradients: list[Tensor]) -> Tensor:
    found_inf = torch.zeros_like(_scalar_one(gradients[0].device))
    _set_if_non_finite(found_inf, gradients)
    return found_inf


def _set_if_non_finite(flag: Tensor, gradients: list[Tensor]) -> None:
    scale = _scalar_one(flag.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, scale)  # no public name


def _any_non_finite_norm(gradients: list[Tensor]) -> Tensor:
    """Return the same as `_any_non_finite`, from the maximum norms; other norms may overflow."""
    filled = [gradient for gradient in gradients if gradient.numel()]  # `max` needs an element
    if not filled:
        return torch.zeros_like(_scalar_one(gradients[0].device))
    return (~get_total_norm(filled, math.inf).isfinite()).float()


def _by_device_and_dtype(gradients: list[Tensor]) -> Collection[list[Tensor]]:
    """Group the gradients, as dense real tensors, by device and dtype, as the kernel requires."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        dense = gradient._values() if gradient.is_sparse else gradient
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        groups.setdefault((real.device, real.dtype), []).append(real)
    return groups.values()


@cache
def _scalar_one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)  # the dtype that the kernel requires


def is_non_finite(loss: Tensor) -> float | Tensor:
    """Return 1 if a loss is NaN or infinite, else 0; on an accelerator a tensor of shape ()."""
    if loss.is_cpu:
        return 0.0 if math.isfinite(loss.item()) else 1.0
    flag = _scalar_one(loss.device)
    return torch.where(loss.detach().abs() < math.inf, torch.zeros_like(flag), flag)


def names_of_non_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity; waits for the device."""
    return [name for name, tensor in named if tensor is not None and not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    return bool((tensor._values() if tensor.is_sparse else tensor).isfinite().all())


class FiniteGuard:
    """Applies the policy for updates with non-finite gradients or losses: stop or skip.

    Args:
        policy: ``"stop"`` raises an error, ``"skip"`` skips the update.
        limit: The run ends with an error after this many skipped updates in a row.
        optimizers: The user's optimizers.
        named_parameters: Returns the module's parameters by name, for the error.
        rank: The rank of this process, for the error.
        manual: Whether the run uses manual optimisation, for the error.

    Attributes:
        skipped: The number of skipped updates, by this policy or by the fp16 scaler.
        in_row: The number of skipped updates since the last update that was made.
        window_loss: A scalar that is finite only if all losses of this rank in the latest window
            are, for the error; None without one.
    """

    def __init__(
        self,
        policy: Policy,
        limit: int,
        *,
        optimizers: Sequence[Optimizer],
        named_parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        rank: int = 0,
        manual: bool = False,
    ) -> None:
        self._manual = manual
        self.policy = policy
        self.skipped = 0
        self.in_row = 0
        self.window_loss: Tensor | None = None
        self._limit = limit
        self._optimizers = list(optimizers)
        self._named_parameters = named_parameters
        self._rank = rank
        self._fused = all(
            getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers
        )
        self._pending: tuple[HostCopy, Callable[[bool], object]] | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the counts of skipped updates."""
        return {"skipped": self.skipped, "in_row": self.in_row}

    def load_state_dict(self, state: dict[str, int] | None) -> None:
        """Restore the counts of skipped updates; None if the saved run ignored them."""
        if state is not None:
            self.skipped, self.in_row = state["skipped"], state["in_row"]

    def should_step(self, non_finite: bool | Tensor | None, step: int, loss: Tensor | None) -> bool:
        """Return whether the optimizers should step.

        On an accelerator the result may be read later; the update is then made (``"stop"``), or
        skipped by the fused optimizers themselves (``"skip"``).

        Args:
            non_finite: Whether a gradient or loss is non-finite: a bool, a device tensor of shape
                () that is 0 or 1 (passed on to fused optimizers), or None without gradients.
            step: The number of the update, from 1.
            loss: The latest loss of this rank, for the error.

        Raises:
            FloatingPointError: The policy is ``"stop"``, and this update or the one before is
                non-finite; or too many updates were skipped in a row.
        """
        if self._pending is not None:
            self.read_pending()
        if not isinstance(non_finite, Tensor) or (self.policy == "skip" and not self._fused):
            bad = bool(read_back(non_finite) if isinstance(non_finite, Tensor) else non_finite)
            if bad:
                return self._judge(bad, step, loss, self.window_loss, made=False)
            self.in_row = 0
            return True
        if self.policy == "skip":
            for optimizer in self._optimizers:
                # torch's fused optimizers read these attributes, which no class declares
                optimizer.grad_scale, optimizer.found_inf = None, non_finite  # type: ignore[attr-defined]
        judge = partial(self._judge, step=step, loss=loss, window_loss=self.window_loss, made=True)
        self._pending = HostCopy(non_finite), judge
        return True

    def read_pending(self) -> None:
        """Wait for the result of the latest update, for example before an evaluation or a save.

        Raises:
            FloatingPointError: See `should_step`.
        """
        if self._pending is not None:
            copied, judge = self._pending
            self._pending = None
            bad = bool(copied.read())
            for optimizer in self._optimizers:
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
            judge(bad)

    def count_scaled(self, skipped: Sequence[bool | Tensor], step: int) -> None:
        """Count an update that the fp16 scaler has made or skipped.

        Args:
            skipped: For each optimizer, whether it skipped the update; a device tensor for a fused
                optimizer.
            step: The number of the update, from 1.

        Raises:
            FloatingPointError: Too many updates were skipped in a row.
        """
        self.read_pending()
        unread = [flag for flag in skipped if isinstance(flag, Tensor)]
        if unread and not unread[0].is_cpu:
            count = torch.stack([flag.float() for flag in unread]).sum()
            self._pending = HostCopy(count), partial(self._count, step=step)
        else:
            self._count(any(map(bool, skipped)), step)

    def _judge(
        self,
        bad: bool,
        step: int,
        loss: Tensor | None,
        window_loss: Tensor | None,
        *,
        made: bool,
    ) -> bool:
        if bad and self.policy == "stop":
            losses = self._losses(loss, window_loss)
            raise FloatingPointError(self._report(step, losses, made=made))
        if not bad:
            self.in_row = 0
            return True
        self._count(bad, step)
        return False

    def _count(self, skipped: bool, step: int) -> None:
        self.skipped += skipped
        self.in_row = self.in_row + 1 if skipped else 0
        if self.in_row >= self._limit:
            raise FloatingPointError(
                f"The gradients of {self.in_row} updates in a row, up to update {step}, held NaN "
                "or infinity; all were skipped. A lower learning rate, max_grad_norm or bf16 "
                "instead of fp16 may help; max_skipped_in_row sets the limit."
            )

    def _losses(self, loss: Tensor | None, window_loss: Tensor | None) -> str:
        """Return a sentence about the NaN and infinite losses of all ranks, else about this rank's.

        It is collective. All ranks find the same gradients, so all ranks call it.
        """
        if self._manual:
            return ""
        local = None if window_loss is None else float(window_loss)
        every = all_gather_object(local) if dist.is_initialized() else [local]
        bad = [(r, value) for r, value in enumerate(every) if value and not math.isfinite(value)]
        if not bad:
            return (
                "" if loss is None else f" The last loss on rank {self._rank} was {float(loss):g}."
            )
        losses = [f"on rank {rank} was {value:g}" for rank, value in bad[:_SHOWN]]
        more = f" and {len(bad) - _SHOWN} more" * (len(bad) > _SHOWN)
        return f" The loss {', '.join(losses)}{more}."

    def _report(self, step: int, losses: str, *, made: bool) -> str:
        parameters = list(self._named_parameters())
        if made:
            what = "the update was made and its weights are lost"
            names = names_of_non_finite(parameters)
        else:
            what = "the update was not made"
            names = names_of_non_finite((name, p.grad) for name, p in parameters)
        shown = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        )
        bad = f"The gradients of update {step} hold NaN or infinity ({what}), of: {shown}."
        if not names:
            bad = (
                f"A loss of update {step} is NaN or infinite ({what}), although the gradients are "
                "finite."
            )
        others = "Trainer(non_finite='skip') skips such updates"
        if self._manual:
            others = "Trainer(non_finite='ignore') leaves the check to training_step"
        return f"{bad}{losses} Trainer(detect_anomaly=True) finds the operation; {others}."
