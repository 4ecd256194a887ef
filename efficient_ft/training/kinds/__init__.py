"""The kinds of task, one object per kind: classification, segmentation, text, and several data sets in turn."""
