"""How close low-rank backward passes come to the exact gradient: ``python scripts/gradient_error.py --help``"""

from efficient_ft.cli.gradient_error import main

if __name__ == "__main__":
    main()
