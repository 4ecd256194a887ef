"""Networks and their weights (`factory`), and a view of a network for methods (`view`)."""
