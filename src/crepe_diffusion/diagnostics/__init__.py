"""Whether to trust what a sampler gave: estimates with errors, exchange between levels, and a verdict in words."""

from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.estimates import Estimate, ess, rhat
from crepe_diffusion.diagnostics.exchange import Diagnostics, RoundTrips
from crepe_diffusion.diagnostics.verdict import Verdict, verdict

__all__ = ["Diagnostics", "Estimate", "RoundTrips", "RunData", "Verdict", "ess", "rhat", "verdict"]
