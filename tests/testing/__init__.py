"""Tests of the test kit for methods."""
