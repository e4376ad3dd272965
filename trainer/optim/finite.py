"""Detect non-finite gradients on the device, before they reach a checkpoint.

NaN and infinity in the gradients of an update come from a non-finite loss, or from an overflow in
backward. After the reduction all processes have the same gradients, so each finds the same result
without further communication. A non-finite loss may have finite gradients, for example if NaN comes
from a constant; the flag for such a loss is part of the reduction.

On the CPU the result is available at once. On an accelerator it is read one update later, or before
an evaluation or a save, so that the host does not wait for the device: with ``"stop"`` the weights
after the bad update are lost, but never saved. With ``"skip"`` a fused optimizer skips the update
itself, since it gets the result on the device; for others the host has to read it, which
synchronises once per update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import choose

Policy = Literal["stop", "skip", "ignore"]
POLICIES = ("stop", "skip", "ignore")
_SHOWN = 8  # names listed in an error
# The dtypes of the scalers' kernel on CUDA; it takes bfloat16 only on the CPU (pytorch#127176).
_KERNEL_DTYPES = (torch.float16, torch.float32, torch.float64)


def check_policy(policy: str, max_skipped_in_row: int) -> None:
    """Check the policy and its limit.

    Raises:
        ValueError: The policy is unknown, or the limit is below 1.
        TypeError: The limit is not an int.
    """
    if policy not in POLICIES:
        raise ValueError(choose("non_finite", policy, POLICIES))
    if isinstance(max_skipped_in_row, bool) or not isinstance(max_skipped_in_row, int):
        raise TypeError(f"max_skipped_in_row is {max_skipped_in_row!r}; it must be an int.")
    if max_skipped_in_row < 1:
        raise ValueError(f"max_skipped_in_row is {max_skipped_in_row}; it must be at least 1.")


def find_non_finite(gradients: Iterable[Tensor | None]) -> bool | Tensor | None:
    """Return whether any gradient holds NaN or infinity.

    This uses the kernel of gradient scalers with a scale of 1 or, for dtypes that it lacks, the
    largest magnitudes; it reads each gradient once.

    Returns:
        A bool on the CPU; on an accelerator a float32 tensor of shape (), 1 or 0; None without
        gradients.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if present[0].is_cpu:
        try:
            return bool(_look_through(present))  # in one call, also for mixed dtypes
        except RuntimeError:  # not for sparse or complex gradients, nor for several devices
            return _look_through_groups(present)
    return _look_through_groups(present)


def _look_through_groups(gradients: list[Tensor]) -> bool | Tensor:
    found: Tensor | None = None
    for tensors in _alike(gradients):
        look = _look_through if tensors[0].dtype in _KERNEL_DTYPES else _look_at_maxima
        here = look(tensors)
        # Keep the flag at 1: fused optimizers compare with 1, and subtract it from their step.
        found = here if found is None else torch.maximum(found, here.to(found.device))
    assert found is not None
    return bool(found) if found.is_cpu else found


def _look_through(gradients: list[Tensor]) -> Tensor:
    one = _one(gradients[0].device)
    found = torch.zeros_like(one)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, one)
    return found


def _look_at_maxima(gradients: list[Tensor]) -> Tensor:
    """As `_look_through`, from the maximum norms, which cannot overflow as other norms can."""
    filled = [gradient for gradient in gradients if gradient.numel()]  # empty ones have no maximum
    if not filled:
        return torch.zeros_like(_one(gradients[0].device))
    maxima = torch.stack(torch._foreach_norm(filled, math.inf))
    return (~maxima.isfinite().all()).float()


