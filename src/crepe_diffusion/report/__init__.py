"""Pages for people: one run with its verdict first, or several side by side."""

from crepe_diffusion.report.report import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
