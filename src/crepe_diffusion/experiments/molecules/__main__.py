"""python -m crepe_diffusion.experiments.molecules COMMAND"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from crepe_diffusion.errors import InputError
from crepe_diffusion.experiments.molecules.peptides import PEPTIDES, peptide

DATA = Path("data/molecules")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m crepe_diffusion.experiments.molecules", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--peptide", choices=PEPTIDES, default="dipeptide")
    shared.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="where trajectories are kept")

    sub = commands.add_parser("md", parents=[shared], help="molecular dynamics; goes on where it was left")
    sub.add_argument("--temperature", type=float, nargs="+", metavar="K", help="rungs (default: the peptide's own)")
    sub.add_argument("--walker", type=int, default=0, metavar="I", help="one process, one folder, one start")
    sub.add_argument("--ns", type=float, default=250.0, help="length of each rung's trajectory, since the beginning")
    sub.add_argument("--seed", type=int, default=0)
    sub.set_defaults(command=_md)

    given = parser.parse_args(argv)
    try:
        return given.command(given)
    except InputError as error:
        print(f"molecules: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _md(given: argparse.Namespace) -> int:
    from crepe_diffusion.experiments.molecules.dynamics import BLOCK, INTERVAL, Walker

    chosen = peptide(given.peptide)
    temperatures = tuple(given.temperature or chosen.temperatures)
    walker = Walker(
        given.data / chosen.name / f"walker-{given.walker}", chosen, temperatures, given.walker, given.seed
    )
    state = walker.open()
    wanted = round(given.ns * 1000 / (BLOCK * INTERVAL))
    first, began, said = state.n_blocks, time.monotonic(), 0.0
    for state in walker.run(state) if first < wanted else ():
        done, spent = state.n_blocks, time.monotonic() - began
        if spent - said > 60 or done == wanted:
            said = spent
            length = done * BLOCK * INTERVAL / 1000
            speed = (done - first) * BLOCK * INTERVAL / 1000 * len(temperatures) / spent * 3600
            share = state.n_accepted / max(1, state.n_attempted)
            print(
                f"{chosen.name} walker {given.walker}: {length:.2f} of {given.ns:g} ns at each of {len(temperatures)} "
                f"rungs, {speed:.0f} ns/h in all, neighbours accept {share:.3f}",
                flush=True,
            )
        if done >= wanted:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
