"""Entry point of ``python -m efficient_ft``, which is equivalent to the command ``efficient-ft``."""

from efficient_ft.cli.entry import main

if __name__ == "__main__":
    main()
