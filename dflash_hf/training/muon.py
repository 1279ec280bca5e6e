"""Muon for the matrices and AdamW for the rest, in one optimizer that a Trainer steps, schedules and saves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim.adamw import adamw

# The quintic iteration's coefficients and the rule that gives Muon's update the RMS of AdamW's are torch's own.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def orthogonalize(matrix: torch.Tensor, *, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Nearly orthogonal factor of a matrix by Newton-Schulz iteration.

    Source: Muon (Keller Jordan, 2024), as in `torch.optim.Muon`, which fixes bf16; on a CPU without bf16 units fp32 is
    several times faster.

    Args:
        matrix: `[m, n]`.
        steps: iterations, 5 is usual.
        dtype: of the iteration.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonWithAdamW(torch.optim.Muon):
    """`torch.optim.Muon` with a choice of iteration dtype, and a second parameter group stepped by AdamW.

    Args:
        matrices: 2-D parameters, for Muon.
        others: parameters for AdamW (norms, biases).
        lr: Muon's learning rate, scaled to the RMS of AdamW's update (`match_rms_adamw`).
        adamw_lr: AdamW's learning rate.
        weight_decay: of the matrices.
        iteration_dtype: dtype of the Newton-Schulz iteration.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        adamw_lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        iteration_dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        for group in self.param_groups:
            group["algorithm"] = "muon"
        others = list(others)
        if others:
            self.add_param_group(
                {
                    "params": others,
                    "algorithm": "adamw",
                    "lr": adamw_lr,
                    "weight_decay": 0.0,
                    "betas": betas,
                    "eps": adamw_eps,
                }
            )
        self.iteration_dtype = iteration_dtype

    @torch.no_grad()
    def step(self, closure=None):
        """One update of both groups; `closure` as in every torch optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
            else:
                self._step_muon(group)
        return loss

    def _step_muon(self, group: dict) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            update = orthogonalize(update, steps=group["ns_steps"], dtype=self.iteration_dtype)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)

    def _step_adamw(self, group: dict) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
