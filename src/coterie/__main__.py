"""`python -m coterie` is the same as `coterie`."""

from coterie.cli.main import main

if __name__ == "__main__":
    main()
