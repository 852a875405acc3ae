"""`python -m studies.kernels`."""

from studies.kernels.table import main

if __name__ == "__main__":
    main()
