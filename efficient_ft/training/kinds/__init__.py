"""The task kinds, one object per kind: classification, segmentation, text, and several data sets in alternation."""
