"""Images and texts for training: published data sets, a user's own folders, and their loaders.

>>> data = open_data(config.data, InputSpec((32, 32), (0.5,) * 3, (0.5,) * 3), seed=0)
>>> for images, labels in data.train_loader(): ...

Shuffling and augmentation are functions of (seed, epoch, index): the number of worker processes, the order of access
and the state of global generators change nothing.

A corrupt image stops the run with its path when it is first read (`data.on_corrupt=stop`): finding all of them in
advance costs a full decode of the data set. With `data.on_corrupt=skip` every image is decoded once at the start, and
unreadable ones are removed from their split and reported before anything is counted or shuffled, so that the run does
not depend on when they are read.
"""

from efficient_ft.data.image_data import ImageData
from efficient_ft.data.images import Decoding, read_image
from efficient_ft.data.round_robin import RoundRobinData, RoundRobinSampler
from efficient_ft.data.sampler import CounterSampler
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
