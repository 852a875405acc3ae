"""`python -m studies.bench`."""

from studies.bench.bench import main

if __name__ == "__main__":
    main()
