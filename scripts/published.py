"""The papers' cost columns next to our count by the same rules: ``python scripts/published.py``"""

from efficient_ft.cli.published import main

if __name__ == "__main__":
    main()
