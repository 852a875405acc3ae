"""Measures the Fisher information of models, from their own samples or from data.

    A_t = t^2 E[score score^T] = 1 - E[(x_0 - D(x_t)) (x_0 - D(x_t))^T] / t^2

In which form it is kept (one number, one per coordinate, a matrix) is decided by the process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crepe_diffusion.batches import called, rows_like
from crepe_diffusion.devices import as_real, real
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Counts, Evaluator
from crepe_diffusion.models import Model
from crepe_diffusion.processes import GaussianData, GaussianProcess, Measured, Process
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["fit_information", "information_from_data"]


def fit_information(
    target: Target,
    ladder: Ladder,
    process: Process,
    n_samples: int,
    stream: Stream,
    micro_batch: int | None = None,
    counts: Counts | None = None,
    nonfinite: str = "raise",
    advance: Callable[[], object] = lambda: None,
) -> Measured:
    """`t^2 I_j,t` of each model on every time of the ladder, from the model's own samples.

    One pass of plain denoising per model; each step uses the variance measured at its start. Costs
    `n_samples * (M K + 1)` evaluations per model. `advance` is called after every time of every model.
    """
    process, kind = _unmeasured(process)
    if int(n_samples) != n_samples or n_samples < 16:
        raise InputError(f"the Fisher variance needs at least 16 samples, got {n_samples!r}")
    times, plain = ladder.times, process.fitted(GaussianData(0.0))
    tables, means = [], []
    for j, model in enumerate(target.models):
        evaluate = Evaluator(
            model.as_target(),
            ladder,
            plain,
            Proposal("paper"),
            micro_batch=micro_batch,
            counts=counts,
            nonfinite=nonfinite,
        )
        n = process.dimension(torch.Size(model.event_shape))
        branch, x = stream.at(j), evaluate.noise(stream.at(j, "noise"), n_samples)
        values: list[Tensor] = []
        for i in range(len(times) - 1, -1, -1):
            t = evaluate.times[i].expand(n_samples)
            seen = evaluate(x, times[i].expand(n_samples))
            finite = seen.possible
            score = as_real(process.coordinates(seen.drift))[finite]
            values.append(kind.of_scores(score, float(times[i]), n))
            advance()
            if i == len(times) - 1:
                means.append(as_real(process.coordinates(seen.predictions[0]))[finite].mean(0))
            if i:
                s = evaluate.times[i - 1].expand(n_samples)
                here = kind(times[i : i + 1], values[-1][None, None], means[-1][None])
                x = x + rows_like((t - s) * (t + s), x).to(x.dtype) * process.project(seen.drift)
                x = x + process.scaled_noise(branch.at(i), x, process.fitted(here).model_variance(0, s, t))
        tables.append(torch.stack(values[::-1]))
    return kind(times, *(torch.stack(values).cpu().to(torch.float64) for values in (tables, means)))


def information_from_data(
    model: Model, data: Tensor, times: Tensor, process: GaussianProcess, stream: Stream
) -> Measured:
    """The same from samples of the data, for `process.fitted(...)`.

    More precise than samplers can measure it where t is large, since there the error is nearly all of the data's
    variance. Costs `len(data) * len(times)` evaluations.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.processes import Gaussian
    >>> model = GaussianMixture([1.0], [[0.0, 0.0]], [[0.5, 2.0]])
    >>> data = Stream(0).normal((4000, 2)) * torch.tensor([0.5, 2.0])
    >>> diagonal = Gaussian(variance="fisher-diagonal")
    >>> measured = information_from_data(model, data, torch.tensor([1.0], dtype=torch.float64), diagonal, Stream(1))
    >>> [round(a, 1) for a in measured.values[0, 0].tolist()]  # t^2 / (t^2 + rho^2)
    [0.8, 0.2]
    """
    process, kind = _unmeasured(process)
    x = process.project(data)
    n = process.dimension(x.shape[1:])
    values = []
    for i, t in enumerate(times.tolist()):
        t_rows = torch.full((len(x),), t, dtype=real(x.device), device=x.device)
        noisy = x + process.scaled_noise(stream.at(i), x, (t_rows**2)[:, None])
        with torch.no_grad():
            predicted = called(model.predict, "the model", noisy, t_rows)
            error = as_real(process.coordinates(predicted - x))
        values.append(kind.of_errors(error, t, n))
    mean = as_real(process.coordinates(data)).mean(0)
    return kind(times, torch.stack(values)[None].cpu(), mean[None].cpu())


def _unmeasured(process: Process) -> tuple[GaussianProcess, type[Measured]]:
    """The process and the form of what it needs; a process that needs nothing is refused."""
    kind = process.to_measure()
    if kind is None or not isinstance(process, GaussianProcess):
        raise InputError(
            f"nothing is to be measured for {process!r}; a Gaussian process without information would be right"
        )
    return process, kind
