"""`python -m studies.minibatch`."""

from studies.minibatch.study import main

if __name__ == "__main__":
    main()
