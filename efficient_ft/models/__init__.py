"""Networks and their weights (`factory`), and the view of a network that methods use (`view`)."""
