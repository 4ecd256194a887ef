"""Kinds of task: classification, segmentation, text classification, and several data sets in turn."""