def _alike(gradients: list[Tensor]) -> Collection[list[Tensor]]:
    """Group the gradients' values, as real numbers, by device and dtype for the kernel."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        dense = gradient._values() if gradient.is_sparse else gradient
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        groups.setdefault((real.device, real.dtype), []).append(real)
    return groups.values()


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)  # the dtype that the kernel requires


def is_non_finite(loss: Tensor) -> float | Tensor:
    """Return 1 if a loss is NaN or infinite, else 0; on an accelerator as a tensor there."""
    if loss.is_cpu:
        return 0.0 if math.isfinite(loss.item()) else 1.0
    return (~loss.isfinite()).float()


def names_of_non_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity; synchronises with the device."""
    return [name for name, tensor in named if tensor is not None and not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    return bool((tensor._values() if tensor.is_sparse else tensor).isfinite().all())


class FiniteGuard:
    """Decides what to do with an update whose gradients are not finite.

    Args:
        policy: ``"stop"`` raises, ``"skip"`` skips the update.
        limit: The number of updates skipped in a row that ends the run.
        optimizers: The optimizers of the run.
        named_parameters: Returns the module's parameters, for the error.
        rank: The rank of this process, for the error.
        manual: Whether the run uses manual optimisation, for the error.

    Attributes:
        skipped: The number of updates skipped, by this policy or by the fp16 scaler.
        in_row: The number of latest updates that were all skipped.
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
        self._limit = limit
        self._optimizers = list(optimizers)
        self._named_parameters = named_parameters
        self._rank = rank
        self._fused = all(
            getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers
        )
        self._pending: tuple[Tensor, Any, Callable[[bool], object]] | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"skipped": self.skipped, "in_row": self.in_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counts."""
        self.skipped, self.in_row = state["skipped"], state["in_row"]

    def admits(self, found: bool | Tensor | None, step: int, loss: Tensor | None) -> bool:
        """Return whether to make the update.

        Args:
            found: True or above 0 if it is non-finite, see `find_non_finite` and `is_non_finite`;
                fused optimizers get the tensor too.
            step: The update's number.
            loss: The latest loss of this process, for the error.

        Raises:
            FloatingPointError: This update or the one before is non-finite and the policy is
                ``"stop"``; or too many were skipped in a row.
        """
        if self._pending is not None:
            self.settle()
        if not isinstance(found, Tensor) or (self.policy == "skip" and not self._fused):
            return self._judge(bool(found), step, loss, made=False)
        if self.policy == "skip":
            for optimizer in self._optimizers:
                # what torch's fused optimizers read, and no class declares
                optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
        self._read_later(found, lambda bad: self._judge(bad, step, loss, made=True))
        return True

    def _read_later(self, found: Tensor, judge: Callable[[bool], object]) -> None:
        host = torch.empty_like(found, device="cpu", pin_memory=found.device.type == "cuda")
        host.copy_(found, non_blocking=True)
        event = torch.Event(found.device)
        event.record()
        self._pending = (host, event, judge)

    def settle(self) -> None:
        """Read the result of the latest update, before an evaluation or a save.

        Raises:
            FloatingPointError: See `admits`.
        """
        if self._pending is not None:
            host, event, judge = self._pending
            self._pending = None
            event.synchronize()
            for optimizer in self._optimizers:
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
            judge(bool(host))

    def count_scaled(self, skipped: Sequence[bool | Tensor], step: int) -> None:
        """Count an update that the fp16 scaler has made or skipped.

        Args:
            skipped: Whether each optimizer skipped it; on the device for a fused optimizer.
            step: The update's number.

        Raises:
            FloatingPointError: Too many updates were skipped in a row.
        """
        self.settle()
        unread = [one for one in skipped if isinstance(one, Tensor)]
        if unread and unread[0].device.type != "cpu":
            found = torch.stack([one.float() for one in unread]).sum()
            self._read_later(found, lambda bad: self._count(bad, step))
        else:
            self._count(any(map(bool, skipped)), step)

    def _judge(self, bad: bool, step: int, loss: Tensor | None, *, made: bool) -> bool:
        if bad and self.policy == "stop":
            raise FloatingPointError(self._report(step, loss, made=made))
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

    def _report(self, step: int, loss: Tensor | None, *, made: bool) -> str:
        parameters = list(self._named_parameters())
        if made:
            what = "its weights, which no checkpoint holds, are lost"
            names = names_of_non_finite(parameters)
        else:
            what = "it was not made"
            names = names_of_non_finite((name, p.grad) for name, p in parameters)
        shown = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        )
        said = "" if loss is None else f" The last loss of rank {self._rank} was {float(loss):g}."
        bad = f"The gradients of update {step} hold NaN or infinity ({what}), of: {shown}."
        if not names:
            bad = (
                f"A loss of update {step} is NaN or infinite ({what}), on this process or another, "
                "although the gradients are finite."
            )
        others = "Trainer(non_finite='skip') skips such updates"
        if self._manual:
            others = "Trainer(non_finite='ignore') leaves the check to training_step"
        return f"{bad}{said} Trainer(detect_anomaly=True) finds the operation; {others}."
