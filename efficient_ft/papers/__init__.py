"""The published tables of the four papers as data (`published`), and the papers' cost formulas (`rules`)."""
