"""Data sets for training: published data sets, user folders, and their loaders.

>>> data = open_data(config.data, InputSpec((32, 32), (0.5,) * 3, (0.5,) * 3), seed=0)
>>> for images, labels in data.train_loader(): ...

Shuffling and augmentation depend only on (seed, epoch, index), and not on the number of worker processes, the access
order or the state of global random generators.

With `data.on_corrupt=stop`, the run stops at the first corrupt image. The error contains the path of the image.
With `data.on_corrupt=skip`, all images are decoded once at the start. Unreadable images are removed and reported.
"""

from efficient_ft.data.image_data import ImageData
from efficient_ft.data.images import Decoding, read_image
from efficient_ft.data.round_robin import RoundRobinData, RoundRobinSampler
from efficient_ft.data.samplers import CounterSampler
from efficient_ft.data.segmentation_data import SegmentationData
from efficient_ft.data.sources import class_count, missing_data, open_data, open_texts, read_data
from efficient_ft.data.text_data import TextData
from efficient_ft.data.transforms import Transform

__all__ = [
    "CounterSampler",
    "Decoding",
    "ImageData",
    "RoundRobinData",
    "RoundRobinSampler",
    "SegmentationData",
    "TextData",
    "Transform",
    "class_count",
    "missing_data",
    "open_data",
    "open_texts",
    "read_data",
    "read_image",
]
