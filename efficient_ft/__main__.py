"""``python -m efficient_ft``: the same as the command ``efficient-ft``."""

from efficient_ft.cli.entry import main

if __name__ == "__main__":
    main()
