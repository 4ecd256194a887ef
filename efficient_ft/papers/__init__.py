"""The published tables of the four papers as data (`published`), and their costs by the papers' own rules (`rules`)."""
