"""Kinds of task: image classification, segmentation, text classification, and training on several data sets in turn."""
