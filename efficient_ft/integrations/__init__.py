"""The callbacks that carry methods in training loops of other libraries."""
