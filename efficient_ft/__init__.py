"""efficient-ft: fine-tune pretrained vision models with little memory, compute and time."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("efficient-ft")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"
