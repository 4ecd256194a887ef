"""Measure recipes against each other: ``python scripts/bench.py step|layer|loop|gradient``, see ``--help``."""

from efficient_ft.cli.bench import main

if __name__ == "__main__":
    main()
