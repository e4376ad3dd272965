"""Gradients that are no numbers: found on the device, before they reach the weights or a save.

NaN and infinity in the gradients of an update come from a loss that is none, or from an overflow on
the way back. After the reduction all processes have the same gradients, so each of them finds the
same, and they need not ask each other. A loss may be none and its gradients finite, as where a
constant is; that a process has such a one travels with the reduction.

On the CPU the answer is there at once. On an accelerator it is read an update later, or before an
evaluation or a save, so that nobody waits for the device: with ``"stop"`` the weights of the bad
update are lost, but never saved. With ``"skip"`` a fused optimizer leaves the weights alone by
itself, since it is given the answer on the device; for others it has to be read, which waits once
an update.
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
_SHOWN = 8  # names in an error


def check_policy(policy: str, max_skipped_in_row: int) -> None:
    """Refuse what is no policy.

    Raises:
        ValueError: It is none, or the limit is below 1.
        TypeError: The limit is no int.
    """
    if policy not in POLICIES:
        raise ValueError(choose("non_finite", policy, POLICIES))
    if isinstance(max_skipped_in_row, bool) or not isinstance(max_skipped_in_row, int):
        raise TypeError(f"max_skipped_in_row is {max_skipped_in_row!r}; it must be an int.")
    if max_skipped_in_row < 1:
        raise ValueError(f"max_skipped_in_row is {max_skipped_in_row}; it must be at least 1.")


def find_non_finite(gradients: Iterable[Tensor | None]) -> bool | Tensor | None:
    """Whether any gradient holds NaN or infinity.

    The kernel that gradient scalers use, at a scale of 1; it reads each gradient once.

    Returns:
        On an accelerator a float32 tensor there of shape (), 1 or 0; None without gradients.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if present[0].is_cpu:
        try:
            return bool(_look_through(present))  # at once, of whatever types
        except RuntimeError:  # but not sparse or complex ones, nor on several devices
            return _look_through_groups(present)
    return _look_through_groups(present)


def _look_through_groups(gradients: list[Tensor]) -> bool | Tensor:
    found: Tensor | None = None
    for tensors in _alike(gradients):
        here = _look_through(tensors)
        # At most 1: fused optimizers take nothing else for a yes, and subtract it from their steps.
        found = here if found is None else torch.maximum(found, here.to(found.device))
    assert found is not None
    return bool(found) if found.is_cpu else found


def _look_through(gradients: list[Tensor]) -> Tensor:
    one = _one(gradients[0].device)
    found = torch.zeros_like(one)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, one)
    return found


def _alike(gradients: list[Tensor]) -> Collection[list[Tensor]]:
    """What the gradients hold, as real numbers, in groups that the kernel takes together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        dense = gradient._values() if gradient.is_sparse else gradient
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        groups.setdefault((real.device, real.dtype), []).append(real)
    return groups.values()


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)  # of the type that the kernel takes


def is_non_finite(loss: Tensor) -> float | Tensor:
    """Whether a loss is NaN or infinite, 1 or 0; on an accelerator a tensor there, which waits."""
    if loss.is_cpu:
        return 0.0 if math.isfinite(loss.item()) else 1.0
    return (~loss.isfinite()).float()


def names_of_non_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """The names of the tensors that hold NaN or infinity; this waits for the device."""
    return [name for name, tensor in named if tensor is not None and not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    return bool((tensor._values() if tensor.is_sparse else tensor).isfinite().all())


class FiniteGuard:
    """What becomes of an update whose gradients are not finite.

    Args:
        policy: ``"stop"`` raises, ``"skip"`` leaves the update out.
        limit: So many skipped in a row end the run after all.
        optimizers: Those of the run.
        named_parameters: The module's, for the error.
        rank: Of this process, for the error.
        manual: `training_step` decides about updates, for the error.

    Attributes:
        skipped: Updates that were left out, by this policy or by the scaler of fp16.
        in_row: Of those, the latest without one that was made.
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
        """The counts."""
        return {"skipped": self.skipped, "in_row": self.in_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting."""
        self.skipped, self.in_row = state["skipped"], state["in_row"]

    def admits(self, found: bool | Tensor | None, step: int, loss: Tensor | None) -> bool:
        """Whether to make the update.

        Args:
            found: True or above 0 if not, see `find_non_finite` and `is_non_finite`; a fused
                optimizer is given it too.
            step: The update's number.
            loss: The latest of this process, for the error.

        Raises:
            FloatingPointError: It is not to be made, or an earlier one should not have been, and
                the policy is to stop; or too many were skipped in a row.
        """
        if self._pending is not None:
            self.settle()
        if not isinstance(found, Tensor) or (self.policy == "skip" and not self._fused):
            return self._judge(bool(found), step, loss, made=False)
        if self.policy == "skip":
            for optimizer in self._optimizers:
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
        """Hear of the latest update, before an evaluation or a save.

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
        """Count an update that the scaler of fp16 has made or left out.

        Args:
            skipped: By each optimizer; a fused one's is still on the device.
            step: The update's number.

        Raises:
            FloatingPointError: Too many were left out in a row.
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
                "or infinity; none of them was made. A lower learning rate, max_grad_norm or bf16 "
                "in place of fp16 may help; max_skipped_in_row says how many are allowed."
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
                "though the gradients are not."
            )
        others = "Trainer(non_finite='skip') leaves such updates out"
        if self._manual:
            others = "Trainer(non_finite='ignore') leaves it to training_step to look"
        return f"{bad}{said} Trainer(detect_anomaly=True) finds the operation; {others}."
