"""`python -m crepe_diffusion`, which torchrun needs."""

import sys

from crepe_diffusion.cli import main

if __name__ == "__main__":
    sys.exit(main())
