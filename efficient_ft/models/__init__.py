"""Models: timm classifiers and their weights (`factory`), and the view of a model that methods use (`view`)."""
