"""What every sampler does before and after: check its input, measure the Fisher information, finish samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Counts, Evaluator
from crepe_diffusion.models import Model
from crepe_diffusion.paths import denoise
from crepe_diffusion.processes import GaussianData, Process
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.information import fit_information
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = [
    "as_target",
    "finish",
    "packed",
    "part",
    "positive",
    "prepare",
    "prepare_again",
]


def as_target(target: Target | Model) -> Target:
    """A target, where a model alone stands for itself."""
    if isinstance(target, Model):
        target = target.as_target()
    if not isinstance(target, Target):
        raise InputError(f"the target must be a model or a product of models, got {target!r}")
    return target


def positive(name: str, value: int, least: int = 1) -> int:
    """The value as an integer of at least `least`."""
    if isinstance(value, bool) or int(value) != value or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise InputError(f"{name} must be {kind}, got {value!r}")
    return int(value)


def prepare(
    target: Target | Model,
    ladder: Ladder,
    stream: Stream,
    *,
    process: Process | None,
    proposal: Proposal | None,
    micro_batch: int | None,
    nonfinite: str,
    fit_samples: int,
    fit_on: Ladder | None = None,
    counts: Counts | None = None,
    start: Mapping[str, Tensor] | None = None,
    check: Callable[[Evaluator], None] = lambda evaluate: None,
    advance: Callable[[], object] = lambda: None,
) -> Evaluator:
    """An evaluator whose process is ready to be used; bad input is refused here, before anything long starts.

    Ladder, counts and what was measured come from the snapshot `start` where there is one: nothing is fitted again.
    `fit_on` has fewer times than the ladder where that is enough to measure on.
    """
    target, proposal = as_target(target), proposal or Proposal()
    process = process or target.models[0].process()
    if start is not None:
        ladder, counts = Ladder.from_state_dict(part(start, "ladder")), Counts.from_state_dict(part(start, "counts"))
        measured = part(start, "process")
        if process.needs_fit() and measured:
            process = process.restored(measured)
    if not isinstance(ladder, Ladder):
        raise InputError(f"ladder must be a Ladder, such as ladder.karras(51), got {ladder!r}")
    counts = counts or Counts()

    def evaluator(process: Process) -> Evaluator:
        return Evaluator(target, ladder, process, proposal, micro_batch=micro_batch, nonfinite=nonfinite, counts=counts)

    evaluate = evaluator(process)
    check(evaluate)
    if not process.needs_fit():
        return evaluate
    # Two rows are evaluated first: a model or reward of the wrong shape should fail now, not after the fit.
    # At the data end, since a reward may not be called at the noise end.
    n = evaluate.networks.n_conditions
    evaluator(process.fitted(GaussianData(0.0)))(evaluate.empty(2 * n), ladder.times[:1].expand(2 * n))
    fit_samples = -(-positive("fit_samples", fit_samples) // n) * n
    measured_on = ladder if fit_on is None else fit_on
    information = fit_information(
        target, measured_on, process, fit_samples, stream, micro_batch, counts, nonfinite, advance
    )
    return evaluator(process.fitted(information))


def prepare_again(
    evaluate: Evaluator,
    target: Target | Model,
    ladder: Ladder,
    stream: Stream,
    *,
    process: Process | None,
    fit_samples: int,
    check: Callable[[Evaluator], None] = lambda evaluate: None,
) -> Evaluator:
    """The evaluator for another target or ladder.

    The measured process stays where the models do; `process` is what the user gave, for other models.
    """
    target = as_target(target)
    return prepare(
        target,
        ladder,
        stream,
        process=evaluate.process if target.models == evaluate.target.models else process,
        proposal=evaluate.proposal,
        micro_batch=evaluate.micro_batch,
        nonfinite=evaluate.nonfinite,
        fit_samples=fit_samples,
        counts=evaluate.counts,
        check=check,
    )


def packed(evaluate: Evaluator, parts: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """A snapshot: what the evaluator has measured and counted, and these parts of a sampler, as tensors to keep."""
    shared = {
        "ladder": evaluate.ladder.state_dict(),
        "counts": evaluate.counts.state_dict(),
        "process": evaluate.process.state_dict(),
    }
    tensors = {
        f"{part}.{name}" if part else name: value
        for part, state in {**parts, **shared}.items()
        for name, value in state.items()
    }
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def part(snapshot: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """One part of a snapshot."""
    return {key[len(name) + 1 :]: value for key, value in snapshot.items() if key.startswith(name + ".")}


def finish(evaluate: Evaluator, x: Tensor, stream: Stream) -> Tensor:
    """Plain denoising by the proposal from level 0 through the ladder's finishing times."""
    times = [float(evaluate.ladder.times[0]), *evaluate.ladder.finish]
    for i in range(len(times) - 1):
        x = denoise(evaluate, x, times[i + 1], times[i], stream.at(i))
    return x
