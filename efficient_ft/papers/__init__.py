"""Cost tables of the papers as data, compared with our count by the papers' own rules (`efficient_ft.cost.published`).

Nothing is trained or run; a comparison needs neither data nor weights.
"""

from efficient_ft.papers import back_razor, bsr
from efficient_ft.papers.table import Count, Row, Table, comparison

#: Every table of memory, in the order in which they are printed.
TABLES = (back_razor.VIT, back_razor.CNN, back_razor.RESNET, *bsr.TABLES)

__all__ = ["TABLES", "Count", "Row", "Table", "back_razor", "bsr", "comparison"]
