"""The kinds of task, one object for each: classification, segmentation, text, and several data sets in turn."""
