"""Fine-tune a model: ``python train.py --help``. The same as the installed command ``efficient-ft``."""

from efficient_ft.cli.entry import main

if __name__ == "__main__":
    main()
