"""Runs made in Python: their target, rewards and settings as an experiment and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.kernels import Bounce, Explorer, Langevin, SingleToken
from crepe_diffusion.processes import Process
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.run.experiment import Experiment
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.stitching import Restitch
from crepe_diffusion.targets import Reward, Target

__all__ = ["python_config", "python_experiment", "python_reward"]


def python_config(
    target: Target,
    ladder: Ladder,
    *,
    n_chains: int,
    seed: int,
    proposal: Proposal | None,
    explorer: Explorer | None,
    micro_batch: int | None,
    nonfinite: str,
    fit_samples: int,
    output: Mapping[str, Any],
) -> dict[str, Any]:
    """The configuration that says what the arguments of `Run` say."""
    proposal = proposal or Proposal()
    return {
        "experiment": "python",
        "ladder": {
            "kind": "times",
            "times": ladder.times.tolist(),
            "substeps": ladder.substeps,
            "finish": list(ladder.finish),
        },
        "sampler": {
            "n_chains": n_chains,
            "seed": seed,
            **_explorer_table(explorer),
            "proposal": proposal.k if isinstance(proposal.k, str) else list(proposal.k),
            "proposal_exponents": list(proposal.exponents or ()),
            "guidance": proposal.guidance or "",
            "clip": proposal.clip or 0.0,
            "micro_batch": micro_batch or 0,
            "nonfinite": nonfinite,
            "fit_samples": fit_samples,
        },
        "output": dict(output),
        "reward": [python_reward(r) for r in target.rewards],
    }


def python_experiment(
    target: Target,
    terms: Iterable[Reward],
    scalars: Mapping[str, Callable[[Tensor], Tensor]] | None,
    process: Process | None,
) -> Experiment:
    return Experiment(
        replace(target, rewards=()),
        scalars=dict(scalars or {}),
        process=process,
        terms={term.name: term for term in terms},
    )


def python_reward(term: Reward) -> dict[str, Any]:
    return {
        "name": term.name,
        "kind": "python",
        "scale": term.scale,
        "guidance": term.guidance,
        "on": term.on,
        "anneal": "python",
    }


def _explorer_table(explorer: Explorer | None) -> dict[str, Any]:
    match explorer:
        case None:
            return {"explorer": "none"}
        case Bounce(n_steps=n):
            return {"explorer": "bounce", "explorer_steps": n}
        case Langevin(scale=scale):
            return {"explorer": "langevin", "explorer_scale": scale}
        case SingleToken(n_moves=n):
            return {"explorer": "metropolis", "explorer_steps": n}
        case Restitch(n_candidates=n, chance=chance, between=between, n_steps=12, n_plans=64):
            return {
                "explorer": "restitch",
                "restitch_candidates": n,
                "restitch_chance": chance,
                "restitch_between": list(between),
            }
    raise InputError(f"a run keeps Bounce, Langevin, SingleToken, Restitch or None as its explorer; got {explorer!r}")
